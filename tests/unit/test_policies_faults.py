"""Whole runs with failures, through the library's own run_ledger: the budget holds whatever happens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lost_tokens import Workload, simulate
from benchmarks.moc_sim import SimulatedRun, catalog
from moe_ckpt.policies import CheckFreq, Dense, Guarded, MoC
from moe_ckpt.policies.selectors import SELECTORS
from tests.support.constants import with_constants
from tests.unit.builders import mixed

BUDGET = 0.05


def troubled(policy, seed, *, sizes=(8, 8), ranks=2, steps=120):
    """A run in which anything happens, yielded after every failure as (run, fault, K of the last plan).

    Loads that are skewed, zero or change suddenly; commits 0 to 2 steps late, heard of later still, that fail or are
    skipped; failures at any step, sometimes in a row, that return to older checkpoints, or with host memory alive.
    """
    rng = np.random.default_rng(seed)
    run = SimulatedRun(policy, mixed(*sizes), ranks)
    fault_rate, trouble = rng.uniform(0.01, 0.3), rng.uniform(0, 0.3)
    shares = _shares(rng, sizes)
    for _ in range(steps):
        if rng.random() < 0.05:
            shares = _shares(rng, sizes)
        tokens = int(rng.integers(0, 2000)) * (rng.random(len(sizes)) < 0.9)
        counts = rng.multinomial(tokens, shares)
        run.step(
            counts,
            delay=int(rng.integers(0, 3)),
            tell=int(rng.integers(0, 2)),
            fails=bool(rng.random() < trouble),
            busy=bool(rng.random() < trouble),
        )
        while rng.random() < fault_rate:
            back = int(rng.integers(0, 4)) if rng.random() < 0.3 else 0
            survives = rng.random(counts.shape) < 0.5 if rng.random() < 0.5 else None
            fault = run.fail(back, survives)
            if fault is not None:
                yield run, fault


def _shares(rng, sizes):
    """Of each layer's tokens, one row per layer; a layer has none of the experts beyond its size."""
    alpha = rng.uniform(0.05, 2)
    rows = [rng.dirichlet(np.full(size, alpha)) for size in sizes]
    return np.array([np.pad(row, (0, max(sizes) - len(row))) for row in rows])


policies = st.builds(
    MoC,
    k=st.sampled_from([1, 2, 3]),
    every_n_steps=st.sampled_from([1, 2, 5]),
    selector=st.sampled_from(sorted(SELECTORS)),
    snapshot_k=st.sampled_from([None, 4, 8]),
    plt_budget=st.sampled_from([BUDGET, "strict", 0.01]),
)
guarded = st.builds(
    Guarded,
    policy=st.builds(
        MoC,
        k=st.sampled_from([1, 3]),
        selector=st.sampled_from(sorted(SELECTORS)),
        plt_budget=st.sampled_from([None, 0.5, 0.005]),
    )
    | st.just(with_constants(CheckFreq, profile_steps=2, max_interval=3)()),
    budget=st.sampled_from([BUDGET, 0.01]),
)


@settings(max_examples=80, deadline=None)
@given(
    policy=policies | guarded,
    seed=st.integers(0, 2**32),
    ranks=st.sampled_from([1, 2, 3, 8]),
    sizes=st.sampled_from([(8, 8), (12, 8), (8, 16, 8)]),
)
def test_no_sequence_of_faults_breaks_the_budget(policy, seed, ranks, sizes):
    budget = policy.budget if isinstance(policy, MoC) else policy.plt_budget
    for run, _ in troubled(policy, seed, sizes=sizes, ranks=ranks):
        assert run.run_ledger.tokens.plt <= budget
        assert all(fault.lost_tokens <= budget * fault.routed_tokens for fault in run.run_ledger.tokens.faults)


@settings(max_examples=40, deadline=None)
@given(
    policy=st.builds(
        Guarded,
        policy=st.builds(MoC, k=st.sampled_from([1, 3]), selector=st.sampled_from(sorted(SELECTORS))),
        budget=st.sampled_from([None, BUDGET]),
        mlt_budget=st.sampled_from([0.03, 0.005]),
    ),
    seed=st.integers(0, 2**32),
    sizes=st.sampled_from([(8, 8), (8, 16, 8)]),
)
def test_no_single_fault_breaks_the_budget_of_mlt(policy, seed, sizes):
    for run, fault in troubled(policy, seed, sizes=sizes):
        assert fault.mlt <= policy.most_mlt
        assert policy.plt_budget is None or run.run_ledger.tokens.plt <= policy.plt_budget


@settings(max_examples=25, deadline=None)
@given(policy=st.builds(MoC, k=st.just(8), selector=st.sampled_from(sorted(SELECTORS))) | st.just(Dense()),
       seed=st.integers(0, 2**32))  # fmt: skip
def test_saving_all_experts_loses_nothing(policy, seed):
    for run, fault in troubled(policy, seed):
        assert (fault.lost_tokens, run.run_ledger.tokens.plt) == (0, 0)


def test_without_a_budget_these_runs_lose_more():
    """The runs above are hard enough: most break every budget where nobody keeps to one."""
    worst = [max((run.run_ledger.tokens.plt for run, _ in troubled(MoC(), seed)), default=0) for seed in range(12)]
    assert sum(plt > 0.075 for plt in worst) > 6
    worst = [max((fault.mlt for _, fault in troubled(MoC(), seed)), default=0) for seed in range(12)]
    assert sum(mlt > 0.03 for mlt in worst) > 6


def test_k_rises_in_a_run_that_fails_often_and_comes_down_when_it_no_longer_does():
    run = SimulatedRun(MoC(plt_budget=BUDGET), catalog(2, 8))
    counts = np.full((2, 8), 50, dtype=np.int64)
    ks = []
    for _ in range(6):
        ks += [run.step(counts).k for _ in range(10)]
        run.fail()
    assert max(ks) > 2
    ks = [run.step(counts).k for _ in range(500)]
    assert ks == sorted(ks, reverse=True)
    assert ks[-1] == 1


def test_a_budget_does_not_mean_saving_everything_all_the_time():
    """Once enough was routed, checkpoints are as small as K says: after (8 - 1) / 2 / 0.05 = 70 steps."""
    run = SimulatedRun(MoC(plt_budget=BUDGET), catalog(2, 8))
    counts = np.full((2, 8), 50, dtype=np.int64)
    saved = [len([op for op in run.step(counts).full if op.startswith("expert")]) for _ in range(200)]
    assert saved[0] == 16
    assert max(saved[100:]) == 2
    assert sum(saved[1:20]) > 2 * 19


@pytest.mark.parametrize("ranks", [1, 4], ids=["one rank", "capacity used up"])
@pytest.mark.parametrize("skewness", [0.1, 0.3])
def test_selection_by_load_loses_no_more_than_taking_turns(skewness, ranks):
    """Normalised HHI of routing 0.1 and 0.3, 4 seeds with the same loads and faults for every selector."""
    work = Workload(layers=4, experts=8, ranks=ranks, skewness=skewness, steps=300, mtbf_steps=15)
    lost = {s: sum(simulate(MoC(selector=s), work, seed).lost_tokens for seed in range(4)) for s in SELECTORS}
    assert lost["least_loss"] <= lost["load_aware"] <= lost["sequential"]
