"""MoEvement: when windows begin, how long they are, and what they say about themselves."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.core.placement import Placement
from moe_ckpt.core.window import OperatorBytes, Window, balance, slot_bytes
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import Measured, Policy
from moe_ckpt.policies.moevement import FIRST_SLOTS, PROFILE_STEPS, MoEvement
from moe_ckpt.policies.popularity import ORDERS
from moe_ckpt_sim.planner.window_text import costs_of, facts_of, heaviest_by_size, sentences, table
from tests.support.constants import with_constants
from tests.unit.builders import catalog, context
from tests.unit.builders import memory as in_memory

MODEL = catalog(2, 4)  # 8 experts, 2 gates, 1 embedding
ALL = tuple(op.id for op in MODEL.operators)
SIZES = {op: OperatorBytes(12, 2) for op in ALL}
"""11 equal operators, bf16 compute weights: dense 132 bytes, compute weights alone 22."""
DENSE = 132


def at(rate, iteration=1.0):
    """Measurements with which ``rate * iteration`` bytes fit."""
    return Measured(recent_iteration_secs=iteration, copy_bytes_per_sec=rate, persist_bytes_per_sec=rate)


def facts(step=25, last_step=24, measured=None, model=MODEL, sizes=SIZES, **more):
    measured = at(1000.0) if measured is None else measured
    return context(model, step=step, last_step=last_step, measured=measured, sizes=sizes, **more)


def counts(*rows):
    return np.array(rows, dtype=np.int64)


class Run:
    """Asks a policy step by step and remembers, as the engine does, which window is under way."""

    def __init__(self, policy, **known):
        self.policy, self.known = policy, known
        self.window, self.next_slot, self.last_step, self.step = None, 0, None, -1
        self.plans = []

    def go(self, steps, **known):
        self.known.update(known)
        for _ in range(steps):
            self.step += 1
            plan = self.policy.plan(self.context())
            self.plans.append(plan)
            if plan:
                assert plan.window is not None
                self.window, self.next_slot, self.last_step = plan.window, plan.slot + 1, self.step
        return self.plans[-steps:]

    def context(self):
        under_way = {"window": self.window, "next_slot": self.next_slot}
        return facts(**{"step": self.step, "last_step": self.last_step, **under_way, **self.known})


def sizes_of(plans):
    return [plan.window.size if plan else 0 for plan in plans]


def heaviest_of(report):
    return max(slot.nbytes for slot in costs_of(report))


def is_dense(plan, operators=ALL):
    return plan.window.size == 1 and sorted(plan.full) == sorted(operators) and not plan.compute


def test_step_0_is_dense_then_comes_one_window_of_first_measurements_and_others_when_there_are_more():
    run = Run(MoEvement(), measured=Measured())
    plans = run.go(2)
    assert is_dense(plans[0])
    assert plans[0].window == Window(0, (plans[0].window.order,), None)
    assert not plans[1]
    assert is_dense(MoEvement().plan(facts(0, 0, Measured())))
    plans = run.go(3, measured=at(62.0))
    assert [(plan.window.start, plan.slot) for plan in plans] == [(2, 0), (2, 1), (2, 2)]
    # Iterations that are slow to start are not all that iteration time is measured by.
    assert not any(run.go(PROFILE_STEPS - 5))
    plans = run.go(3)
    assert [plan.slot for plan in plans] == [0, 1, 2]
    assert all(plan.window == plans[0].window for plan in plans)
    assert plans[0].window.start == PROFILE_STEPS


@pytest.mark.parametrize(("rate", "first", "later"), [(1000.0, 1, 1), (62.0, 3, 3), (45.0, 4, 5), (1.0, 4, 8)])
def test_the_first_window_has_few_slots_so_that_it_is_there_soon(rate, first, later):
    """Whatever it costs in stalls, once: step 0 was waited for as a whole."""
    run = Run(with_constants(MoEvement, max_window=8)(), measured=at(rate))
    plans = run.go(PROFILE_STEPS + 1)
    assert sizes_of(plans)[1 : 1 + first] == [first] * first
    assert not any(plans[1 + first : -1])
    assert sizes_of(plans)[-1] == later


def test_a_first_window_that_does_not_fit_in_host_memory_is_longer():
    assert with_constants(MoEvement, max_window=8)().plan(facts(1, 0, at(45.0), snapshot_bytes=46)).window.size == 5
    assert with_constants(MoEvement, max_window=8)().plan(facts(1, 0, at(45.0), snapshot_bytes=1000)).window.size == 4


def test_who_steps_ahead_learns_when_the_next_window_may_begin():
    policy = MoEvement()
    assert policy.next_due(facts(3, 2)) == PROFILE_STEPS
    assert policy.next_due(facts(1, 0)) == 1
    assert policy.next_due(facts(PROFILE_STEPS, 4)) == PROFILE_STEPS
    assert policy.next_due(facts(300, 299)) == 300
    assert MoEvement(window=2).next_due(facts(3, 2)) == 3
    window = policy.plan(facts(1, 0, at(62.0))).window
    assert policy.next_due(facts(2, 1, window=window, next_slot=1)) == 2


@pytest.mark.parametrize("policy", [MoEvement(), MoEvement(window=3)])
@pytest.mark.parametrize("last_step", [0, 3, 400])
def test_where_no_checkpoint_came_of_those_that_were_begun_the_next_is_dense_and_at_once(policy, last_step):
    assert is_dense(policy.plan(facts(last_step + 1, last_step, Measured(), nothing_safe=True)))


@pytest.mark.parametrize(
    "measured",
    [
        Measured(),
        Measured(recent_iteration_secs=1.0),
        Measured(recent_iteration_secs=1.0, copy_bytes_per_sec=60.0),
        Measured(recent_iteration_secs=1.0, persist_bytes_per_sec=60.0),
        Measured(copy_bytes_per_sec=60.0, persist_bytes_per_sec=60.0),
    ],
)
def test_a_window_is_not_sized_by_half_of_what_it_takes(measured):
    assert not MoEvement().plan(facts(25, 24, measured))
    assert MoEvement().plan(facts(25, 24, at(60.0)))
    assert MoEvement(window=2).plan(facts(25, 24, measured))


def test_a_run_that_never_learns_its_rates_measures_them_by_a_dense_checkpoint():
    """After a restart nothing is measured, and nothing would be if nothing were saved."""
    policy, unknown = MoEvement(), Measured(recent_iteration_secs=1.0)
    assert not policy.plan(facts(100 + PROFILE_STEPS - 1, 100, unknown))
    assert is_dense(policy.plan(facts(100 + PROFILE_STEPS, 100, unknown)))


def test_a_run_restarted_at_step_0_does_not_wait_as_long():
    """Nothing but step 0 stands behind it, and that checkpoint told no rates."""
    policy, unknown = MoEvement(), Measured(recent_iteration_secs=1.0)
    assert not policy.plan(facts(FIRST_SLOTS - 1, 0, unknown))
    assert is_dense(policy.plan(facts(FIRST_SLOTS, 0, unknown)))


@pytest.mark.parametrize("policy", [MoEvement(), MoEvement(window=3)])
@pytest.mark.parametrize("measured", [Measured(), at(50.0)])
def test_with_no_checkpoint_at_all_the_first_is_dense(policy, measured):
    assert is_dense(policy.plan(facts(7, None, measured)))


def test_windows_follow_one_another_without_a_gap():
    run = Run(MoEvement(window=3), measured=Measured())
    plans = run.go(8)
    assert is_dense(plans[0])
    assert [(plan.window.start, plan.slot) for plan in plans] == [
        *[(0, 0), (1, 0), (1, 1), (1, 2)],
        *[(4, 0), (4, 1), (4, 2), (7, 0)],
    ]
    for start in (1, 4):
        anchored = [op for plan in plans[start : start + 3] for op in plan.full]
        assert sorted(anchored) == sorted(ALL)
        for number, plan in enumerate(plans[start : start + 3]):
            later = [op for other in plans[start + number + 1 : start + 3] for op in other.full]
            assert list(plan.compute) == later


def test_a_window_goes_on_until_its_last_slot():
    """Also where steps had no update (a gradient scaler skipped it) or count double (two optimizers)."""
    window = Window(10, (ALL[:4], ALL[4:8], ALL[8:]))
    policy = MoEvement(window=3)
    assert policy.plan(facts(11, 10, window=window, next_slot=1)).window == window
    late = policy.plan(facts(12, 10, window=window, next_slot=1))
    assert (late.window, late.slot, late.step) == (window, 1, 12)
    over = policy.plan(facts(13, 12, window=window, next_slot=3))
    assert (over.window.start, over.slot) == (13, 0)
    assert policy.plan(facts(11, 10)).window.start == 11


def test_the_smallest_window_that_fits():
    """By hand: W = 2 anchors 5 and 6 (72, 72 bytes), W = 3: 3, 4, 4 (52, 56, 48), W = 4: 2, 3, 3, 3 (42, 48, 42, 36).

    One anchor and ten frozen operators weigh 32, the least there is; W = 8 does it.
    """
    policy = MoEvement()
    for rate, size in [(132, 1), (131, 2), (72, 2), (71, 3), (56, 3), (55, 4), (48, 4), (32, 8)]:
        plan = policy.plan(facts(measured=at(rate)))
        heaviest = max(slot_bytes(plan.window.slots, SIZES))
        assert (plan.window.size, heaviest <= rate) == (size, True)
        assert plan.window.slots == balance(plan.window.order, SIZES, size)
    assert [len(slot) for slot in policy.plan(facts(measured=at(56))).window.slots] == [3, 4, 4]


def test_what_fits_is_rate_times_time_times_ranks_by_the_slower_rate():
    limits = [
        (MoEvement(), Measured(recent_iteration_secs=0.5, copy_bytes_per_sec=144.0, persist_bytes_per_sec=1000.0), 1),
        (MoEvement(), Measured(recent_iteration_secs=0.5, copy_bytes_per_sec=1000.0, persist_bytes_per_sec=144.0), 1),
        (MoEvement(), at(72.0, 4.0), 1, 0.25),
        (MoEvement(), at(18.0, 1.0), 4),
    ]
    for policy, measured, ranks, *fraction in limits:  # 72 bytes each, all ranks together
        known = {"ranks": ranks, "budget_fraction": fraction[0] if fraction else 1.0}
        report = policy.explain(facts(measured=measured, **known))
        assert (report.size, heaviest_of(report), report.fits) == (2, 72, True)
        assert report.limit_bytes * ranks == 72
        less = replace(measured, recent_iteration_secs=measured.recent_iteration_secs * 0.99)
        assert policy.plan(facts(measured=less, **known)).window.size == 3


def test_the_size_changes_at_window_starts_only():
    run = Run(MoEvement(), measured=at(56.0))
    assert sizes_of(run.go(PROFILE_STEPS + 2)) == [1, *[3] * 3, *[0] * (PROFILE_STEPS - 4), 3, 3]
    assert sizes_of(run.go(3, measured=at(1000.0))) == [3, 1, 1]
    assert sizes_of(run.go(3, measured=at(72.0))) == [2, 2, 2]
    assert sizes_of(run.go(3, measured=at(32.0))) == [2, 8, 8]


def test_the_order_changes_at_window_starts_only():
    run = Run(MoEvement(window=2), measured=Measured(), popularity=counts([1, 2, 3, 4], [5, 6, 7, 8]))
    run.go(2)
    order = run.window.order
    assert order[:8] == tuple(op.id for op in MODEL.experts)
    turned = counts([8, 7, 6, 5], [4, 3, 2, 1])
    assert run.go(1, popularity=turned)[0].window.order == order
    assert run.go(1)[0].window.order[:8] == tuple(reversed(order[:8]))
    nearly = counts([8001, 7000, 6000, 5000], [4001, 3000, 2000, 1000])
    frequencies = run.window.frequencies
    run.go(2, popularity=nearly)
    assert (run.window.start, run.window.frequencies) == (5, frequencies)


def test_a_window_given_is_at_most_that_long_and_needs_no_measurement():
    giant = {**SIZES, ALL[0]: OperatorBytes(1000, 2)}
    plan = MoEvement(window=5).plan(facts(measured=Measured(), sizes=giant))
    # The embedding decides, 1000 bytes and two frozen gates: eight experts before it and two gates behind do not.
    assert [len(slot) for slot in plan.window.slots] == [8, 1, 2]
    assert max(slot_bytes(plan.window.slots, giant)) == max(slot_bytes(balance(plan.window.order, giant, 11), giant))
    assert MoEvement(window=40).plan(facts(measured=at(1e9))).window.size == 8
    assert is_dense(MoEvement(window=1).plan(facts()))


def test_training_that_must_stall_gets_the_longest_window_and_the_report_says_by_how_much():
    policy = with_constants(MoEvement, max_window=4)()
    report = policy.explain(facts(measured=at(20.0, 0.5)))
    assert report.window == policy.plan(facts(measured=at(20.0, 0.5))).window
    assert report.size == 4
    assert report.limit_bytes == 10
    assert report.fits is False
    assert heaviest_of(report) == 48  # 42, 48, 42 and 36 bytes
    assert report.stall_secs == pytest.approx(48 / 20 - 0.5)
    assert report.mean_stall_secs == pytest.approx((42 + 48 + 42 + 36) / 4 / 20 - 0.5)
    assert report.warning == (
        "snapshots of a window of W = 4 do not fit in an iteration (48 bytes per rank at most, 10 would fit); training "
        "stalls by up to 1.9 s per iteration (380%), 1.6 s on average"
    )
    assert "training stalls by up to 1.9 s" in "\n".join(sentences(report))


def test_a_stall_of_nothing_is_no_warning():
    report = with_constants(MoEvement, max_window=2)().explain(facts(measured=at(71.9)))
    assert (report.fits, report.stall_secs) == (False, pytest.approx(72 / 71.9 - 1))
    assert report.warning is None
    assert "\n".join(sentences(report)).count("no slot takes noticeably longer") == 1
    assert "(3%)" in with_constants(MoEvement, max_window=2)().explain(facts(measured=at(70.0))).warning


def test_over_the_budget_but_within_the_iteration_is_no_stall():
    report = with_constants(MoEvement, max_window=2)().explain(facts(measured=at(100.0), budget_fraction=0.5))
    assert (report.limit_bytes, heaviest_of(report), report.stall_secs) == (50, 72, 0.0)
    assert report.warning.endswith(
        "50% of an iteration (72 bytes per rank at most, 50 would fit); they still end within the iteration"
    )


def test_host_memory_makes_windows_longer():
    assert MoEvement().plan(facts(snapshot_bytes=132)).window.size == 1
    assert MoEvement().plan(facts(snapshot_bytes=131)).window.size == 2
    assert MoEvement().plan(facts(snapshot_bytes=18, ranks=4)).window.size == 2
    # With nothing to fall back on too: as near to dense as memory allows.
    assert MoEvement().plan(facts(7, None, Measured(), snapshot_bytes=72)).window.size == 2


@pytest.mark.parametrize(
    ("policy", "step", "room", "size"),
    [
        (MoEvement(window=2), 5, 71, 3),
        (with_constants(MoEvement, max_window=3)(), 25, 40, 6),
    ],
)
def test_a_window_whose_slots_do_not_fit_in_host_memory_is_made_longer(policy, step, room, size):
    found = facts(step, step - 1, snapshot_bytes=room)
    assert policy.plan(found).window.size == size
    assert f"{room} bytes per rank (host_memory_bytes), has no room for windows of W =" in policy.explain(found).warning


def test_where_no_window_fits_it_is_the_one_with_the_lightest_slots():
    """Of 32 bytes, the least that there is: what does not fit is left out, and training continues."""
    assert MoEvement(window=11).plan(facts(5, 4, snapshot_bytes=31)).window.size == 8


@pytest.mark.parametrize(("at_once", "room"), [(1, 131), (2, 65)])
def test_what_is_saved_before_training_and_does_not_fit_is_refused_with_numbers(at_once, room):
    limit = at_once
    said = (
        rf"at step 0.*has 132 bytes.* room for {at_once * room}; set host_memory_bytes to 132 or more: "
        "before training"
    )
    with pytest.raises(ConfigError, match=said):
        MoEvement().plan(facts(0, None, snapshot_bytes=room, at_once=limit))
    assert is_dense(MoEvement().plan(facts(0, None, snapshot_bytes=66, at_once=2)))


@pytest.mark.parametrize("policy", [MoEvement(window=8), MoEvement()], ids=["given", "computed"])
@pytest.mark.parametrize("due", [True, False], ids=["stored", "in memory"])
def test_memory_holds_two_windows_or_one_that_storage_gets(policy, due):
    """The longest that is no longer than wanted; where memory holds no two of any, as if storage got each."""
    limit, memory = 2, in_memory(storage_due=due)
    wanted = policy.plan(facts(measured=at(36.0))).window
    assert wanted.size > 4
    for budget in range(DENSE, 6 * DENSE, 14):
        found = facts(measured=at(36.0), snapshot_bytes=budget // 2, at_once=limit, memory=memory)
        size, copies = policy.plan(found).window.size, 1 if due or budget < 2 * DENSE else 2
        needed = [copies * n * max(slot_bytes(balance(wanted.order, SIZES, n), SIZES)) for n in (size, size + 1)]
        assert needed[0] <= budget
        assert size == wanted.size or needed[1] > budget
        said = policy.explain(found).warning or ""
        assert ("has no room for windows" in said) == (size < wanted.size)


@pytest.mark.parametrize(
    ("due", "stored", "slower"),
    [(False, 24, False), (True, 24, True), (True, 22, True), (True, 4, False), (True, -1, True)],
    ids=["stays in memory", "each is stored", "each of two steps", "one in a while", "the first"],
)
def test_a_window_that_stays_in_memory_is_bound_by_the_copy_alone(due, stored, slower):
    """One that storage gets has the time since the newest there. A window committed at 36 bytes a step is longer."""
    measured = Measured(recent_iteration_secs=1.0, copy_bytes_per_sec=72.0, persist_bytes_per_sec=36.0)
    chosen_at, memory = np.full((2, 4), stored), in_memory(storage_due=due)
    former = Window(21, MoEvement(window=4).plan(facts(21)).window.slots, None)
    known = facts(measured=measured, memory=memory, chosen_at=chosen_at, window=former, next_slot=4)
    size = MoEvement().plan(known).window.size
    assert size == MoEvement().plan(facts(measured=at(36.0 if slower else 72.0))).window.size
    report = MoEvement().explain(known)
    assert report.window.size == size
    assert report.bytes_per_sec == (36.0 if slower else 72.0)


def test_the_window_that_is_made_longer_does_fit():
    assert max(slot_bytes(MoEvement(window=3).plan(facts(snapshot_bytes=71)).window.slots, SIZES)) <= 71
    assert (
        max(slot_bytes(with_constants(MoEvement, max_window=6)().plan(facts(snapshot_bytes=40)).window.slots, SIZES))
        <= 40
    )


def test_sizes_must_be_complete():
    with pytest.raises(ConfigError, match=r"11 are not there, such as non_expert/embed"):
        MoEvement().plan(facts(sizes={}))


@st.composite
def drawn_facts(draw):
    model = catalog(draw(st.integers(0, 3)), draw(st.integers(1, 5)))
    full = st.one_of(st.integers(0, 50), st.integers(0, 10**8))
    part = st.sampled_from([0.0, 1 / 6, 1 / 3, 1.0])
    sizes = {}
    for op in model.operators:
        nbytes = draw(full)
        sizes[op.id] = OperatorBytes(nbytes, int(nbytes * draw(part)))
    shape = (len(model.layers), model.layers[0].experts if model.layers else 0)
    tokens = np.array(draw(st.lists(st.integers(0, 99), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])))
    rate = draw(st.floats(1.0, 1e9))
    return facts(
        measured=draw(st.sampled_from([Measured(), at(rate), Measured(1.0, copy_bytes_per_sec=rate)])),
        model=model,
        sizes=sizes,
        ranks=draw(st.integers(1, 4)),
        popularity=tokens.reshape(shape).astype(np.int64),
        budget_fraction=draw(st.sampled_from([0.1, 0.5, 1.0])),
        step=draw(st.sampled_from([0, 25, 40])),
        last_step=draw(st.sampled_from([None, 24])),
    )


policies = st.builds(
    lambda most, **options: with_constants(MoEvement, max_window=most)(**options),
    st.integers(1, 8),
    window=st.one_of(st.none(), st.integers(1, 20)),
    order=st.sampled_from(ORDERS),
)


@settings(max_examples=150, deadline=None)
@given(policies, drawn_facts())
def test_any_window_anchors_every_operator_once_within_its_limits(policy, known):
    plan = policy.plan(known)
    assert policy.plan(known) == plan
    report = policy.explain(known)
    if not plan:
        assert policy.window is None
        assert report.limit_bytes is None
        return
    assert report.window == plan.window
    slots = plan.window.slots
    assert sorted(plan.window.order) == sorted(op.id for op in known.model.catalog.operators)
    assert all(slots)
    costs = costs_of(report)
    assert [slot.nbytes for slot in costs] == list(slot_bytes(slots, known.model.sizes))
    assert all(len(slots[n + 1 :]) == 0 or slot.frozen > 0 for n, slot in enumerate(costs))
    if known.run.step == 0 or known.run.last_step is None:
        assert len(slots) == 1
    elif policy.window is not None:
        assert len(slots) <= policy.window
    else:
        assert len(slots) <= policy.max_window
        limit = report.limit_bytes
        if limit is not None and not report.fits:
            best = max(slot_bytes(balance(plan.window.order, known.model.sizes, policy.max_window), known.model.sizes))
            assert heaviest_of(report) == best > limit * known.model.placement.ranks
        elif limit is not None and len(slots) > 1:
            shorter = max(slot_bytes(balance(plan.window.order, known.model.sizes, len(slots) - 1), known.model.sizes))
            assert shorter > limit * known.model.placement.ranks
    json.dumps(facts_of(report))
    assert list(sentences(report))


def test_the_report_in_numbers():
    report = MoEvement(window=3).explain(facts(measured=at(100.0, 2.0), ranks=2, snapshot_bytes=50))
    found = facts_of(report)
    assert [
        (len(s["anchors"]), s["frozen_operators"], s["full_bytes"], s["compute_bytes"], s["bytes"], s["rank_bytes"])
        for s in found["slots"]
    ] == [(3, 8, 36, 16, 52, 26), (4, 4, 48, 8, 56, 28), (4, 0, 48, 0, 48, 24)]
    assert (found["window"], found["dense_bytes"], found["heaviest_bytes"]) == (3, DENSE, 56)
    assert found["mean_bytes"] == pytest.approx(52.0)
    assert (found["limit_bytes"], found["fits"], found["stall_secs"]) == (200, True, 0.0)
    assert [s["secs"] for s in found["slots"]] == pytest.approx([0.26, 0.28, 0.24])
    assert found["recovery"] == {
        "expected_iterations": 4.5,
        "most_iterations": 6,
        "expected_secs": 9.0,
        "most_secs": 12.0,
    }
    assert heaviest_by_size(report, 3) == (132, 72, 56)
    assert report.warning is None
    text = "\n".join(sentences(report))
    assert "heaviest slot 42.4% of that, mean 39.4%" in text
    assert "recovery trains 4.5 iterations again on average, 6 at most (9 s and 12 s)" in text
    columns, rows = table(report)
    assert (columns[-2:], len(rows)) == (("of iteration", "stall"), 3)
    assert rows[1] == ("1", "4", "4", "48", "8", "56", "42.4%", "28", "14.0%", "0 s")


def test_a_report_without_measurements_has_no_times():
    report = MoEvement(window=2).explain(facts(measured=Measured()))
    found = facts_of(report)
    for name in ("limit_bytes", "fits", "stall_secs", "mean_stall_secs", "iteration_secs"):
        assert found[name] is None
    assert found["recovery"]["most_secs"] is None
    assert table(report)[0][-1] == "per rank"
    assert "limit" not in "\n".join(sentences(report))
    assert report.warning is None


def test_the_window_under_way_is_what_is_explained():
    window = Window(4, (ALL[:1], ALL[1:]))
    assert MoEvement(window=5).explain(facts(25, 24, window=window, next_slot=1)).window is window


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 2.0}, "window=2.0"),
        ({"window": True}, "window=True"),
        ({"order": "popular"}, r"order='popular'.*hard_count"),
        ({"order": None}, "order=None"),
    ],
)
def test_impossible_options_are_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        MoEvement(**options)


def test_a_window_longer_than_the_model_is_refused_before_training():
    MoEvement(window=11).check(MODEL)
    with pytest.raises(ConfigError, match=r"window=12.*only 11 operators"):
        MoEvement(window=12).check(MODEL)
    MoEvement().check(catalog(0, 0))


def test_it_is_a_policy_that_says_what_it_is():
    assert isinstance(MoEvement(), Policy)
    assert MoEvement(3, order="soft_count").describe() == {"name": "moevement", "window": 3, "order": "soft_count"}


def test_operators_that_cannot_be_parted_are_anchored_together():
    """Experts of one layer whose optimizer mixes rows of a stack: one unit, where its most popular member stood."""
    together = tuple(frozenset(op for op in ALL if op.startswith(f"expert/{layer}/")) for layer in (0, 1))
    for step in range(1, 12):
        plan = MoEvement(window=5).plan(facts(step, step - 1, coupled=together))
        slots = plan.window.slots
        assert sorted(plan.window.order) == sorted(ALL)
        for group in together:
            assert sum(bool(group & set(slot)) for slot in slots) == 1
    alone = MoEvement(window=5).plan(facts(1, 0)).window.slots
    assert any(0 < len(group & set(slot)) < len(group) for slot in alone for group in together)


def two_stages(second, ranks=(2, 2)):
    owners = ((0, 0, 1, 1), (2, 2, 3, 3))
    return Placement(owners, (0,), ranks, {op: int(op in second) for op in ALL})


def test_each_pipeline_stage_is_cut_by_itself():
    """Layer 1 lies on the second stage. 4 experts and a gate on it, the embedding besides on the first: 72 bytes dense
    there, 36 on each of its 2 ranks; of both stages' ranks together only 33."""
    second = {op for op in ALL if op.split("/")[1] == "1"}
    known = {"ranks": 4, "placement": two_stages(second)}
    report = MoEvement().explain(facts(measured=at(36.0), **known))
    assert report.size == 1
    assert MoEvement().explain(facts(measured=at(35.0), **known)).size == 2
    assert MoEvement().explain(facts(measured=at(35.0), ranks=4)).size == 1, "as if all ranks could share in it"
    assert report.rank_bytes[0] == 36


