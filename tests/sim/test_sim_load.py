"""Loads that are drawn, and what experts lose: tokens counted again from the plans."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import MoC, Wrapper
from moe_ckpt.policies.base import PolicyContext
from moe_ckpt.policies.budget import dynamic_k
from moe_ckpt_sim.failures.failures import Poisson
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.workload.load import DriftingLoad, ExpertLoad, tokens_of
from tests.sim.builders import MODEL, scenario, trace

SKEWED = ExpertLoad(skewness=0.2, drift=0.0)


def generator(seed=0):
    return np.random.Generator(np.random.PCG64(seed))


# --- loads ---


@pytest.mark.parametrize("skewness", [0.02, 0.1, 0.25, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("experts", [8, 64])
def test_the_skewness_drawn_is_the_one_wanted(skewness, experts):
    """``S = (HHI - 1/E) / (1 - 1/E)``, on average over layers (MoEvement, appendix D)."""
    popularity = ExpertLoad(skewness).draw(generator(), 4000, experts)
    assert skewness_of(popularity).mean() == pytest.approx(skewness, rel=0.06)
    assert skewness_of(popularity).std() > 0


@pytest.mark.parametrize("skewness", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("drift", [0.1, 0.6, 1.0])
def test_a_load_stays_as_skewed_however_often_it_drifts(skewness, drift):
    load, rng = ExpertLoad(skewness, drift), generator(1)
    popularity = load.draw(rng, 3000, 16)
    for _ in range(40):
        popularity = load.drifted(rng, popularity)
    assert skewness_of(popularity).mean() == pytest.approx(skewness, rel=0.06)


@pytest.mark.parametrize("drift", [0.1, 0.5, 1.0])
def test_a_drift_draws_some_experts_anew(drift):
    load = ExpertLoad(0.3, drift)
    old = load.draw(generator(1), 500, 8)
    changed = load.drifted(generator(2), old) != old
    assert changed.mean() == pytest.approx(drift, abs=0.03)
    assert changed.any(axis=0).all()


def test_what_is_even_does_not_drift():
    load = ExpertLoad(0.0, 0.5)
    assert (load.drifted(generator(), load.draw(generator(), 2, 4)) == 0).all()
    assert not load.drifts
    assert not ExpertLoad(0.5, 0.0).drifts


def skewness_of(popularity):
    """S of each layer."""
    tokens, experts = tokens_of(popularity, 2**40), popularity.shape[1]
    return (((tokens / 2**40) ** 2).sum(axis=1) - 1 / experts) / (1 - 1 / experts)


def test_all_tokens_are_dealt_out():
    for skewness in (0.0, 0.3, 0.999999):
        popularity = ExpertLoad(skewness).draw(generator(3), 5, 7)
        for total in (1, 6, 7, 1001, 2**40):
            found = tokens_of(popularity, total)
            assert (found.sum(axis=1) == total).all()
            assert (found >= 0).all()


def test_an_even_load_is_even_and_the_rest_goes_to_the_first():
    popularity = ExpertLoad(0.0).draw(generator(), 2, 4)
    assert tokens_of(popularity, 12).tolist() == [[3] * 4] * 2
    assert tokens_of(popularity, 14).tolist() == [[4, 4, 3, 3]] * 2


def test_layers_with_fewer_experts_get_their_tokens_all_the_same():
    popularity = ExpertLoad(0.3).draw(generator(), 2, 4)
    popularity[1, 3] += 1e6  # beyond what that layer has
    found = tokens_of(popularity, 100, [4, 2])
    assert found.sum(axis=1).tolist() == [100, 100]
    assert found[1, 2:].tolist() == [0, 0]
    assert (found[1, :2] > 0).any()
    assert tokens_of(ExpertLoad(0.3).draw(generator(), 0, 0), 100, []).shape == (0, 0)


def test_the_load_at_a_time_is_the_same_for_all_systems():
    """One looks every second and the other at 300 s, when two drifts are past: both see the same."""
    load = ExpertLoad(0.3, 0.5, 130.0)
    seen = []
    for every in (1, 300):
        drifting, counts = DriftingLoad(load, [8, 8], 1000, generator()), {}
        for now in range(every, 301, every):
            drifting.drift(float(now))
            counts[now] = drifting.counts().tolist()
        seen.append(counts)
    assert seen[0][300] == seen[1][300] != seen[0][200] != seen[0][100]


def test_bad_loads():
    for field_name, value in (("skewness", 1.0), ("skewness", -0.1), ("skewness", float("nan")), ("drift", 1.5)):
        with pytest.raises(ConfigError, match=field_name):
            ExpertLoad(**{field_name: value})
    for value in (0, -1.0, True, "600"):
        with pytest.raises(ConfigError, match="drift_secs"):
            ExpertLoad(drift_secs=value)


# --- lost tokens ---


@dataclass(frozen=True)
class Recorded(Wrapper):
    """A policy, and what it was told and planned."""

    told: list[PolicyContext] = field(default_factory=list, hash=False)
    plans: list[SnapshotPlan] = field(default_factory=list, hash=False)

    @property
    def needs(self):
        return replace(super().needs, popularity="decayed")

    def plan(self, context):
        plan = self.policy.plan(context)
        if plan:
            self.told.append(context)
            self.plans.append(plan)
        return plan


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("selector", ["sequential", "load_aware", "least_loss"])
def test_lost_tokens_counted_again_from_the_plans(selector, k, every):
    """A fault loses, of each expert, what was routed from its newest save to the step that is returned to.

    The load does not change, so that is steps times tokens per step; a save that was lost before it was committed is
    none, and what a former fault took from an expert it has not got a second time.
    """
    policy = Recorded(MoC(k=k, selector=selector, every_n_steps=every))
    events = ((333.5, 0), (601.25, 1), (603.0, 2), (955.5, 3))
    tried = scenario(policy, failures=trace(*events), load=SKEWED, stepwise=True, duration_secs=1000.0)
    lives = [0]
    told = simulate(tried, progress=lambda _: lives.append(len(policy.plans)))
    counts = policy.told[-1].tokens.popularity  # of every step
    returned = [sample.useful_steps for sample in told.history[:-1]]
    assert (told.failures, len(returned)) == (4, 3)  # one came while another was repaired

    lost, saved = 0, np.zeros_like(counts)
    for step, first, end in zip(returned, lives[:-1], lives[1:], strict=True):
        for plan in policy.plans[first:end]:
            for op in plan.full:
                if op in MODEL.catalog.expert_at and plan.step <= step:
                    saved[MODEL.catalog.expert_at[op]] = plan.step
        lost += int(((step - saved) * counts).sum())
        saved[:] = step  # what is lost is not lost again
    assert told.lost_tokens == lost
    assert (lost == 0) == (k == 8)
    assert told.plt == lost / (told.steps * counts.sum())


@pytest.mark.parametrize(("k", "snapshot_k"), [(1, 4), (2, 3), (1, 8)])
def test_experts_come_back_from_host_memory_that_is_still_there(k, snapshot_k):
    """Two-level PEC: on nodes that live on, the newest checkpoint's other experts are newer than on storage. They are
    not lost, and not stored either. Each layer is a stage on a node of its own."""
    policy = Recorded(MoC(k=k, snapshot_k=snapshot_k, every_n_steps=10))
    events = ((333.5, 0), (601.25, 1), (603.0, 2), (955.5, 3))
    tried = scenario(policy, failures=trace(*events), load=SKEWED, stepwise=True, duration_secs=1000.0)
    lives = [0]
    told = simulate(tried, progress=lambda _: lives.append(len(policy.plans)))
    counts = policy.told[-1].tokens.popularity
    returned = [sample.useful_steps for sample in told.history[:-1]]
    place = MODEL.catalog.expert_at

    lost, stored = 0, np.zeros_like(counts)
    for step, first, end, gone in zip(returned, lives[:-1], lives[1:], ((0,), (1, 2), (3,)), strict=True):
        found = stored
        for plan in (plan for plan in policy.plans[first:end] if plan.step <= step):
            for op in filter(place.__contains__, plan.full):
                stored[place[op]] = plan.step
            found = stored.copy()
            for op in filter(place.__contains__, plan.memory_only):
                if place[op][0] not in gone:
                    found[place[op]] = plan.step
        lost += int(((step - found) * counts).sum())
        stored += step - found
    assert told.lost_tokens == lost
    only_stored = simulate(replace(tried, system=replace(tried.system, policy=MoC(k=k, every_n_steps=10))))
    assert told.lost_tokens < only_stored.lost_tokens
    assert told.total_bytes_per_step == pytest.approx(only_stored.total_bytes_per_step)
    assert told.rank_bytes_per_step > only_stored.rank_bytes_per_step


def test_what_host_memory_keeps_does_not_hold_up_the_commit():
    """Of one expert in eight; all would take as long as a dense checkpoint."""
    slow = {"storage_bytes_per_sec": 20e3}
    dense = MoC(k=8, every_n_steps=20)
    kept, stored, full = (
        simulate(scenario(policy, failures=trace((170.0, 0)), cluster=slow, duration_secs=200.0))
        .history[0]
        .useful_steps
        for policy in (MoC(k=1, snapshot_k=8, every_n_steps=20), MoC(k=1, every_n_steps=20), dense)
    )
    assert kept == stored == 160
    assert full < 160


# --- Dynamic-K and the budget ---


def test_k_doubles_as_faults_use_up_the_budget():
    tried = scenario(
        MoC(k=1, plt_budget=0.01), failures=Poisson(60.0), load=SKEWED, duration_secs=3000.0, stepwise=True
    )
    told = simulate(tried)
    found = {sample.k for sample in told.history if sample.k}
    assert {1, 2, 4} <= found <= {1, 2, 4, 8}
    free = simulate(scenario(MoC(k=1), failures=Poisson(60.0), load=SKEWED, duration_secs=3000.0))
    assert {sample.k for sample in free.history if sample.k} == {1}
    assert free.plt > 0.01 > told.plt


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [0.005, 0.02, 0.05])
def test_plt_is_never_above_its_budget(budget, seed):
    """Not at the first fault, either: the wall makes early checkpoints denser."""
    policy = MoC(k=1, plt_budget=budget)
    told = simulate(scenario(policy, failures=Poisson(50.0), seed=seed, load=SKEWED, duration_secs=1500.0))
    assert told.failures > 10
    assert max(sample.plt for sample in told.history) <= budget
    assert told.plt > 0


def test_k_does_not_fall_when_more_is_lost():
    found = [dynamic_k(1, 64, lost, 1_000_000, 0.05) for lost in range(0, 60_000, 500)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 64)
