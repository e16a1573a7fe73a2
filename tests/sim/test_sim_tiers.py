"""Policies that plan for memory and for storage apart: what each tier has, counted again from the plans alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from moe_ckpt.core.step import SnapshotPlan, Tier
from moe_ckpt.policies import GradientLog, Guarded, MoEtion, Wrapper
from moe_ckpt.policies.base import PolicyContext
from moe_ckpt.policies.moetion import MOST_GRADIENTS
from moe_ckpt_sim.cluster.cluster import Parallel
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.failures.failures import FailureEvent, NoFailures
from moe_ckpt_sim.failures.traces import Trace
from moe_ckpt_sim.planner.resources import host_bytes
from moe_ckpt_sim.run.recovery import host_nodes
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.workload.load import ExpertLoad, tokens_of
from tests.sim.builders import MODEL, scenario

CATALOG = MODEL.catalog
PEERS = {"durable": "peers", "replicas": 1, "storage_every": 50}
SMALL = {"pcie_bytes_per_sec": 20e3, "nic_bytes_per_sec": 20e3}
"""Neither a copy nor a send of everything fits in an iteration, and a send takes longer."""
ALL_NODES = tuple(FailureEvent(70.6, node) for node in range(4))
WIDE = Parallel(pp=1, dp=1, ep=8)


@dataclass(frozen=True)
class Spied(Wrapper):
    """Remembers what it was told and what it planned."""

    seen: list = field(default_factory=list, compare=False)

    def plan(self, context: PolicyContext):
        plan = super().plan(context)
        self.seen.append((context, plan))
        return plan


def run(policy, *events, secs=80.0, **given):
    """Stepwise, so that each step is asked about. Events: a lost node, or the process that it has."""
    spied = Spied(policy)
    made = {"parallel": WIDE, "cluster": SMALL, "system": PEERS, **given}
    failures = Trace(recorded=events) if events else NoFailures()
    tried = scenario(spied, failures=failures, duration_secs=secs, stepwise=True, **made)
    return tried, simulate(tried), spied.seen


def killed(at, node=0):
    return FailureEvent(at, node, process=True)


def last_held(seen, step, tier):
    """``[L, E]`` the newest step up to ``step`` of which a tier got each expert."""
    found = np.full((len(CATALOG.layers), 8), -1)
    for context, plan in seen:
        if context.run.step > step:
            break
        goes = plan.full + (plan.memory_only if tier is Tier.HOST or plan.sends_memory_only else ())
        if tier is Tier.STORAGE and not context.memory.storage_due:
            continue
        for op in plan.full if tier is Tier.STORAGE else goes:
            if op in CATALOG.expert_at:
                found[CATALOG.expert_at[op]] = context.run.step
    return found


# --- MoEtion ---


def test_memory_gets_two_sets_and_storage_one():
    _, _, seen = run(MoEtion())
    assert seen[0][1].full == CATALOG.everything
    two = [plan for context, plan in seen if not context.memory.storage_due]
    one = [context.run.step for context, plan in seen if context.memory.storage_due]
    assert one[0] == seen[0][0].run.step
    assert next(step for step in one[1:] if step > 20) == 50
    assert all(not plan.sends_memory_only and plan.memory_only for plan in two)
    assert all(plan.sends_memory_only and not plan.memory_only for context, plan in seen if context.run.step in one)


@pytest.mark.parametrize(
    ("event", "tiers"),
    [
        (killed(45.6), (Tier.HOST, Tier.HOST)),
        (FailureEvent(45.6, 0), (Tier.PEER, Tier.HOST)),
    ],
    ids=["a process", "a node"],
)
def test_what_a_failure_loses_is_what_the_tier_that_is_left_has_not(event, tiers):
    """tiers: of what the failed node's ranks saved, and of all else."""
    tried, outcome, seen = run(MoEtion(), event, secs=70.0)
    restored = outcome.history[0].useful_steps
    assert restored > 20
    first = [(context, plan) for context, plan in seen if not context.run.faults]
    counts = tokens_of(np.zeros((4, 8)), tried.tokens_per_step * MODEL.top_k)
    mine = (host_nodes(tried.layout) == 0).any(axis=2)
    held = np.where(mine, *(last_held(first, restored, tier) for tier in tiers))
    assert (held <= restored).all()
    assert outcome.lost_tokens == int((counts * (restored - held)).sum()) > 0


def test_when_memory_is_gone_storage_has_its_own_set():
    """No copy is left: what comes back is what was chosen for storage, and no newer one."""
    fast = {**SMALL, "storage_bytes_per_sec": 1e6}
    tried, outcome, seen = run(MoEtion(), *ALL_NODES, secs=90.0, cluster=fast)
    assert outcome.recovered["storage"] == 1
    restored = outcome.history[0].useful_steps
    assert restored == 50
    first = [(context, plan) for context, plan in seen if not context.run.faults]
    counts = tokens_of(np.zeros((4, 8)), tried.tokens_per_step * MODEL.top_k)
    held = last_held(first, restored, Tier.STORAGE)
    assert outcome.lost_tokens == int((counts * (restored - held)).sum())
    assert outcome.fallbacks == 1