def test_slots_hold_of_every_stage_what_its_ranks_can_save():
    second = {op for op in ALL if op.split("/")[1] == "1"}
    window = MoEvement(window=3).plan(facts(ranks=4, placement=two_stages(second))).window
    assert window.size == 3
    for slot in window.slots:
        assert any(op in second for op in slot)
        assert any(op not in second for op in slot)


def test_experts_of_each_stage_take_turns():
    second = {op for op in ALL if op.split("/")[1] == "1"}
    run, first = Run(MoEvement(window=3, order="round_robin"), ranks=4, placement=two_stages(second)), Counter()
    for plan in run.go(1 + 3 * 4):
        experts = [op for op in plan.full if op.startswith("expert/")]
        if plan.step and not plan.slot:
            first.update(next(op for op in experts if (op in second) == stage) for stage in (False, True))
    assert first == dict.fromkeys((op for op in ALL if op.startswith("expert/")), 1)


def test_a_stage_with_little_to_save_does_not_shorten_the_window_of_another():
    few = {"gate/1"}
    report = MoEvement().explain(facts(measured=at(40.0), ranks=2, placement=two_stages(few, (1, 1))))
    assert report.size > 2
    assert report.fits
    assert set(report.window.slots[0]) > few


def test_no_owner_has_too_much_because_its_experts_are_popular():
    """By popularity alone, each slot's experts would be those of one rank."""
    owners = Placement(((0, 0, 1, 1), (0, 0, 1, 1)), (0, 1), (2,), expert_ranks=1)
    hot = counts([9, 9, 1, 1], [9, 9, 1, 1])
    known = {"ranks": 2, "popularity": hot, "measured": at(45.0)}
    assert MoEvement().explain(facts(**known)).size == 2
    report = MoEvement().explain(facts(placement=owners, **known))
    assert report.size == 2
    assert report.fits


