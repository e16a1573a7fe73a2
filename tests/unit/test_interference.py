"""What copying makes an iteration longer: told from small and large checkpoints, and left out of MoEtion's budget."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import interference
from moe_ckpt.core.cadence import BLOCK, is_small
from moe_ckpt.core.step import Fate
from moe_ckpt.policies import Dense, MoEtion
from moe_ckpt.policies.base import Measured
from moe_ckpt.policies.moetion import PROBED_CHECKPOINTS
from moe_ckpt.run.agreement import StepConsensus, pack, unpack
from moe_ckpt.run.meter import COMPARED, Lap, Meter, secs_per_byte
from moe_ckpt.storage import LocalStorage
from tests.support.constants import Unprobed
from tests.unit.builders import experts_in
from tests.unit.engine_parts import Life, ThreadRanks, manifests, run_threads
from tests.unit.test_policies_moetion import MODEL, facts, weighing

WHOLE = BLOCK * (COMPARED + 2)
"""Checkpoints of so many blocks that there are just enough comparisons."""


def iterations(
    count: int = WHOLE,
    *,
    slope: float = 1e-3,
    drift: float = 0.0,
    spill: float = 0.0,
    large: int = 1000,
    small: int = 300,
    tail: int = 0,
) -> list[Lap]:
    """spill: seconds per byte of the former checkpoint. drift: seconds per iteration."""
    sizes = [large if at < 0 or not is_small(at) else small for at in range(-1, count + tail)]
    return [
        Lap(5.0 + drift * at + slope * this + spill * before, this) for at, (before, this) in enumerate(pairwise(sizes))
    ]


@given(
    st.floats(1e-6, 1e-2),
    st.floats(-1e-2, 1e-2),
    st.floats(0, 1e-3),
    st.integers(500, 10**6),
    st.integers(0, 70),
    st.integers(0, 30),
)
def test_what_is_there_is_found(slope, drift, spill, large, percent, tail):
    """Whatever changes steadily meanwhile, and what is still written of a former checkpoint, too."""
    found = iterations(slope=slope, drift=drift, spill=spill, large=large, small=large * percent // 100, tail=tail)
    assert secs_per_byte(found) == pytest.approx(slope + spill, rel=1e-3, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**9)), max_size=200))
def test_it_is_never_below_nothing(laps):
    found = secs_per_byte([Lap(*lap) for lap in laps])
    assert found is None or found >= 0.0


@given(st.integers(0, WHOLE - 1), st.floats(0, 1e6))
def test_one_iteration_that_takes_long_changes_nothing(place, secs):
    found = iterations()
    found[place] = found[place]._replace(secs=secs)
    assert secs_per_byte(found) == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.parametrize(
    "found",
    [
        iterations(WHOLE - 1),
        iterations(small=1000),
        iterations(small=800),
        [Lap(1.0, size) for size in (1000, 300) * WHOLE],
        [],
    ],
    ids=["too few", "alike", "nearly alike", "no two in a row", "none"],
)
def test_what_cannot_be_compared_tells_nothing(found):
    assert secs_per_byte(found) is None


def test_what_is_not_to_be_told_from_chance_is_nothing():
    rng = random.Random(3)
    noisy = [each._replace(secs=each.secs + rng.gauss(0, 100.0)) for each in iterations()]
    assert secs_per_byte(noisy) == 0.0
    assert secs_per_byte(iterations(slope=-1e-3)) == 0.0


# --- in a run: real meters of two ranks, what they agree on, and the policy; the clock is acted ---

FIXED, UPDATE, RATE, STEPS = 1.0, 0.1, 200.0, 120


def run(policy: MoEtion, slopes: tuple[float, float], noise: float = 0.0, restart_at: int = 0) -> list[Measured]:
    """What the policy is told at each step: iterations get longer by ``slopes`` per byte that their rank copies."""
    rng, meters, clock, last = random.Random(1), two(), [0.0, 0.0], None
    told, sizes = [], weighing(MODEL)
    for step in range(1, STEPS + 1):
        if step == restart_at:
            known, meters = meters[0].measurements | {"copy_interference_secs": told[-1].copy_interference_secs}, two()
            for meter in meters:
                meter.resume(known)
        measured = _agreed(meters)
        told.append(measured)
        shape = (2, 4)
        known = {"chosen_at": np.full(shape, step - 1), "expected_unsaved": np.zeros(shape, dtype=np.int64)}
        known["budget_fraction"] = SMALLER
        plan = policy.plan(facts(step=step, last_step=last, index=step - 1, measured=measured, sizes=sizes, **known))
        last, nbytes = step, sum(sizes[op].full for op in plan.full)
        for rank, meter in enumerate(meters):
            meter.copied_nbytes = nbytes
            clock[rank] += (FIXED + slopes[rank] * nbytes) * (1 + rng.gauss(0, noise))
            meter.update_began = clock[rank] - UPDATE
            fate = Fate(number=step, rates={"copy_bytes_per_sec": RATE, "persist_bytes_per_sec": 1e6})
            meter.record_transfers([fate])
            meter.lap(clock[rank], loaded=True)
    return told


def two() -> list[Meter]:
    return [Meter(), Meter()]


def _agreed(meters: list[Meter]) -> Measured:
    sent = [pack(StepConsensus(measured=meter.measured()), leads=not rank) for rank, meter in enumerate(meters)]
    return unpack(np.maximum(*sent)).measured


SLOPES = 0.2e-3, 0.8e-3
BUDGET = RATE * (FIXED - UPDATE)
"""180 bytes, of which 36 are no expert's: the 12 bytes of all 8 experts would fit, and be 132."""
SMALLER = 0.6
"""Of the budget: 108 bytes, 6 of 8 experts."""


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_budget_shrinks_by_what_copying_makes_iterations_longer(noise: float):
    plain = Unprobed()
    probing = MoEtion()
    without, found = run(plain, SLOPES, noise)[-1], run(probing, SLOPES, noise)[-1]
    longer = SLOPES[1] * 108
    assert without.copy_bytes() == pytest.approx(BUDGET + RATE * longer, rel=0.01), "it counts as time to copy in"
    assert found.copy_interference_secs == pytest.approx(longer, rel=0.05 + 20 * noise), "the slower rank's"
    assert found.copy_bytes() == pytest.approx(BUDGET, rel=0.005 + 2 * noise)


