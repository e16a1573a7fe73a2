"""Agreement: all ranks learn the same facts; the meter and CheckFreq: the interval follows from laps of the loop."""

from __future__ import annotations

from dataclasses import fields, replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.step import Fate
from moe_ckpt.policies import CheckFreq, Measured
from moe_ckpt.policies.base import Sends
from moe_ckpt.run.agreement import StepAgreement, StepConsensus, pack, unpack
from moe_ckpt.run.meter import Meter
from moe_ckpt.session import session as sessions
from moe_ckpt.storage import LocalStorage
from tests.support.constants import with_constants
from tests.unit.engine_parts import GatedStorage, Life, ThreadRanks, manifests, run_threads, told


def agreed(comm, counts, status: StepConsensus) -> tuple[np.ndarray, StepConsensus]:
    agreement = StepAgreement(comm)
    agreement.send(3, told(counts), status)
    step, tokens, consensus = agreement.receive()
    assert step == 3
    assert agreement.receive() is None
    return tokens.applied, consensus


def alone(**measured: float) -> StepConsensus:
    status = StepConsensus(measured=Measured(**measured))
    return agreed(SoloCommunicator(), np.zeros((0, 0), dtype=np.int64), status)[1]


times = st.none() | st.floats(1e-6, 1e6)
rates = st.none() | st.floats(1e3, 1e9)
WAYS = {
    **dict.fromkeys(("busy", "storage_busy", "copies_behind", "used_up", "tight", "edited", "gone"), st.booleans()),
    **dict.fromkeys(("persist_secs", "secs"), times),
    "ended": st.lists(st.tuples(st.booleans(), st.booleans()), max_size=5).map(tuple),
    "sends": st.builds(Sends, *[st.booleans()] * 4),
    "measured": st.builds(
        Measured, **{f.name: rates if f.name.endswith("_per_sec") else times for f in fields(Measured)}
    ),
    "in_memory": st.tuples(*[st.integers(0, 3)] * 4),
}
"""Values of each field of ``StepConsensus``."""
rank_facts = st.tuples(
    st.booleans(),
    st.builds(Measured, times, times, times),
    st.lists(st.tuples(st.booleans(), st.floats(0, 1e4), st.booleans()), max_size=5),
)