def test_a_window_grows_until_no_owner_has_too_much():
    """One rank owns three of four experts: by even shares W = 2 would do."""
    owners = Placement(((0, 0, 0, 1), (0, 0, 0, 1)), (0, 1), (2,), expert_ranks=1)
    known = {"ranks": 2, "measured": at(45.0)}
    assert MoEvement().explain(facts(**known)).size == 2
    report = MoEvement().explain(facts(placement=owners, **known))
    assert report.size > 2
    assert report.fits


def test_a_window_grows_past_a_size_that_changes_nothing():
    """Four owners on a stage of eight ranks, and an embedding as heavy as five experts. By even shares two slots would
    do; on an owner three weigh as much as two, and four fit."""
    sizes = {**SIZES, "non_expert/embed": OperatorBytes(60, 10)}
    owners = Placement(((0, 1, 2, 3), (0, 1, 2, 3)), (0,), (8,), expert_ranks=1)
    known = {"sizes": sizes, "ranks": 8, "placement": owners}
    two, three = (MoEvement(window=size).explain(facts(**known)) for size in (2, 3))
    assert two.rank_bytes[0] == three.rank_bytes[0] > 25
    report = MoEvement().explain(facts(measured=at(25.0), **known))
    assert report.size == 4
    assert report.fits