def test_what_only_memory_of_the_life_before_has_is_saved_at_once():
    _, _, seen = run(MoEtion(experts=2), killed(30.6), secs=60.0)
    context, _ = next((context, plan) for context, plan in seen if context.run.faults)
    assert context.tokens.expected_unsaved[Tier.HOST].sum() > 0
    later = next(each for each, _ in seen if each.run.faults and each.run.step > context.run.step)
    assert (later.tokens.chosen_at[Tier.HOST] >= context.run.step).all(), "all of them: storage is far behind"


def test_a_guard_around_it_sees_the_same():
    plain, guarded = (run(policy)[2] for policy in (MoEtion(), Guarded(MoEtion(), 0.9)))
    assert [plan.full for _, plan in plain] == [plan.full for _, plan in guarded]


def test_with_links_for_everything_there_is_nothing_to_choose():
    fast = {"pcie_bytes_per_sec": 1e6, "nic_bytes_per_sec": 1e6}
    _, outcome, seen = run(MoEtion(), FailureEvent(45.6, 0), cluster=fast)
    assert outcome.lost_tokens == 0
    assert {len(plan.full + plan.memory_only) for _, plan in seen} == {len(CATALOG.everything)}


# --- logs of gradients ---

LOG = {"cluster": {"pcie_bytes_per_sec": 30e3, "nic_bytes_per_sec": 100e3}}


def costs_of(tried):
    return Costs(tried.layout, tried.precision, tried.iteration, tried.system)


def test_a_log_is_planned_within_the_links():
    tried, outcome, seen = run(GradientLog(), **LOG)
    costs = costs_of(tried)
    assert outcome.window > 1
    for context, plan in seen:
        assert bool(plan.gradients) != (context.memory.storage_due or context.run.last_step is None)
        if plan.gradients:
            assert costs.copy_secs(costs.bytes_of.plan(plan)) <= tried.iteration.open_secs
            assert costs.move_secs(costs.bytes_of.plan(plan)) <= tried.iteration.secs
    assert all(later.run.step == former.run.step + 1 for (former, _), (later, _) in pairwise(seen))


def test_a_step_weighs_what_the_formula_says():
    tried, outcome, seen = run(GradientLog(window=4), **LOG)
    costs = costs_of(tried)
    logged = [costs.bytes_of.plan(plan).total for _, plan in seen if plan.gradients]
    whole = len(logged) // 4 * 4
    mean = sum(logged[:whole]) / whole / MODEL.total
    assert mean == pytest.approx((6 + 2 * 3) / 4, rel=0.02), "full/W + g (W - 1)/W per parameter"
    assert outcome.window == 4


@pytest.mark.parametrize(("event", "where"), [(killed(45.6), "host"), (FailureEvent(45.6, 0), "peer")])
def test_a_failure_costs_the_step_under_way_and_what_is_not_complete_yet(event, where):
    tried, outcome, seen = run(GradientLog(window=4), event, secs=70.0, **LOG)
    assert outcome.recovered[where] == 1
    assert outcome.lost_tokens == 0
    restored = outcome.history[0].useful_steps
    before = [context.run.step for context, plan in seen if not context.run.faults]
    costs = costs_of(tried)
    newest = max(seen, key=lambda one: one[0].run.step if not one[0].run.faults else -1)[1]
    lag = costs.copy_secs(costs.bytes_of.plan(newest)) + costs.move_secs(costs.bytes_of.plan(newest))
    assert before[-1] - restored <= int(lag) + 1
    assert outcome.spent.replay == pytest.approx(3 * tried.iteration.update_secs)
    anchored = {}
    for context, plan in seen:
        if context.run.step <= restored and not context.run.faults:
            anchored.update(dict.fromkeys(plan.full, context.run.step))
    steps = np.array([restored - anchored[op] for op in CATALOG.everything])
    held = costs.bytes_of.log(steps)
    sizes = tried.layout.model.sizes(tried.precision)
    chained = zip(CATALOG.everything, steps.tolist(), strict=True)
    assert held.total == sum(sizes[op].full + sizes[op].consumed * count for op, count in chained)
    network = held.rank / costs.nic_rate if where == "peer" else 0.0
    assert outcome.spent.retrieve == pytest.approx(costs.copy_secs(held) + network)
    after = next(plan for context, plan in seen if context.run.faults)
    assert after.full == CATALOG.everything, "a new life begins its log anew"


def test_when_memory_is_gone_a_dense_step_comes_from_storage_and_the_log_begins_anew():
    _, outcome, seen = run(GradientLog(window=4), *ALL_NODES, secs=90.0, **LOG)
    assert outcome.recovered["storage"] == 1
    assert outcome.history[0].useful_steps == 50
    assert outcome.lost_tokens == 0
    assert outcome.spent.replay == 0.0
    context, plan = next((context, plan) for context, plan in seen if context.run.faults)
    assert context.run.step == 51
    assert plan.full == CATALOG.everything