def test_checkpoints_are_small_until_it_is_known_and_no_longer():
    told = run(MoEtion(), SLOPES)
    first = next(step for step, each in enumerate(told, 1) if each.copy_interference_secs is not None)
    assert BLOCK * COMPARED < first <= BLOCK * (COMPARED + 2) + 10
    policy = MoEtion()
    for step in range(9, 17):
        for measured in (told[first - 2], told[first - 1], Measured()):
            fits = 6 if measured.copy_bytes() else 2
            small = is_small(step) and measured.copy_interference_secs is None
            saved = experts_in(policy.plan(facts(step=step, measured=measured, budget_fraction=SMALLER)).full)
            assert len(saved) == (2 if small else fits)
    beside = Measured(iteration_secs=0.9, recent_iteration_secs=1.0, copy_bytes_per_sec=RATE, persist_bytes_per_sec=1e6)
    assert len(experts_in(policy.plan(facts(step=10, measured=beside, budget_fraction=SMALLER)).full)) > 2, (
        "there are others to compare"
    )
    known = {"chosen_at": np.full((2, 4), PROBED_CHECKPOINTS), "budget_fraction": SMALLER}
    late = facts(step=PROBED_CHECKPOINTS + 2, measured=told[first - 2], **known)
    assert len(experts_in(policy.plan(late).full)) == 6, "it is given up"


def test_a_restart_remembers_it():
    told = run(MoEtion(), SLOPES, restart_at=80)
    assert told[79].copy_interference_secs == pytest.approx(told[78].copy_interference_secs, abs=1e-3)
    assert told[-1].copy_bytes() == pytest.approx(BUDGET, rel=0.02)


def test_manifests_have_what_the_ranks_agreed_on(tmp_path):
    """Rank 0 writes them, and rank 1 is slowed down more."""

    def body(comm) -> None:
        with Life(LocalStorage(tmp_path), policy=Dense(), comm=comm) as life:
            slowed = Measured(copy_interference_secs=0.125 * (1 + comm.rank))
            life.session._booking.meter.measured = lambda: slowed
            life.go(4, settle=True)

    run_threads(ThreadRanks(2), body)
    assert manifests(tmp_path)[-1].measured == {"copy_interference_secs": 0.25}


@pytest.mark.parametrize(
    ("policy", "probes"),
    [
        (MoEtion(), True),
        (MoEtion(recompute=True), True),
        (Unprobed(), False),
        (MoEtion(experts=2), False),
        (MoEtion(every_n_steps=2), False),
    ],
)
def test_a_run_probes_where_nothing_else_tells_it(policy: MoEtion, probes: bool):
    assert policy.probes == probes
    measured = Measured(recent_iteration_secs=1.0, copy_bytes_per_sec=RATE, persist_bytes_per_sec=1e6)
    step = 14 * policy.every_n_steps
    assert is_small(14)
    known = facts(step=step, last_step=step - policy.every_n_steps, index=13, measured=measured)
    saved = experts_in(policy.plan(known).full)
    assert (len(saved) < 4) == probes


def test_the_benchmark_tells_what_the_documentation_shows(tmp_path, capsys):
    assert interference.main(["--runs", "40", "--write", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "interference.json").read_text())["rows"]
    quiet = next(row for row in rows if (row["added"], row["differ"]) == (0.05, 0.005))
    assert quiet["median"] == pytest.approx(0.05, abs=0.005)
    assert "taken for" in capsys.readouterr().out