def test_among_equals_the_owners_take_turns():
    owners = Placement(((0, 0, 1, 1), (0, 0, 1, 1)), (0, 1), (2,), expert_ranks=1)
    window = MoEvement(window=4).plan(facts(ranks=2, placement=owners)).window
    experts = [op for op in window.order if op.startswith("expert/0/")]
    assert experts == ["expert/0/0", "expert/0/2", "expert/0/1", "expert/0/3"]


def test_a_dense_checkpoint_takes_a_windows_place_now_and_then():
    """One per (W - 1) / dense_overhead steps; a window that is under way ends first, and host memory must have room."""
    policy = with_constants(MoEvement, dense_overhead=0.25)(window=3)
    for step, due in ((7, False), (8, True), (9, True)):
        plan = policy.plan(facts(step, step - 1, dense_step=0))
        assert is_dense(plan) == due
        assert plan.window.size == (1 if due else 3)
    begun = policy.plan(facts(7, 6, dense_step=0)).window
    assert policy.plan(facts(8, 7, dense_step=0, window=begun, next_slot=1)).slot == 1
    assert policy.plan(facts(12, 11, dense_step=8)).window.size == 3
    assert policy.plan(facts(12, 11, dense_step=0, snapshot_bytes=DENSE - 1)).window.size == 3
    assert is_dense(policy.plan(facts(12, 11, dense_step=0, snapshot_bytes=DENSE)))
    assert MoEvement(window=3).plan(facts(199, 198, dense_step=0)).window.size == 3
    assert policy.plan(facts(999, 998)).window.size == 3, "where nobody keeps track, none is due"
    assert MoEvement(window=3).plan(facts(200, 199, dense_step=0)).window.size == 1