@given(st.lists(rank_facts, min_size=1, max_size=3), st.integers(0, 1 << 40))
def test_all_ranks_learn_the_same(facts, tokens):
    """Only rank 0's resolutions count; busy if one is; times are those of the slowest."""
    ranks = ThreadRanks(len(facts))

    def body(comm):
        busy, measured, ended = facts[comm.rank]
        status = StepConsensus(
            busy=busy,
            ended=tuple((committed, lost) for committed, _, lost in ended),
            persist_secs=max((secs for _, secs, _ in ended), default=None),
            measured=measured,
        )
        counts = np.array([[tokens, comm.rank], [0, 1]], dtype=np.int64)
        return agreed(comm, counts, status)

    [(summed, first), *others] = run_threads(ranks, body)
    n = len(facts)
    for counts, other in others:
        assert other == first
        assert np.array_equal(counts, summed)
    assert summed.tolist() == [[n * tokens, n * (n - 1) // 2], [0, n]]
    assert first.busy == any(busy for busy, *_ in facts)
    for name in ("iteration_secs", "checkpoint_cost_secs", "persist_secs"):
        known = [t for _, measured, *_ in facts if (t := getattr(measured, name)) is not None]
        assert getattr(first.measured, name) == (pytest.approx(max(known), abs=1e-9) if known else None)
    *_, ended = facts[0]
    assert first.ended == tuple((committed, lost) for committed, _, lost in ended)
    assert (first.persist_secs is None) == (not ended)
    assert first.persist_secs == (pytest.approx(max(secs for _, secs, _ in ended), abs=1e-9) if ended else None)


def test_a_time_too_short_to_count_is_not_taken_for_unknown():
    assert alone(checkpoint_cost_secs=0.0).measured.checkpoint_cost_secs == pytest.approx(0, abs=1e-8)
    assert alone(checkpoint_cost_secs=0.0).measured.checkpoint_cost_secs is not None
    assert alone().measured == Measured()


def test_the_time_of_updates_is_told():
    assert alone(update_secs=0.25, recent_iteration_secs=1.0).measured.overlap_secs == 0.75


def test_more_resolutions_than_fit_are_told_in_their_order():
    many = tuple((i % 3 > 0, i % 3 == 0) for i in range(40))
    sent = unpack(pack(StepConsensus(ended=many), leads=True))
    assert sent.ended == many[:32], "the rest comes at the next step"


@given(st.lists(st.builds(StepConsensus, **WAYS), min_size=1, max_size=3))
def test_each_field_is_combined_as_it_declares(statuses):
    """The maximum of any, the slowest of rates and the longest of times; of lists number by number; or rank 0's."""
    packed = [pack(status, leads=not rank) for rank, status in enumerate(statuses)]
    agreed = unpack(np.max(packed, axis=0))
    for name in ("busy", "storage_busy", "copies_behind", "used_up", "tight", "edited"):
        assert getattr(agreed, name) == any(getattr(status, name) for status in statuses), name
    assert agreed.sends == Sends(*map(any, zip(*(status.sends for status in statuses), strict=True)))
    assert agreed.in_memory == tuple(map(max, zip(*(status.in_memory for status in statuses), strict=True)))
    assert (agreed.gone, agreed.ended) == (statuses[0].gone, statuses[0].ended)
    for name in ("persist_secs", "secs"):
        assert getattr(agreed, name) == pytest.approx(getattr(statuses[0], name), abs=2e-9), name
    for field in fields(Measured):
        measured = [value for status in statuses if (value := getattr(status.measured, field.name)) is not None]
        chosen = min if field.name.endswith("_per_sec") else max
        expected = pytest.approx(chosen(measured), rel=1e-3, abs=2e-9) if measured else None
        assert getattr(agreed.measured, field.name) == expected, field.name


# --- the meter ---


def laps(meter: Meter, times: list[tuple[float, bool]], now: float = 0.0) -> float:
    for took, loaded in times:
        now += took
        meter.lap(now, loaded=loaded)
    return now


def test_clean_laps_give_the_iteration_time_and_loaded_ones_the_cost():
    meter = Meter()
    assert meter.measured() == Measured()
    now = laps(meter, [(5.0, False), (1.0, False), (1.0, False), (9.0, False), (1.0, False)])
    recent = Measured(iteration_secs=1.0, recent_iteration_secs=1.0)
    assert meter.measured() == recent, "the first lap has no beginning; one outlier is no matter"
    laps(meter, [(1.5, True), (1.25, True), (0.5, True)], now)
    meter.resolved(persist_secs=3.25)
    found = replace(meter.measured(), recent_iteration_secs=None)
    assert found == Measured(1.0, 0.75, 3.25), "a lap that was quicker earns nothing back"


def test_cost_is_the_median_of_recent_checkpoints():
    meter = Meter()
    now = laps(meter, [(1.0, False)] * 10)
    for extra in (100.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.2):
        now = laps(meter, [(1.0 + extra, True), (1.0, False)], now)
        meter.resolved(extra)
    assert meter.measured().checkpoint_cost_secs == pytest.approx(0.4)
    assert meter.measured().persist_secs == pytest.approx(0.4)


def test_no_cost_is_invented_without_a_clean_lap():
    meter = Meter()
    laps(meter, [(1.0, True)] * 5)
    meter.resolved(2.0)
    assert meter.measured() == Measured(None, None, 2.0, recent_iteration_secs=1.0)


def test_recent_iterations_count_whatever_ran_beside_them_but_not_what_training_waited():
    meter = Meter()
    now = laps(meter, [(9.0, False), (1.0, False), (1.5, True)])
    for _ in range(3):
        now += 2.0
        meter.lap(now, loaded=True, waited_secs=0.75)
    assert meter.measured().recent_iteration_secs == 1.25
    laps(meter, [(2.0, True)] * 50, now)
    assert meter.measured().recent_iteration_secs == 2.0, "old laps are forgotten"


def rates_of(nbytes: int) -> dict[str, float]:
    """As of a snapshot that took half a second to copy, and two to write."""
    return {"copy_bytes_per_sec": nbytes / 0.5, "persist_bytes_per_sec": nbytes / 2.0}


def test_rates_are_those_of_snapshots_that_were_committed():
    meter = Meter()
    why = {1: "disk full"}
    ended = [Fate(why.get(n), number=n, rates=rates_of(100 * n) if n else {}) for n in range(4)]
    meter.record_transfers(ended[:3])
    meter.record_transfers(ended)  # the last one is new
    measured = meter.measured()
    assert (measured.copy_bytes_per_sec, measured.persist_bytes_per_sec) == (500.0, 125.0)


def test_the_slowest_ranks_rates_are_agreed_on():
    measured = alone(copy_bytes_per_sec=2e9, persist_bytes_per_sec=5e8, recent_iteration_secs=0.25).measured
    assert measured.copy_bytes_per_sec == pytest.approx(2e9)
    assert measured.persist_bytes_per_sec == pytest.approx(5e8)
    assert measured.recent_iteration_secs == 0.25


# --- CheckFreq on the session, on a clock that the test turns ---


class Clock:
    """Stands in for ``time`` in the session: laps last what the test says, not what this machine takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(sessions, "time", made)
    return made


ITERATION, WRITING_STEPS, PROFILE = 0.1, 3, 10


def train(life: Life, storage: GatedStorage, clock: Clock, steps: int, slowdown: float) -> None:
    """Each checkpoint takes ``WRITING_STEPS`` steps to write, and slows each of them down by ``slowdown`` s."""
    for _ in range(steps):
        in_flight = life.session._snapshots.pipeline.first.in_flight
        clock.now += ITERATION + (slowdown if in_flight else 0.0)
        if in_flight and life.step >= life.begun + WRITING_STEPS - 1:
            storage.gate.set()
            life.settle()
            storage.gate.clear()
        if life.go().begun:
            life.begun = life.step


@pytest.mark.parametrize(("slowdown", "overhead"), [(0.01, 0.03), (0.05, 0.03), (0.05, 0.25), (0.0, 0.03)])
def test_checkfreq_settles_at_the_interval_of_its_formula(tmp_path, clock, slowdown, overhead):
    """Cost per checkpoint: the slowed steps times the slowdown. Interval: cost / (overhead * iteration)."""
    storage = GatedStorage(tmp_path)
    cost = WRITING_STEPS * slowdown
    expected = max(cost / (overhead * ITERATION), 1)
    steps = PROFILE + WRITING_STEPS + 4 * ceil(max(expected, 10))
    with Life(storage, policy=with_constants(CheckFreq, profile_steps=PROFILE, max_interval=200)(overhead)) as life:
        storage.gate.clear()
        life.begun = 0
        train(life, storage, clock, steps, slowdown)
        storage.gate.set()
    begun = [r.step for r in life.records if r.begun]
    assert begun[0] == PROFILE, "nothing is saved while the iteration time is learnt"
    gaps = np.diff(begun)
    assert len(gaps) >= 2
    if slowdown:
        assert expected / 2 <= gaps[-1] <= 2 * expected
        total = steps * ITERATION
        assert (len(begun) * cost) / total <= 2 * overhead, "the declared overhead, near enough"
    else:
        # Free checkpoints: as often as storage takes them, never two on their way for long.
        assert gaps[-1] <= 2 * WRITING_STEPS


def test_checkfreq_on_real_time_saves_and_commits_all(tmp_path):
    """No assertion on times: the first after the profile, then again, and every one is whole."""
    with Life(LocalStorage(tmp_path), policy=with_constants(CheckFreq, profile_steps=5, max_interval=20)(0.5)) as life:
        life.go(60, settle=True)
        assert life.session._booking.meter.measured().checkpoint_cost_secs is not None
    begun = [r.step for r in life.records if r.begun]
    assert begun[0] == 5
    assert len(begun) >= 3
    assert [m.step for m in manifests(tmp_path)] == begun
    assert all(m.policy["name"] == "checkfreq" for m in manifests(tmp_path))


def test_a_restarted_meter_knows_what_was_measured_before():
    """And slow laps at the start do not push it aside at once."""
    before = Meter()
    now = laps(before, [(1.0, False)] * 10 + [(1.5, True), (1.0, False)])
    before.update_began = now + 0.75
    laps(before, [(1.0, False)], now)
    before.resolved(0.75)
    before.record_transfers([Fate(number=0, rates=rates_of(600))])
    meter = Meter()
    assert meter.measurements == {}
    meter.resume(before.measurements)
    assert meter.measured() == before.measured() == Measured(1.0, 0.5, 0.75, 1200.0, 300.0, 1.0, 0.25)
    now = laps(meter, [(60.0, False)] * 5, now)
    assert meter.measured() == before.measured()
    laps(meter, [(3.0, False)] * 20, now)
    assert meter.measured().iteration_secs == meter.measured().recent_iteration_secs == 3.0


def test_what_was_not_measured_before_is_not_known_after():
    meter = Meter()
    meter.resume({"iteration_secs": 2.0})
    assert meter.measured() == Measured(iteration_secs=2.0)
