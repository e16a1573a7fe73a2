"""GradientLog: who is anchored when, that every step can be reached from what the plans save, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.core.operators import OperatorKind
from moe_ckpt.core.placement import Placement, everywhere
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import ConfigError
from moe_ckpt.ledger.ledger import anchored_after
from moe_ckpt.policies import AnyOf, GradientLog, needs_of
from moe_ckpt.policies.base import Measured, Sends
from tests.support.constants import with_constants
from tests.support.gradient_chain import LoggedStep, chain
from tests.unit.builders import catalog, context, mixed, with_facts
from tests.unit.builders import memory as in_memory

MODEL = catalog(3, 4)
"""12 experts, 3 gates, 1 embedding."""
EVERYTHING = MODEL.everything


def weighing(model, elements=lambda op: 10, full=12, gradient=4):
    return {
        op.id: OperatorBytes(full * elements(op), 2 * elements(op), gradient * elements(op)) for op in model.operators
    }


def rates(copied, sent=None):
    """Measurements with which a rank copies, and sends, so many bytes in an iteration."""
    return Measured(iteration_secs=1.0, recent_iteration_secs=1.0, copy_bytes_per_sec=copied, send_bytes_per_sec=sent)


def memory(**facts):
    return in_memory(storage_due=False, **facts)


class Run:
    """A run of steps, whose books are kept as a trainer's would be; ``log`` is all that its plans saved."""

    def __init__(self, policy, model=MODEL, **facts):
        self.policy, self.model, self.facts = policy, model, facts
        self.sizes = facts.pop("sizes", None) or weighing(model)
        self.log, self.plans = {}, {}
        self.anchored_at = np.full(len(model.operators), -1)
        self.step = 0

    def context(self, **facts):
        known = {"memory": memory(), "measured": rates(None), **self.facts, **facts}
        last = max(self.log, default=None)
        known |= {"last_step": last, "sizes": self.sizes, "anchored_at": self.anchored_at}
        return context(self.model, self.step, **known)

    def save(self, **facts):
        self.step += 1
        plan = self.policy.plan(self.context(**facts))
        full, gradients = plan.full, plan.gradients
        assert not set(full) & set(gradients)
        assert {*full, *gradients} == set(self.model.everything)
        updated = frozenset(self.model.everything)
        self.log[self.step] = LoggedStep(updated, frozenset(gradients), frozenset(full))
        places = self.model.places_of
        self.anchored_at = anchored_after(self.anchored_at, self.step, places(full), places(gradients))
        assert self.anchors() == dict(zip(self.model.everything, self.anchored_at.tolist(), strict=True))
        self.plans[self.step] = plan
        return plan

    def chains(self):
        """Raises unless what was saved leads every operator to the newest step."""
        return {op: chain(self.log, op, self.step) for op in self.model.everything}

    def anchors(self):
        return {op: way.anchor for op, way in self.chains().items()}

    def skip(self):
        """A step that nothing is saved of."""
        self.step += 1
        self.anchored_at = np.full(len(self.model.operators), -1)