def test_a_log_that_peers_do_not_get_whole_is_no_way_back_for_a_lost_node():
    """Memory has each step, so that a killed process comes back to the newest; a lost node to what peers have whole."""
    slow = {"cluster": {"pcie_bytes_per_sec": 30e3, "nic_bytes_per_sec": 10e3}}
    system = {**PEERS, "when_busy": "skip", "max_in_flight": 1}
    tried, outcome, seen = run(GradientLog(window=4), killed(45.6), system=system, **slow)
    pairs = pairwise(context.run for context, _ in seen)
    assert all(later.step == former.step + 1 for former, later in pairs if not later.faults)
    sent = outcome.sent_bytes_per_step * (outcome.steps + 1)
    assert 0 < sent < sum(costs_of(tried).bytes_of.stored(plan).sent for _, plan in seen)
    assert outcome.recovered["host"] == 1
    assert outcome.history[0].useful_steps > 40
    _, lost, _ = run(GradientLog(window=4), FailureEvent(45.6, 0), system=system, **slow)
    assert lost.recovered["peer"] == 1
    assert lost.history[0].useful_steps == 1, "the snapshot of everything that the log begins with"


def test_what_is_not_logged_would_be_lost():
    """The books go by the plans: gradients of one operator left out, and its anchor is no way to the newest step."""

    class Forgetful(GradientLog):
        def plan(self, context):
            plan = super().plan(context)
            return SnapshotPlan(plan.step, plan.full, gradients=plan.gradients[1:]) if plan.gradients else plan

    _, _, seen = run(Forgetful(window=4), **LOG)
    context = next(context for context, plan in seen if context.run.step == 3)
    assert (context.memory.anchored_at < 0).any()


def test_without_storage_nothing_is_missing_there():
    system = {"durable": "node"}
    _, _, seen = run(GradientLog(window=4), system=system, **LOG)
    assert all(plan.gradients for _, plan in seen[1:])


def test_host_memory_holds_anchors_and_the_gradients_since_of_its_own_and_of_its_peers():
    """Half of the gradients of a round's three other steps, and the step that comes in."""
    tried, outcome, _ = run(GradientLog(window=4), **LOG)
    costs, step = costs_of(tried), outcome.rank_bytes_per_step
    anchors = costs.bytes_of.dense.rank
    held = anchors + (4 * step - anchors) / 2 + step
    assert host_bytes(costs, outcome) == pytest.approx(2 * (3 * outcome.heaviest_bytes + 2 * held))


def test_wider_gradients_make_longer_rounds():
    tried, _, _ = run(GradientLog(), cluster={**LOG["cluster"], "pcie_bytes_per_sec": 22e3})
    narrow, wide = (
        simulate(replace(tried, precision=replace(tried.precision, gradient_bytes=each))).window for each in (1.0, 3.0)
    )
    assert narrow < wide


# --- MoEtion that sends gradients ---

MEMORY = {"durable": "peers", "replicas": 1}


def test_gradients_take_the_place_of_full_state_on_the_way_to_peers():
    """A full copy and eight gradients in turn, of 6 bytes and of 2, where the same experts are chosen each time."""
    tried = scenario(MoEtion(experts=8), system=MEMORY, duration_secs=600.0)
    logs = replace(tried, system=replace(tried.system, policy=MoEtion(experts=8, recompute=True)))
    full, logged = simulate(tried), simulate(logs)
    assert logged.plt == full.plt
    costs = Costs(tried.layout, tried.precision, tried.iteration, tried.system)
    shared = costs.bytes_of.stored(SnapshotPlan(1, tuple(op.id for op in CATALOG.always_saved))).sent
    expected = shared + (costs.bytes_of.dense.sent - shared) * (6 + 8 * 2) / (9 * 6)
    assert logged.sent_bytes_per_step == pytest.approx(expected, rel=0.03)
    assert full.sent_bytes_per_step == pytest.approx(costs.bytes_of.dense.sent, rel=0.01)


def test_a_failure_makes_the_updates_since_full_copies_once_more():
    lost = (FailureEvent(100.5, 1), FailureEvent(300.5, 2))
    tried = scenario(MoEtion(experts=8), system=MEMORY, duration_secs=600.0, failures=Trace(recorded=lost))
    logs = replace(tried, system=replace(tried.system, policy=MoEtion(experts=8, recompute=True)))
    assert simulate(tried).spent.replay == 0.0
    assert 0.0 < simulate(logs).spent.replay <= 2 * MOST_GRADIENTS * tried.iteration.update_secs


def test_what_is_left_out_was_sent_in_full():
    _, _, seen = run(MoEtion(recompute=True), secs=60.0, load=ExpertLoad(skewness=0.5, drift=0.0))
    logged = [plan for _, plan in seen if plan.gradients]
    assert logged
    for (_, before), (_, after) in pairwise(seen):
        assert set(before.gradients) <= {*after.full, *after.gradients}
