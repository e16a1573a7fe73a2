"""Whole runs: rounds moved ahead at once are rounds stepped through; closed forms; a second, naive simulator."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from statistics import fmean, stdev

import numpy as np
import pytest

from benchmarks.tokens_at_risk import InTurn
from moe_ckpt.policies import AnyOf, CheckFreq, Dense, GradientLog, MoC, MoEtion, MoEvement
from moe_ckpt_sim.cluster.cluster import Parallel
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.failures import formulas
from moe_ckpt_sim.failures.failures import Poisson
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.sync import SyncDense
from moe_ckpt_sim.workload.load import ExpertLoad
from tests.sim.builders import LOCAL, predicted, scenario, sparse
from tests.sim.naive import Naive
from tests.support.constants import Unprobed, with_constants
from tests.unit.builders import context

SKEWED = ExpertLoad(skewness=0.2, drift=0.3, drift_secs=200.0)
NARROW = {"pcie_bytes_per_sec": 30e3, "nic_bytes_per_sec": 50e3}
SLOW, ONE_BUFFER = {"storage_bytes_per_sec": 80e3}, {"when_busy": "skip", "max_in_flight": 1}

DURATION_SECS = 1000.0

REPEATING = {
    "dense": (Dense(7), {}),
    "dense that waits": (Dense(1), {"cluster": SLOW}),
    "dense that skips": (Dense(1), {"cluster": SLOW, "system": {"when_busy": "skip"}}),
    "dense out of phase": (Dense(3), {"cluster": SLOW, "system": ONE_BUFFER}),
    "dense out of phase, two under way": (Dense(3), {"cluster": SLOW, "system": {"when_busy": "skip"}}),
    "dense sync": (SyncDense(7), {}),
    "dense on peers": (Dense(3), {"system": {"durable": "peers", "storage_every": 100.0}}),
    "dense in memory": (Dense(3), {"system": {"durable": "node", "storage_every": 50}}),
    "dense in memory, each on to storage": (Dense(1), {"system": {"durable": "node", "storage_every": 1}}),
    "dense in memory, auto": (Dense(2), {"system": {"durable": "node", "storage_every": "auto"}}),
    "moc in memory": (
        MoC(k=1, snapshot_k=3),
        {"load": SKEWED, "system": {"durable": "peers", "storage_every": 33.0}},
    ),
    "moevement in memory, slowly on to storage": (
        MoEvement(window=4),
        {"load": SKEWED, "cluster": SLOW, "system": {"durable": "peers", "storage_every": 9}},
    ),
    "checkfreq": (CheckFreq(), {}),
    "moc": (MoC(k=1), {"load": SKEWED}),
    "moc of four": (MoC(k=4, every_n_steps=3), {"load": SKEWED}),
    "moc that skips": (
        MoC(k=1, snapshot_k=3, every_n_steps=2),
        {"load": SKEWED, "cluster": SLOW, "system": ONE_BUFFER},
    ),
    "moc by itself": (MoC(k="auto", snapshot_k="auto"), {"load": SKEWED, "cluster": SLOW}),
    "moetion": (MoEtion(), {"load": SKEWED}),
    "moetion of three": (MoEtion(experts=3), {"load": SKEWED, "parallel": Parallel(pp=2, ep=4)}),
    "moetion in turn": (
        InTurn(),
        {"cluster": {"storage_bytes_per_sec": 50e3}, "parallel": Parallel(pp=1, ep=8)},
    ),
    "moetion in memory": (
        MoEtion(),
        {"load": SKEWED, "cluster": NARROW, "system": {"durable": "peers", "storage_every": 90.0}},
    ),
    "moetion in its node's memory": (
        InTurn(),
        {"load": SKEWED, "cluster": NARROW, "system": {"durable": "node", "storage_every": "auto"}},
    ),
    "gradient log": (
        GradientLog(),
        {"load": SKEWED, "cluster": NARROW, "system": {"durable": "peers", "storage_every": 60}},
    ),
    "gradient log that skips": (
        GradientLog(window=4),
        {"cluster": NARROW, "system": {"durable": "node", "when_busy": "skip", "max_in_flight": 1}},
    ),
    "any of two": (AnyOf([MoC(k=1, every_n_steps=3), Dense(10)]), {"load": SKEWED}),
    "any of two that skip": (
        AnyOf([MoC(k=8, every_n_steps=2), Dense(7)]),
        {"load": SKEWED, "cluster": SLOW, "system": ONE_BUFFER},
    ),
    "moevement": (MoEvement(window=4), {"load": SKEWED, "system": {"durable": "peers"}}),
    "moevement localized": (MoEvement(), {"load": SKEWED, "system": LOCAL}),
    "moevement on slow storage": (with_constants(MoEvement, max_window=4)(), {"load": SKEWED, "cluster": SLOW}),
    "moevement that skips": (
        with_constants(MoEvement, max_window=3)(),
        {"load": SKEWED, "cluster": SLOW, "system": ONE_BUFFER},
    ),
}


@pytest.mark.parametrize("portion", [0.9999, 1.0001])
@pytest.mark.parametrize("parallel", [Parallel(pp=1, ep=8), Parallel(pp=2, ep=4)], ids=str)
def test_moc_by_itself_saves_as_many_experts_as_storage_takes_in_an_iteration(parallel, portion):
    """Storage, shared evenly by all ranks, takes ``portion`` of what K = 3 writes in an iteration."""
    given = scenario(MoC(k=3), parallel=parallel)
    costs = Costs(given.layout, given.precision, given.iteration, given.system)
    facts = context(given.layout.model.catalog, placement=given.layout.placement)
    ranks = {k: costs.bytes_of.stored(MoC(k=k).plan(facts)).rank for k in range(1, 9)}
    rate = portion * ranks[3] / given.iteration.secs
    cluster = {"storage_bytes_per_sec": rate * parallel.ranks}
    itself = scenario(MoC(k="auto", snapshot_k="auto"), parallel=parallel, cluster=cluster, duration_secs=50.0)
    assert simulate(itself).k == max(k for k, nbytes in ranks.items() if nbytes <= rate * given.iteration.secs)


@pytest.mark.parametrize("name", REPEATING)
def test_rounds_moved_ahead_are_rounds_stepped_through(name):
    """To the last bit: the clock counts whole parts."""
    policy, settings = REPEATING[name]
    worked = []
    for seed, mtbf in ((0, 45.0), (1, 400.0)):
        tried = scenario(policy, failures=Poisson(mtbf), seed=seed, duration_secs=DURATION_SECS, **settings)
        jumped, stepped = simulate(tried), simulate(replace(tried, stepwise=True))
        assert predicted(jumped) == predicted(stepped)
        assert jumped.spent.total == pytest.approx(DURATION_SECS, abs=1e-6)
        worked.append((jumped.plans, stepped.plans))
    assert sum(few for few, _ in worked) <= sum(many for _, many in worked)


def test_moetion_probes_nothing_where_it_is_told_what_an_iteration_takes():
    by_default, never = (
        predicted(simulate(scenario(policy, failures=Poisson(150.0), seed=1, duration_secs=600.0, load=SKEWED)))
        for policy in (MoEtion(), Unprobed())
    )
    assert by_default == never


def test_a_quiet_run_is_not_stepped_through():
    assert simulate(scenario(Dense(1), duration_secs=1e6)).plans < 20


def test_a_dense_checkpoint_that_is_never_committed_is_not_asked_for_again_and_again():
    """While buffers are full and a system skips, nothing can change: iterations pass in one go."""
    tried = scenario(Dense(1), system={"when_busy": "skip"}, cluster={"storage_bytes_per_sec": 0.01}, duration_secs=1e7)
    told = simulate(tried)
    assert (told.plans, told.steps) == (3, 10_000_000)


@pytest.mark.parametrize("selector", ["load_aware", "least_loss"])
def test_rounds_of_selectors_by_load(selector):
    policy = MoC(k=2, selector=selector)
    tried = scenario(policy, failures=Poisson(150.0), seed=1, duration_secs=600.0, load=SKEWED)
    assert predicted(simulate(tried)) == predicted(simulate(replace(tried, stepwise=True)))


def test_a_budget_moves_ahead_by_an_eighth_at_most():
    """K and the wall go by all tokens routed, so no two rounds are quite alike: it is near, not equal."""
    ratios = []
    policy = MoC(k=1, plt_budget=0.05)
    for seed in range(3):
        tried = scenario(policy, failures=Poisson(200.0), seed=seed, load=SKEWED, duration_secs=1500.0)
        jumped, stepped = simulate(tried), simulate(replace(tried, stepwise=True))
        assert jumped.ettr == pytest.approx(stepped.ettr, rel=0.003)
        assert max(jumped.plt, stepped.plt) <= 0.05
        ratios.append(jumped.lost_tokens / stepped.lost_tokens)
    assert ratios == pytest.approx([1.0] * 3, abs=0.12)
    assert fmean(ratios) == pytest.approx(1.0, abs=0.05)


def test_a_budget_that_is_nearly_used_up_is_told_within_three_per_cent():
    """Of bytes, most of which the wall asks for; a jump over more than an eighth would be off by twice that."""
    policy, even = MoC(k=1, plt_budget=0.01), replace(SKEWED, drift=0.0)
    tried = scenario(policy, failures=Poisson(400.0), seed=1, load=even, duration_secs=4000.0)
    jumped, stepped = simulate(tried), simulate(replace(tried, stepwise=True))
    assert jumped.total_bytes_per_step == pytest.approx(stepped.total_bytes_per_step, rel=0.03)
    assert jumped.plans < stepped.plans / 5


# --- closed forms ---


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("pcie", [200e3, 20e3])
def test_without_failures_only_stalls_cost(every, pcie):
    tried = scenario(Dense(every), cluster={"pcie_bytes_per_sec": pcie}, duration_secs=40_000.0)
    stall = Costs(tried.layout, tried.precision, tried.iteration, tried.system)
    told = simulate(tried)
    expected = formulas.ettr(
        checkpoint_secs=stall.stall_secs(stall.bytes_of.dense),
        iteration_secs=1.0,
        interval=every,
        recovery_secs=0,
        mtbf_secs=None,
    )
    assert told.ettr == pytest.approx(expected, abs=3 / 40_000)  # the first interval and the last iteration
    assert (told.spent.stall > 0) == (pcie == 20e3)
    assert told.steps == told.spent.useful


def test_a_sync_checkpoint_stalls_for_copy_and_commit():
    tried = scenario(SyncDense(10), duration_secs=10_000.0)
    costs = Costs(tried.layout, tried.precision, tried.iteration, tried.system)
    each = costs.copy_secs(costs.bytes_of.dense) + costs.move_secs(costs.bytes_of.dense)
    assert simulate(tried).ettr == pytest.approx(10 / (10 + each), abs=2e-4)


@pytest.mark.parametrize("every", [10, 60])
def test_the_mean_over_seeds_is_near_the_closed_form(every):
    """First order holds for an MTBF that is long beside the interval and what a recovery takes."""
    mtbf, found = 900.0, []
    for seed in range(30):
        tried = scenario(Dense(every), failures=Poisson(mtbf), seed=seed, duration_secs=36_000.0)
        found.append(simulate(tried).ettr)
    costs = Costs(tried.layout, tried.precision, tried.iteration, tried.system)
    # Half an iteration more is lost, since it is cut off, and what is not committed yet.
    late = costs.copy_secs(costs.bytes_of.dense) + costs.move_secs(costs.bytes_of.dense)
    down = 5.0 + late + 0.5 + costs.copy_secs(costs.bytes_of.dense) + costs.storage_secs(costs.bytes_of.dense)
    recovery = formulas.expected_recovery_secs_dense(interval=every, iteration_secs=1.0, down_secs=down)
    closed = formulas.ettr(
        checkpoint_secs=0, iteration_secs=1.0, interval=every, recovery_secs=recovery, mtbf_secs=mtbf
    )
    error = stdev(found) / sqrt(len(found))
    assert abs(fmean(found) - closed) < 4 * error + (recovery / mtbf) ** 2 / 2


@pytest.mark.parametrize("window", [2, 4, 6])
def test_recovery_of_windows_takes_at_most_two_of_them(window):
    """0 <= R <= 2 W T, without down and load; and 1.5 W T on average, less the one that the last slot needs not."""
    down, recoveries = 5.0, []
    fast = {"nic_bytes_per_sec": 100e6, "pcie_bytes_per_sec": 100e6}  # committed at once
    for seed in range(5):
        tried = sparse(
            window, failures=Poisson(150.0), seed=seed, system={"durable": "peers", "freeze": False}, cluster=fast
        )
        told = simulate(tried)
        apart = [at.at_secs for at in told.history]
        if told.failures:
            recoveries.append((told.spent.lost + told.spent.replay) / told.failures)
            assert told.spent.lost + told.spent.replay <= told.failures * 2 * window * 1.0
        assert apart == sorted(apart)
        assert told.spent.down <= told.failures * down
    assert fmean(recoveries) == pytest.approx(1.5 * window - 1, abs=0.1 * window)


@pytest.mark.parametrize("system", [{}, {"durable": "peers", "storage_every": 200.0}, LOCAL])
def test_where_the_time_went_is_all_of_it(system):
    policy = MoEvement(window=3) if system is LOCAL else Dense(4)
    for seed in range(3):
        told = simulate(scenario(policy, failures=Poisson(40.0), seed=seed, system=system, cluster={"spare_nodes": 3}))
        assert told.spent.total == pytest.approx(3600.0, abs=1e-6)
        assert min(vars(told.spent).values()) >= 0
        assert told.spent.useful == told.steps * 1.0
        assert told.ettr == told.spent.useful / told.spent.total
        assert told.spent.recovery == pytest.approx(told.spent.total - told.spent.useful - told.spent.stall)


# --- a second simulator ---


@pytest.mark.parametrize(
    ("policy", "system", "cluster"),
    [
        (Dense(7), {}, {}),
        (Dense(1), {}, {}),
        (Dense(1), {}, SLOW),
        (Dense(1), {"when_busy": "skip"}, SLOW),
        (Dense(3), ONE_BUFFER, SLOW),
        (Dense(5), {}, {"pcie_bytes_per_sec": 20e3}),
        (SyncDense(6), {}, {}),
        (Dense(200), {}, {}),
    ],
)
def test_a_naive_simulator_tells_the_same(policy, system, cluster):
    for seed, mtbf in ((0, 30.0), (1, 100.0), (2, 700.0)):
        tried = scenario(
            policy, failures=Poisson(mtbf), seed=seed, system=system, cluster=cluster, duration_secs=3000.5
        )
        costs = Costs(tried.layout, tried.precision, tried.iteration, tried.system)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed).spawn(2)[0]))
        events, times = tried.failures.events(rng, tried.layout.nodes), [0.0]
        while times[-1] < 3000.5:
            times.append(next(events).at_secs)
        copy = costs.bytes_of.dense.rank / tried.layout.cluster.pcie_bytes_per_sec
        move = costs.bytes_of.dense.total / tried.layout.cluster.storage_bytes_per_sec
        naive = Naive(
            every=policy.every_n_steps,
            iteration=1.0,
            room=0.9,
            copy=copy,
            move=move,
            load=copy + move,
            detect=1.0,
            restart=4.0,
            failures=times[1:],
            until=3000.5,
            buffers=tried.system.max_in_flight,
            sync=isinstance(policy, SyncDense),
            skip=tried.system.when_busy == "skip",
        ).run()
        told = simulate(tried)
        if not told.advances:
            assert policy.every_n_steps == 200
            continue
        assert told.ettr == pytest.approx(naive.step / 3000.5, rel=1e-6)
        for name in ("stall", "lost", "down", "retrieve"):
            assert getattr(told.spent, name) == pytest.approx(getattr(naive, name), rel=1e-6, abs=1e-5), name


def test_progress_is_told_though_nothing_fails():
    told = []
    simulate(scenario(load=replace(SKEWED, drift_secs=100.0), duration_secs=1000.0), told.append)
    assert told == sorted(told)
    assert len(told) == 9
    assert 0.1 <= told[0] < told[-1] <= 1