@pytest.mark.parametrize("window", [6, "auto"])
def test_a_round_that_does_not_fit_in_host_memory_is_shortened(window):
    policy, limit = with_constants(GradientLog, most_window=6)(window=window), 2
    dense = sum(size.full for size in weighing(MODEL).values())
    found = {}
    for budget in range(dense, 8 * dense, dense // 4):
        run = Run(policy, snapshot_bytes=budget // 2, at_once=limit)
        run.save()
        report = policy.explain(run.context())
        found[budget] = report.window
        assert report.window == 1 or report.most_held_bytes <= budget
        assert ("host memory has no room for rounds of W = 6" in (report.warning or "")) == (report.window < 6)
    assert sorted(found.values()) == list(found.values())
    assert {1, 6} < set(found.values())


def test_the_first_step_is_saved_in_full_and_each_later_one_anchors_some():
    run = Run(GradientLog(window=5))
    assert run.save().full == EVERYTHING
    plan = run.save()
    assert 0 < len(plan.full) < len(EVERYTHING)
    assert {*plan.full, *plan.gradients} == {*EVERYTHING}
    assert not plan.compute
    assert plan.window is None
    assert not plan.wait


@pytest.mark.parametrize(("given", "window"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (16, 16)])
def test_every_operator_is_anchored_once_in_each_round(given, window):
    """Of 5 steps, one would have as many as any of 4."""
    run = Run(GradientLog(window=given))
    for _ in range(1 + 4 * window):
        run.save()
    for first in range(2, 2 + 3 * window):
        anchored = [op for step in range(first, first + window) for op in run.plans[step].full]
        assert sorted(anchored) == sorted(EVERYTHING)


@st.composite
def models(draw):
    model = mixed(*draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    drawn = {op.id: draw(st.integers(1, 40)) for op in model.operators}
    sizes = weighing(model, lambda op: drawn[op.id], gradient=draw(st.sampled_from([2, 4])))
    ranks = draw(st.sampled_from([1, 2, 4]))
    kind = draw(st.sampled_from(["alone", "data", "experts", "stages"]))
    placement = {
        "alone": everywhere(model.layers, 1),
        "data": everywhere(model.layers, ranks),
        "experts": Placement(
            tuple(tuple(e % ranks for e in range(layer.experts)) for layer in model.layers),
            tuple(range(ranks)), (ranks,), experts_apart=True, expert_ranks=1,
        ),
        "stages": Placement(
            tuple((0,) * layer.experts for layer in model.layers), (0,), (1, 1),
            {op.id: at % 2 for at, op in enumerate(model.operators)},
        ),
    }[kind]  # fmt: skip
    return model, sizes, {"placement": placement}


def rank_bytes(plan, sizes, model, known):
    """Of the busiest rank, counted operator by operator."""
    placement = known["placement"]
    weight = {op: sizes[op].full for op in plan.full} | {op: sizes[op].gradient for op in plan.gradients}
    found = []
    for number, width in enumerate(placement.stages):
        mine = [op for op in weight if placement.stage_of.get(op, 0) == number]
        if placement.expert_ranks is None:
            found.append(-(-sum(weight[op] for op in mine) // width))
            continue
        owned = {}
        for op in mine:
            owner = placement.owner_of.get(op, "all")
            owned[owner] = owned.get(owner, 0) + weight[op]
        found.append(-(-owned.pop("all", 0) // width) + max(owned.values(), default=0))
    return max(found)


@settings(max_examples=60, deadline=None)
@given(models(), st.floats(0.2, 1.2), st.integers(1, 8))
def test_budgets_are_kept_wherever_a_round_keeps_them(built, portion, most):
    """With the fewest steps that do; where none does, with the longest round that is allowed."""
    model, sizes, known = built
    policy, heaviest = with_constants(GradientLog, most_window=most)(), {}
    for window in range(1, min(most, len(model.operators)) + 1):
        run = Run(GradientLog(window=window), model, sizes=sizes, **known)
        for _ in range(window + 1):
            run.save()
        heaviest[window] = max(rank_bytes(run.plans[step], sizes, model, known) for step in run.plans if step > 1)
    limit = int(portion * heaviest[1])
    run = Run(policy, model, sizes=sizes, measured=rates(float(limit)), **known)
    for _ in range(2 * most + 2):
        run.save()
    weights = [rank_bytes(run.plans[step], sizes, model, known) for step in run.plans if step > 1]
    fitting = [window for window, weight in heaviest.items() if weight <= limit]
    report = policy.explain(run.context())
    assert max(weights) == report.heaviest_bytes
    assert (max(weights) <= limit) == bool(fitting) == report.fits
    rounds = {plan.full for step, plan in run.plans.items() if step > 1}
    assert len(rounds) <= min(fitting, default=most)


@settings(max_examples=40, deadline=None)
@given(models(), st.lists(st.tuples(st.floats(0.3, 1.2), st.integers(0, 99)), min_size=4, max_size=40))
def test_every_step_is_reached_however_rates_and_loads_change(built, changes):
    """From what the plans saved alone; and no operator waits for longer than two of the longest rounds."""
    model, sizes, known = built
    most, dense = 6, sum(size.full for size in sizes.values())
    run = Run(with_constants(GradientLog, most_window=most)(), model, sizes=sizes, **known)
    shape = (len(model.layers), max(layer.experts for layer in model.layers))
    for portion, seed in changes:
        load = np.random.default_rng(seed).integers(0, 1000, shape)
        before = run.anchored_at
        plan = run.save(measured=rates(portion * dense / known["placement"].ranks), popularity=load)
        oldest = {op for op, step in zip(model.everything, before.tolist(), strict=True) if step == before.min()}
        assert oldest & set(plan.full)
        assert max(len(way.gradients) for way in run.chains().values()) < 2 * most


@pytest.mark.parametrize("at", range(2, 12))
def test_a_restart_in_the_middle_of_a_round_changes_no_plan(at):
    """What a new life knows comes of the log alone."""
    whole, cut = (Run(GradientLog(window=4)) for _ in range(2))
    for _ in range(12):
        whole.save()
    for step in range(1, 13):
        if step == at:
            held = cut.anchors()
            policy, log = GradientLog(window=4), dict(cut.log)
            cut = Run(policy)
            cut.step, cut.log = step - 1, log
            cut.anchored_at = np.array([held[op] for op in EVERYTHING])
        cut.save()
        assert cut.log == {known: whole.log[known] for known in range(1, step + 1)}


def test_a_new_window_goes_on_from_what_is_anchored():
    run = Run(GradientLog(window=6))
    for _ in range(10):
        run.save()
    run.policy = GradientLog(window=3)
    for _ in range(3):
        run.save()
    ages = run.step - run.anchored_at
    assert ages.max() < 3
    run.policy = GradientLog(window=6)
    for _ in range(30):
        run.save()
        assert (run.step - run.anchored_at).max() < 3 + 6


def test_of_steps_that_are_alike_those_with_most_tokens_come_first():
    run = Run(GradientLog(window=12), sizes=weighing(MODEL, lambda op: 10 if op.kind is OperatorKind.EXPERT else 1))
    run.save()
    hard = np.zeros((3, 4), dtype=np.int64)
    hard[2, 1], hard[0, 3] = 70, 50
    first = run.save(popularity=hard).full
    assert "expert/2/1" in first
    assert "expert/0/3" in run.save(popularity=hard).full
    even = Run(GradientLog(window=12), sizes=run.sizes)
    even.save()
    assert even.save(popularity=np.ones((3, 4), dtype=np.int64)).full != first


def test_equal_operators_weigh_what_the_formula_says():
    model = catalog(1, 18)  # 20 operators
    sizes = weighing(model, gradient=2)
    report = GradientLog(window=5).explain(context(model, 9, sizes=sizes, memory=memory()))
    assert report.window == 5
    assert report.mean_bytes == pytest.approx(10 * 20 * (12 + 4 * 2) / 5)
    assert report.gradient_bytes == 10 * 20 * 2
    assert report.dense_bytes == 10 * 20 * 12
    assert report.fits is None


@pytest.mark.parametrize(
    ("copied", "sent", "window"),
    [
        *((1920, None, 1), (1919, None, 2), (1280, None, 2), (1279, None, 3)),
        *((1920, 1280, 2), (1280, 1920, 2), (640, None, 8)),
    ],
)
def test_the_window_is_the_shortest_that_both_budgets_allow(copied, sent, window):
    """16 operators of 10 parameters: 1920 bytes in full, 640 of gradients, 80 for each anchor beside them."""
    facts = memory(replicas=1) if sent is not None else memory()
    run = Run(with_constants(GradientLog, most_window=9)(), measured=rates(copied, sent), memory=facts)
    run.save()
    assert run.policy.explain(run.context()).window == window
    assert len(run.save().full) == -(-16 // window)


def test_what_peers_have_anyway_is_not_counted():
    gates = 4 * 10 * 4  # bytes of their gradients
    run = Run(
        GradientLog(), measured=rates(10**6, gates + 2 * 80), memory=memory(replicas=2, sends=Sends(experts=False))
    )
    run.save()
    assert run.policy.explain(run.context()).window == 3  # with two in a step, of what is no expert
    none = memory(replicas=2, sends=Sends(shared=False, experts=False))
    assert run.policy.explain(run.context(memory=none)).window == 1


def test_while_rates_are_unknown_the_lightest_round_is_taken():
    run = Run(with_constants(GradientLog, most_window=8)())
    run.save()
    assert len(run.save().full) == 2


def test_budgets_that_change_little_do_not_change_the_round():
    run = Run(GradientLog())
    run.save(measured=rates(1000.0))
    for _ in range(9):
        run.save(measured=rates(1000.0))
    slots = {plan.full for step, plan in run.plans.items() if step > 1}
    for copied in (1060.0, 1000.0, 1080.0, 1001.0, 1100.0):
        assert run.save(measured=rates(copied)).full in slots
    assert run.save(measured=rates(1920.0)).full == EVERYTHING


def test_it_says_what_does_not_fit_and_why():
    policy = with_constants(GradientLog, most_window=4)()
    fits = policy.explain(context(MODEL, 9, sizes=weighing(MODEL), measured=rates(1000.0)))
    assert (fits.fits, fits.warning, fits.stall_secs) == (True, None, 0.0)
    short = policy.explain(context(MODEL, 9, sizes=weighing(MODEL), measured=rates(800.0)))
    assert not short.fits
    assert short.gradient_bytes < short.limit_bytes
    assert "a longer round would, and 4 steps are the most; training stalls by up to 0.2 s" in short.warning
    never = policy.explain(context(MODEL, 9, sizes=weighing(MODEL), measured=rates(600.0)))
    assert "the gradients alone have 640, in a round of any length: use MoEvement" in never.warning
    assert never.stall_secs == pytest.approx(0.6)


@pytest.mark.parametrize(
    "facts",
    [
        {"memory": in_memory()},
        {"missing": ("expert/0/0",)},
        {"nothing_safe": True},
    ],
)
def test_everything_is_saved_when_storage_is_due_or_something_is_missing(facts):
    run = Run(GradientLog(window=4))
    run.save()
    run.save()
    assert run.save(**facts).full == EVERYTHING
    assert run.save().gradients


def test_behind_a_gap_everything_is_anchored_and_what_alone_is_lost_at_once():
    run = Run(GradientLog(window=4))
    run.save()
    run.save()
    run.skip()
    assert run.save().full == EVERYTHING
    usual = set(Run.save(run).full)
    run.anchored_at[MODEL.index_of["expert/2/3"]] = run.anchored_at[MODEL.index_of["gate/1"]] = -1
    found = set(run.policy.plan(with_facts(run.context(), step=run.step + 1)).full)
    assert found >= {"expert/2/3", "gate/1"}
    assert len(found) <= len(usual) + 2


@pytest.mark.parametrize("again", [False, True])
def test_a_dense_step_foretells_who_will_be_anchored_together(again):
    """Also the first one after a restart, when no operator has an anchor."""
    run = Run(GradientLog(window=4))
    dense = run.save()
    if again:
        run.save()
        run.anchored_at = np.full(len(MODEL.operators), -1)
        dense = run.save()
    assert not dense.gradients
    anchored = [set(run.save().full) for _ in range(4)]
    assert sorted(map(sorted, anchored)) == sorted(map(sorted, dense.together))


def test_coupled_operators_are_anchored_together():
    groups = tuple(frozenset(op.id for op in MODEL.experts if op.layer == layer) for layer in range(2))
    run = Run(GradientLog(window=4), coupled=groups)
    for _ in range(9):
        saved = set(run.save().full)
        for group in groups:
            assert saved >= group or not saved & group
    for first in range(2, 6):
        round_ = [op for step in range(first, first + 4) for op in run.plans[step].full]
        assert sorted(round_) == sorted(EVERYTHING)
    run.anchored_at[MODEL.index_of["expert/1/2"]] = -1
    run.step += 1
    assert set(run.policy.plan(run.context()).full) >= groups[1]


def test_plans_are_the_same_for_the_same_facts():
    one, other = (Run(GradientLog(), measured=rates(1000.0)) for _ in range(2))
    assert [one.save() for _ in range(9)] == [other.save() for _ in range(9)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"window": 0}, r"GradientLog\(window=0\): window must be a whole number of at least 1.*'auto'"),
        ({"window": "soon"}, r"GradientLog\(window='soon'\)"),
        ({"window": True}, r"GradientLog\(window=True\)"),
        ({"max_window": 3}, r"did you mean window"),
    ],
)
def test_bad_settings_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        GradientLog(**given)


def test_what_it_is_not_told_it_names():
    policy = GradientLog(window=3)
    with pytest.raises(ConfigError, match=r"window=17.*only 16 operators"):
        GradientLog(window=17).check(MODEL)
    with pytest.raises(ConfigError, match=r"memory that outlives the process, and there is none: give memory="):
        policy.plan(context(MODEL, 2, last_step=1))
    with pytest.raises(ConfigError, match=r"anchored_at must have every operator of the catalog, 16, and has 0"):
        policy.plan(context(MODEL, 2, last_step=1, memory=memory(), sizes=weighing(MODEL)))
    with pytest.raises(ConfigError, match=r"sizes must have every operator"):
        policy.plan(context(MODEL, 2, last_step=1, memory=memory(), anchored_at=np.ones(16, dtype=np.int64)))


def test_it_cannot_be_one_of_several():
    with pytest.raises(ConfigError, match=r"GradientLog cannot be combined with other policies: its log has a gap"):
        AnyOf([GradientLog()])
    assert needs_of(GradientLog()).gradients
    assert not needs_of(GradientLog()).partial


@pytest.mark.parametrize(
    ("full", "compute", "consumed"),
    [(12, 2, 4), (12, 4, 4), (6, 2, 2), (16, 4, 4), (12, 1, 4), (8, 4, 4)],
    ids=["bf16 with masters", "fp32", "bf16", "amsgrad", "fp8 with masters", "SGD with momentum"],
)
def test_gradients_that_nobody_tells_have_the_width_of_what_is_stepped(full, compute, consumed):
    assert OperatorBytes(10 * full, 10 * compute).consumed == 10 * consumed
    assert OperatorBytes(10 * full, 10 * compute, 7).consumed == 7


def test_the_plan_sends_everything_to_storage_tier_items():
    """Tiers are the engine's: anchors pass through memory on their way, and storage is not due."""
    run = Run(GradientLog(window=4))
    run.save()
    plan = run.save()
    assert plan.memory_only == ()
    assert not plan.compute


def test_rounding_is_asked_for_and_off_by_default():
    assert needs_of(GradientLog()).stored_gradients is None
    assert needs_of(GradientLog(grad_dtype="bf16")).stored_gradients == "BF16"
    with pytest.raises(ConfigError, match=r"grad_dtype='fp8'.*'as_consumed', or 'bf16'"):
        GradientLog(grad_dtype="fp8")
