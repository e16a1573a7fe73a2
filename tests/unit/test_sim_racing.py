"""Systems simulated no longer than it takes to tell who is ahead: the choice is that of simulating all to the end."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt_sim.failures.failures import NoFailures
from moe_ckpt_sim.planner.choosing import Leg, best, race, why_not
from moe_ckpt_sim.planner.intervals import with_interval
from moe_ckpt_sim.planner.planner import recommend, trainer_systems
from moe_ckpt_sim.planner.racing import LEAST_SPANS, Runner, _student, ratio
from moe_ckpt_sim.run.run import Run, ettr_of, simulate
from moe_ckpt_sim.run.system import System
from tests.unit.test_sim_planner import scenario as of

LONG = replace(of(), duration_secs=36_000.0)
"""60 failures."""
PEERS = System("peers", MoEvement(), durable="peers", replicas=1, storage_every=3600.0)


def whole(given, systems, seeds=1):
    """Of each system, simulated to the end."""
    runners = [Runner(given, system, seeds) for system in systems]
    for runner in runners:
        runner.advance(runner.legs)
    return runners


@pytest.mark.parametrize(
    "system",
    [System("dense", Dense(10)), System("moc", MoC(k=1, plt_budget=0.02), when_busy="skip"), PEERS],
    ids=lambda one: one.name,
)
def test_where_a_run_is_stopped_changes_nothing(system):
    given = replace(LONG, system=system)
    run = Run(given)
    seen = []
    while not run.done:
        run.advance(run.now_secs + 5_000.0)
        seen.append(run.outcome())
    assert len(seen) > 4
    assert seen[-1].to_dict() == simulate(given).to_dict()
    assert all(one.steps <= seen[-1].steps and one.advances for one in seen)


def test_what_is_told_of_a_run_so_far_is_what_a_shorter_one_would_have_told():
    run = Run(replace(LONG, system=System("dense", Dense(10))))
    run.advance(9_000.0)
    short = simulate(replace(LONG, system=System("dense", Dense(10)), duration_secs=run.now_secs))
    assert run.outcome().steps == short.steps
    assert run.outcome().ettr == pytest.approx(short.ettr, abs=1e-9)


def test_a_run_is_given_up_once_it_cannot_come_up_to_another():
    given = replace(LONG, system=System("rare", Dense(400)))
    ettr = simulate(given).ettr
    assert ettr_of(given) == ettr_of(given, least=ettr) == ettr
    run = Run(given)
    run.advance(inf, least=0.99)
    assert not run.done
    assert ettr <= ettr_of(given, least=0.99) < 0.99


def test_the_oracle_chooses_as_if_it_had_simulated_all_to_the_end():
    tried = replace(LONG, system=System("dense", Dense(1), interval="oracle"))
    asked = []

    def whole_runs(given, least):
        asked.append(least)
        return simulate(given).ettr

    assert with_interval(tried, ettr_of) == with_interval(tried, whole_runs)
    assert max(asked) > 0.5, "it says what is to be beaten"


# --- differences ---


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 4.604), (5, 4.032), (10, 3.169), (30, 2.750), (1000, 2.581)])
def test_quantiles_of_student(freedom, quantile):
    assert _student(freedom) == pytest.approx(quantile, rel=0.02)


def test_an_interval_of_a_ratio_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    misses = 0
    for _ in range(500):
        spans = rng.exponential(100.0, 12)
        found = ratio(list(zip(spans.tolist(), (0.3 * spans + rng.normal(0, 5, 12)).tolist(), strict=True)))
        misses += not found.low <= 0.3 <= found.high
    assert misses <= 20


def test_too_few_spans_say_nothing():
    assert ratio([(1.0, 1.0)] * (LEAST_SPANS - 1)).low == -inf
    assert ratio([(1.0, 1.0)] * LEAST_SPANS).low == 1.0


def test_runs_on_the_same_failures_are_told_apart_sooner_than_each_is_known():
    one, other = (Runner(LONG, System("dense", Dense(every)), 1) for every in (10, 60))
    for runner in (one, other):
        runner.advance(3)
    assert not one.done
    paired = one.ahead_of(other)
    assert paired.low > 0, "ten steps lose less than sixty"
    one.advance(one.legs)
    other.advance(other.legs)
    true = one.ahead_of(other)
    assert true.low == true.high == one.ettr - other.ettr
    assert paired.low <= true.mean <= paired.high


# --- the choice ---


@pytest.mark.parametrize(
    ("mtbf", "storage"),
    [
        (1800.0, 5e6),
        (600.0, 1e9),
        pytest.param(600.0, 3e6, marks=pytest.mark.slow),
    ],
)
def test_the_choice_is_that_of_simulating_all_to_the_end(mtbf, storage):
    given = replace(of(mtbf_secs=mtbf, storage_bytes_per_sec=storage), duration_secs=18_000.0)
    systems = [*trainer_systems(given), PEERS]
    runners = whole(given, systems)
    usable = [one for one in runners if not why_not(one, 0.05)]
    found = recommend(given, systems, seeds=1)
    chosen = best([one for one in usable if one.system.in_trainer])
    assert found.recommended.system.name == chosen.system.name
    assert found.best.system.name == best(usable).system.name
    assert (found.recommended.ettr, found.recommended.margin) == (chosen.ettr, 0.0)
    true = {one.system.name: one.ettr for one in runners}
    for one in found.candidates:
        if not one.refused:
            assert abs(one.ettr - true[one.system.name]) <= one.margin + 0.01


def test_only_close_calls_are_simulated_longer():
    given = replace(of(storage_bytes_per_sec=5e6), duration_secs=18_000.0)
    legs: list[Leg] = []

    def tell(leg, done):
        assert 0 <= done <= len(leg.systems)
        if leg not in legs:
            legs.append(leg)

    found = recommend(given, trainer_systems(given), seeds=3, tell=tell)
    simulated = {one.system.name: one.simulated_secs for one in found.candidates}
    assert simulated[found.recommended.system.name] >= 3 * 18_000.0
    assert min(simulated.values()) < 18_000.0
    assert len(legs[0].systems) == len(simulated)
    assert all(len(leg.systems) < len(simulated) for leg in legs[1:])


def test_where_failures_have_no_mean_everything_is_simulated_to_the_end():
    given = replace(of(), failures=NoFailures())
    found = recommend(given, [System("a", Dense(10)), System("b", Dense(20))], seeds=1)
    assert {one.simulated_secs for one in found.candidates} == {given.duration_secs}


def test_a_system_whose_luck_runs_out_late_is_not_judged_by_its_beginning():
    """Without a backup, two nodes that fail together undo everything: here after two thirds of the time."""
    given = replace(of(mtbf_secs=200.0, storage_bytes_per_sec=1e9), duration_secs=36_000.0)
    systems = [System("dense", Dense(10)), replace(PEERS, storage_every=None)]
    _, peers = whole(given, systems)
    assert peers.ettr < 0.2
    early = [Runner(given, system, 1) for system in systems]
    for runner in early:
        runner.advance(1)
    assert early[1].ettr > early[0].ettr - 0.005 or early[1].ettr > 0.5
    assert recommend(given, systems, seeds=1).best.system.name == "dense"


def test_a_policy_that_saves_more_and_more_is_not_judged_by_its_beginning():
    """Its K rises as failures use up its budget, and with K the time that it takes: at first it looks best."""
    given = replace(of(mtbf_secs=300.0, storage_bytes_per_sec=4e6), duration_secs=72_000.0)
    systems = [
        System("moc", MoC(k=1, plt_budget=0.002), when_busy="wait"),
        System("dense", Dense(60), when_busy="wait"),
    ]
    runners = whole(given, systems)
    assert len({one.k for one in runners[0].outcomes[0].history}) > 1
    usable = [one for one in runners if not why_not(one, 0.5)]
    tried = [Runner(given, system, 1) for system in systems]
    choice, _ = race(tried, 0.5)
    assert choice.leader.system.name == best(usable).system.name
