"""Bytes on ranks and seconds on links, counted again rank by rank; intervals by formula and by trying."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, sqrt

import pytest

from moe_ckpt.core.step import SnapshotPlan, Tier
from moe_ckpt.core.window import Window
from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt_sim.cluster.clock import MOST_SECS, on_clock
from moe_ckpt_sim.cluster.cluster import Parallel
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.failures.failures import Poisson
from moe_ckpt_sim.planner.intervals import by_formula, least_interval, oracle, usual, with_interval
from moe_ckpt_sim.run.recovery import Recoveries
from moe_ckpt_sim.run.run import ettr_of, simulate
from moe_ckpt_sim.run.sync import SyncDense
from moe_ckpt_sim.workload.load import tokens_of
from moe_ckpt_sim.workload.model import Precision
from tests.sim.builders import MODEL, scenario, sparse, trace

PARALLELS = [Parallel(), Parallel(pp=4, ep=2), Parallel(pp=2, dp=2, ep=2), Parallel(pp=1, dp=4), Parallel(pp=2, ep=4)]


def costs_of(tried):
    return Costs(tried.layout, tried.precision, tried.iteration, tried.system)


def by_rank(layout, bytes_of, operators):
    """Bytes of each rank: experts on their owners, shared where several hold them; the rest spread over a stage."""
    placement, width = layout.placement, layout.parallel.stage_ranks
    found = [0.0] * layout.parallel.ranks
    for op in operators:
        stage = layout.stage_of[op]
        ranks = [stage * width + at for at in range(width)]
        if op in MODEL.catalog.expert_at and layout.parallel.ep > 1:
            layer, expert = MODEL.catalog.expert_at[op]
            first = placement.owners[layer][expert]
            ranks = [first + pipeline * layout.parallel.ep for pipeline in range(layout.parallel.dp)]
        for rank in ranks:
            found[rank] += bytes_of(op) / len(ranks)
    return found


@pytest.mark.parametrize("parallel", PARALLELS)
def test_the_rank_that_has_most(parallel):
    costs = costs_of(scenario(parallel=parallel))
    for operators in (MODEL.catalog.everything, MODEL.catalog.everything[5:17], tuple(MODEL.catalog.everything[::3])):
        snapshot = costs.bytes_of.plan(SnapshotPlan(1, operators))
        ranks = by_rank(costs.layout, lambda op: costs.sizes[op].full, operators)
        assert snapshot.rank == ceil(max(ranks) - 1e-6)
        assert snapshot.total == sum(costs.sizes[op].full for op in operators) == pytest.approx(sum(ranks))


@pytest.mark.parametrize("parallel", PARALLELS)
def test_slots_of_windows(parallel):
    """Anchors in full, what comes later as compute weights; one slot with everything is a dense checkpoint."""
    costs = costs_of(scenario(parallel=parallel))
    everything = MODEL.catalog.everything
    assert costs.bytes_of.window(Window(0, (everything,))) == (costs.bytes_of.dense,)
    slots = (everything[:9], everything[9:30], everything[30:])
    for at, snapshot in enumerate(costs.bytes_of.window(Window(0, slots))):
        later = {op for slot in slots[at + 1 :] for op in slot}
        saved = [op for op in everything if op in later or op in slots[at]]
        ranks = by_rank(
            costs.layout,
            lambda op, later=later: costs.sizes[op].compute if op in later else costs.sizes[op].full,
            saved,
        )
        assert snapshot.rank == pytest.approx(max(ranks), abs=len(slots[at]))
        assert snapshot.total == pytest.approx(sum(ranks))


def test_what_is_kept_in_host_memory_is_copied_too_and_not_counted_twice():
    costs = costs_of(scenario(MoC(k=1, snapshot_k=3)))
    operators = MODEL.catalog.everything
    held = SnapshotPlan(1, operators[:20], memory_only=operators[20:30])
    assert costs.bytes_of.plan(held) == costs.bytes_of.plan(SnapshotPlan(1, operators[:30]))
    assert costs.bytes_of.stored(held) == costs.bytes_of.plan(SnapshotPlan(1, operators[:20]))


def test_links():
    costs = costs_of(scenario(Dense(1)))
    dense = costs.bytes_of.dense
    assert costs.copy_secs(dense) == dense.rank / 200e3
    assert costs.move_secs(dense) == dense.total / 400e3  # all ranks share it
    assert costs.stall_secs(dense) == max(0.0, dense.rank / 200e3 - 0.9)
    peers = costs_of(scenario(Dense(1), system={"durable": "peers", "replicas": 2}, cluster={"nic_share": 0.5}))
    assert peers.nic_rate == 100e3 * 0.5 / 2  # two ranks on a node
    assert peers.move_secs(dense) == dense.rank / (peers.nic_rate / 2)
    assert peers.measured.persist_secs == peers.copy_secs(dense) + peers.move_secs(dense)


@pytest.mark.parametrize(
    ("parallel", "compute", "portion"),
    [
        (Parallel(pp=2, dp=2, ep=2), 1, 1.0),  # masters beside the weights: the latter are in no snapshot
        (Parallel(pp=2, dp=2, ep=2), 2, 4 / 6),
        (Parallel(pp=1, dp=8, ep=1), 2, 0.0),
    ],
)
def test_weights_that_a_distributed_optimizer_gathers_are_not_sent(parallel, compute, portion):
    of_two = {"durable": "peers", "replicas": 1}
    tried = scenario(Dense(1), parallel=parallel, system=of_two, cluster={"gpus_per_node": 1, "nodes": 8})
    costs = costs_of(replace(tried, precision=Precision(compute_bytes=compute, master_bytes=2, optimizer_bytes=4)))
    everything = MODEL.catalog.everything
    some = SnapshotPlan(1, everything[:30])
    for found in (costs.bytes_of.dense, costs.bytes_of.plan(some), *costs.bytes_of.window(Window(0, (everything,)))):
        assert found.sent == pytest.approx(portion * found.rank, abs=2)
        assert costs.move_secs(found) == found.sent / costs.move_rate


def test_without_data_parallel_peers_experts_are_sent_whole():
    tried = scenario(Dense(1), parallel=Parallel(pp=4, dp=1, ep=2), system={"durable": "peers", "replicas": 1})
    sends = costs_of(tried).sends
    assert (sends.shared, sends.experts, sends.expert_weights) == (True, True, True)


def test_a_wider_link_never_makes_anything_longer():
    for link in ("pcie_bytes_per_sec", "nic_bytes_per_sec", "storage_bytes_per_sec"):
        for system in ({}, {"durable": "peers"}):
            found = [costs_of(scenario(Dense(1), system=system, cluster={link: rate})) for rate in (1e3, 1e4, 1e6)]
            for secs in ("copy_secs", "move_secs", "stall_secs"):
                told = [getattr(costs, secs)(costs.bytes_of.dense) for costs in found]
                assert told == sorted(told, reverse=True)


def test_loading():
    """From storage all state passes one link; from peers only a dead node's does, at their NICs' rate; own memory is
    there."""
    tried = sparse(4)
    costs = costs_of(tried)
    recoveries, counts = Recoveries(costs, 16), tokens_of(tried.load.draw(None, 4, 8), 800)
    dense = costs.bytes_of.dense
    copy = dense.rank / 200e3
    assert recoveries.whole(None, counts, Tier.STORAGE).retrieve == pytest.approx(copy + dense.total / 400e3)
    assert recoveries.whole(None, counts, Tier.HOST).retrieve == pytest.approx(copy)
    assert recoveries.whole(None, counts, Tier.PEER).retrieve == pytest.approx(copy + dense.rank / 50e3)


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_window_is_loaded_with_the_compute_weights_in_its_slots(size):
    tried = sparse(size)
    costs, counts = costs_of(tried), tokens_of(tried.load.draw(None, 4, 8), 800)
    everything = MODEL.catalog.everything
    window = Window(0, tuple(everything[at::size] for at in range(size)))
    later = sum(costs.sizes[op].compute * at for at in range(size) for op in window.slots[at])
    assert costs.bytes_of.held(window).total == costs.bytes_of.dense.total + later
    found = Recoveries(costs, 16).whole(window, counts, Tier.STORAGE).retrieve
    assert found == pytest.approx(costs.bytes_of.held(window).rank / 200e3 + costs.bytes_of.held(window).total / 400e3)
    assert (found > Recoveries(costs, 16).whole(None, counts, Tier.STORAGE).retrieve) == (size > 1)


def test_replayed_work_goes_by_parameters_and_tokens():
    """Two slots of like parameters: half of the weight gradients are left out of the replay, unless one slot's experts
    get all tokens. Embeddings cost nothing, since they are looked up."""
    tried = sparse(2)
    experts = [op.id for op in MODEL.catalog.experts]
    rest = tuple(op for op in MODEL.catalog.everything if op not in experts)
    popular = [op for op in experts if MODEL.catalog.expert_at[op][1] < 4]
    others = [op for op in experts if op not in popular]
    recoveries = Recoveries(costs_of(tried), 16)
    even = tokens_of(tried.load.draw(None, 4, 8), 800)
    uneven = even.copy()
    uneven[:, 4:] = 0
    first_popular, first_others = (
        Window(0, (tuple(popular), (*others, *rest))),
        Window(0, (tuple(others), (*popular, *rest))),
    )

    def replay(window, counts):
        return recoveries.whole(window, counts, Tier.PEER).replay

    assert replay(first_popular, even) == pytest.approx(replay(first_others, even))
    assert replay(first_others, uneven) == pytest.approx(1 - 1 / 3)  # all that works is frozen
    assert replay(first_popular, uneven) > replay(first_popular, even)
    embedding = Window(0, ((*experts, *rest[1:]), rest[:1]))
    assert rest[0] == "non_expert/embedding"
    assert replay(embedding, even) == pytest.approx(1.0)


def test_the_clock_sums_up_exactly():
    third = on_clock(1 / 3)
    total = 0.0
    for _ in range(100_000):
        total += third
    assert total == third * 100_000
    assert third == pytest.approx(1 / 3, abs=2e-9)
    assert on_clock(float("inf")) == float("inf")
    assert on_clock(MOST_SECS * 2 + 0.1) == MOST_SECS * 2 + 0.1


# --- intervals ---


def young(mtbf, **given):
    slow = {"pcie_bytes_per_sec": 4e3}  # copies take 8 to 9 s
    return scenario(Dense(1), failures=Poisson(mtbf), cluster=slow, system={"interval": "young", **given})


def test_young_and_daly():
    tried = young(7200.0)
    cost = costs_of(tried).stall_secs(costs_of(tried).bytes_of.dense)
    assert by_formula(tried, "young") == ceil(sqrt(2 * cost * 7200.0))
    assert by_formula(tried, "daly") < by_formula(tried, "young")
    assert with_interval(tried, ettr_of).system.policy == Dense(by_formula(tried, "young"))
    assert simulate(tried).interval == by_formula(tried, "young")


def test_a_synchronous_checkpoint_costs_its_commit_too():
    """The best interval is that of Daly's formula for what training waits, and a much shorter one is far worse."""
    slow = {"storage_bytes_per_sec": 25e3}
    tried = scenario(SyncDense(1), failures=Poisson(1000.0), cluster=slow, system={"interval": "daly"})
    persist = costs_of(tried).measured.persist_secs
    assert by_formula(tried, "young") == ceil(sqrt(2 * persist * 1000.0))
    short = replace(tried, system=replace(tried.system, interval="policy", policy=SyncDense(ceil(persist))))
    assert simulate(tried).ettr > simulate(short).ettr + 0.1


def test_a_partial_checkpoint_costs_what_it_weighs():
    slow = {"pcie_bytes_per_sec": 4e3}
    dense, partial = (
        scenario(policy, failures=Poisson(7200.0), cluster=slow, system={"interval": "young"})
        for policy in (Dense(1), MoC(k=1))
    )
    assert by_formula(partial, "young") < by_formula(dense, "young")
    costs = costs_of(dense)
    assert usual(partial).copy_secs < usual(dense).copy_secs == costs.copy_secs(costs.bytes_of.dense)


def test_intervals_grow_with_the_mtbf_and_fall_with_what_they_may_cost():
    assert (found := [by_formula(young(m), "young") for m in (60.0, 600.0, 6000.0)]) == sorted(found)
    shares = [least_interval(young(600.0, max_overhead=share)) for share in (0.01, 0.1, 0.5)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[2]


def test_no_interval_is_shorter_than_a_commit_takes():
    slow = scenario(Dense(1), failures=Poisson(100.0), cluster={"storage_bytes_per_sec": 10e3})
    persist = costs_of(slow).measured.persist_secs
    assert least_interval(slow) == by_formula(slow, "young") == ceil(persist)


def test_the_oracle_knows_what_it_tries():
    """Against every interval there is: a sixteenth of them are tried, and none is better by over half a per cent."""
    tried = scenario(
        Dense(1),
        failures=Poisson(120.0),
        cluster={"pcie_bytes_per_sec": 20e3},
        duration_secs=600.0,
        system={"interval": "oracle"},
    )
    found = oracle(tried, ettr_of)

    def at(interval):
        system = replace(tried.system, interval="policy", policy=Dense(interval))
        return simulate(replace(tried, system=system)).ettr

    assert at(found) >= max(map(at, range(1, 200))) - 0.005
    assert simulate(tried).ettr == at(found)


def test_an_interval_goes_to_the_policy_and_nothing_else_changes():
    tried = scenario(MoC(k=2), failures=trace((50.0, 0)), system={"interval": "oracle", "max_in_flight": 3})
    chosen = with_interval(tried, ettr_of)
    assert chosen.system.policy == MoC(k=2, every_n_steps=chosen.system.policy.every_n_steps)
    assert replace(chosen, system=tried.system) == tried
    assert with_interval(sparse(4), ettr_of) == sparse(4)
    assert simulate(scenario(MoEvement(window=3))).window == 3
