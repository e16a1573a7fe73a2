"""Checkpoints in memory: which failure leaves what, from where a run comes back, and what goes on to storage."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.peers.replica_placement import place_replicas
from moe_ckpt.policies import Dense, Gemini, MoC, MoEvement
from moe_ckpt_sim.cluster.cluster import Parallel
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.failures.failures import FailureEvent, Poisson, Weibull
from moe_ckpt_sim.failures.traces import Trace
from moe_ckpt_sim.run.recovery import Copies
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.workload.training import Batch
from tests.sim.builders import layout, scenario

LOCAL = {"durable": "node"}
PEERS = {"durable": "peers", "replicas": 1}


def killed(at, node=0):
    return FailureEvent(at, node, process=True)


def told(*events, policy=None, duration_secs=200.0, **given):
    """After these events, each a killed process or (seconds, node) of a lost one."""
    failures = Trace(recorded=tuple(one if isinstance(one, FailureEvent) else FailureEvent(*one) for one in events))
    return simulate(scenario(policy or Dense(10), failures=failures, duration_secs=duration_secs, **given))


def step_after(*events, **given):
    return told(*events, **given).history[0].useful_steps


def costs_of(**given):
    tried = scenario(Dense(10), **given)
    return Costs(tried.layout, tried.precision, tried.iteration, tried.system)


# --- what a failure leaves ---


def test_a_killed_process_comes_back_from_its_own_memory():
    """Nothing passes the network or storage: what there is to load is copied into the GPUs."""
    costs = costs_of(system=LOCAL)
    for system in (LOCAL, PEERS):
        one = told(killed(105.0), system=system)
        assert one.recovered == {"host": 1, "peer": 0, "storage": 0}
        assert one.history[0].useful_steps == 100
        assert one.spent.retrieve == pytest.approx(costs.bytes_of.dense.rank / 200e3)
    assert told(killed(105.0)).recovered == {"host": 0, "peer": 0, "storage": 1}


def test_a_lost_node_comes_back_from_peers_or_else_from_storage():
    stored = {"storage_every": 30}
    assert told((105.0, 0), system={**PEERS, **stored}).recovered == {"host": 0, "peer": 1, "storage": 0}
    assert told((105.0, 0), system={**LOCAL, **stored}).recovered == {"host": 0, "peer": 0, "storage": 1}
    assert step_after((105.0, 0), system={**PEERS, **stored}) == 100
    assert step_after((105.0, 0), system={**LOCAL, **stored}) == 90


def test_a_killed_process_beside_a_lost_node():
    assert told(killed(105.0, 0), (105.0, 1), system=PEERS).recovered == {"host": 0, "peer": 1, "storage": 0}
    assert told(killed(105.0, 1), (105.0, 1), system=PEERS).recovered == {"host": 0, "peer": 1, "storage": 0}


def test_a_killed_process_needs_no_spare():
    none = {"spare_nodes": 0, "repair_secs": None}
    assert told(killed(105.0), system=LOCAL, cluster=none).spent.idle == 0
    assert "no spare node" in told((105.0, 0), system=LOCAL, cluster=none).verdict


def test_what_is_complete_in_memory_lags_by_the_copy_and_by_the_replication():
    """Of step 100, begun at 100 s: copied in ``copy``, which a killed process comes back to. On one peer it is ``send``
    later, on three after three times that: which a lost node comes back to."""
    costs = costs_of(system=PEERS)
    copy, send = costs.bytes_of.dense.rank / 200e3, costs.bytes_of.dense.rank / 50e3
    assert 0.16 < copy < 0.17 < 0.65 < send < 0.66
    three = {**PEERS, "replicas": 3}
    for system in (LOCAL, PEERS, three):
        assert step_after(killed(100 + copy - 0.01), system=system) == 90
        assert step_after(killed(100 + copy + 0.01), system=system) == 100
    for system, secs in ((PEERS, copy + send), (three, copy + 3 * send)):
        assert step_after(FailureEvent(100 + secs - 0.01, 0), system=system) == 90
        assert step_after(FailureEvent(100 + secs + 0.01, 0), system=system) == 100


def test_a_second_kill_before_the_next_checkpoint_comes_back_likewise():
    twice = told(killed(105.0), killed(111.0, 3), system=LOCAL)
    assert twice.recovered == {"host": 2, "peer": 0, "storage": 0}
    assert twice.history[1].useful_steps == 100


def test_after_a_lost_node_own_memory_is_whole_again_with_the_next_checkpoint():
    """What came from a peer is in the GPUs, not in the new node's memory, before that."""
    lost = ((105.0, 0), (106.0, 0, True))
    before, after = (told(*lost, killed(at, 0), system=PEERS).recovered for at in (111.0, 125.0))
    assert (before, after) == ({"host": 0, "peer": 2, "storage": 0}, {"host": 1, "peer": 1, "storage": 0})


def test_what_host_memory_keeps_of_experts_outlives_a_process_only_in_the_memory_tier():
    policy = MoC(k=1, snapshot_k=8, every_n_steps=5)
    assert told(killed(105.0), policy=policy).lost_tokens > 0
    assert told(killed(105.0), policy=policy, system=LOCAL).lost_tokens == 0


def test_windows_in_own_memory_are_computed_again():
    one = told(killed(105.3), policy=MoEvement(window=4), system=LOCAL)
    assert one.recovered["host"] == 1
    assert one.spent.replay > 0


# --- on to storage ---


@pytest.mark.parametrize(
    ("stored", "step"),
    [
        ({"storage_every": 1}, 100),
        ({"storage_every": 30}, 90),
        ({"storage_every": 40}, 80),
        ({"storage_every": 48.0}, 90),  # at 48 s that of 40, and at 96 s that of 90
        ({}, 0),
    ],
)
def test_a_lost_memory_falls_back_to_what_was_written(stored, step):
    one = told((105.0, 0), system={**LOCAL, **stored})
    assert one.history[0].useful_steps == step
    assert one.fallbacks == (step != 100)


def test_auto_goes_by_youngs_interval():
    """Writing takes 0.62 s and nothing failed: sqrt(2 * 0.62 * 10 900) is 117 s, so from step 117 on that of 120 is
    written; 118 s later, when the run is older, that of 240."""
    costs = costs_of(system=LOCAL)
    assert costs.storage_secs(costs.bytes_of.dense) == pytest.approx(0.6226, abs=1e-4)
    auto = {**LOCAL, "storage_every": "auto"}
    assert [step_after((at, 0), system=auto, duration_secs=300.0) for at in (115.0, 125.0, 235.0, 245.0)] == [
        0, 120, 120, 240
    ]  # fmt: skip


def test_what_fails_more_is_written_more_often():
    """After 1200 s without failures, 122 s lie between two flushes; with 30, sqrt(2 * 0.62 * 12 000 / 31) = 22 s do."""
    auto = {**LOCAL, "storage_every": "auto"}
    calm = told((1200.0, 0), system=auto, duration_secs=1300.0)
    rough = told(*(killed(20.0 * at + 9.5) for at in range(30)), (1200.0, 0), system=auto, duration_secs=1300.0)
    assert 1200 - calm.history[0].useful_steps == 90
    last_kill, fallback = rough.history[-3:-1]
    trained = last_kill.useful_steps + int(1200 - last_kill.at_secs)
    assert trained - fallback.useful_steps == 15


def test_a_slow_storage_holds_up_neither_training_nor_memory():
    """A write takes 280 s: the one that is under way is not disturbed, and none queues behind it."""
    slow = {"storage_bytes_per_sec": 1e3}
    every = {**LOCAL, "storage_every": 1}
    one = told(killed(205.0), system=every, cluster=slow, duration_secs=300.0)
    assert (one.history[0].useful_steps, one.spent.stall) == (200, 0)
    assert step_after((305.0, 0), system=every, cluster=slow, duration_secs=400.0) == 10


# --- every set of lost nodes ---

WORLDS = [
    (2, 1, 1, 1),
    (3, 2, 1, 1),
    (4, 2, 1, 1),
    (4, 2, 2, 1),
    (4, 1, 3, 1),
    (5, 2, 2, 1),
    (6, 1, 1, 2),
    (6, 2, 2, 3),
    (5, 2, 1, 2),
    (6, 2, 2, 4),
]
"""(nodes, GPUs of each, replicas, nodes of a domain); of some the last node or domain is smaller."""


def of(nodes, gpus, domain):
    """All experts on all ranks; an odd rank less where a node has two, so that the last node is smaller."""
    ranks = nodes * gpus - (gpus == 2 and nodes % 2)
    return layout(Parallel(dp=ranks), nodes=nodes, gpus_per_node=gpus, nodes_per_domain=domain)


@pytest.mark.parametrize(("nodes", "gpus", "replicas", "domain"), WORLDS)
def test_what_is_recoverable_is_what_the_placement_promises(nodes, gpus, replicas, domain):
    """Of each set of up to three nodes, by a count of its own: which ranks have no copy outside of it."""
    where = of(nodes, gpus, domain)
    peers = place_replicas(where.domains, replicas).peers_of
    copies = Copies(where, replicas)
    lost_sets = 0
    for count in range(1, min(3, nodes) + 1):
        for gone in combinations(range(nodes), count):
            held = [{rank // gpus, *(peer // gpus for peer in holders)} for rank, holders in enumerate(peers)]
            lost = any(nodes <= set(gone) for nodes in held)
            assert copies.lost(gone) == lost
            lost_sets += lost
            if count <= replicas and domain == 1:
                assert not lost, "as many nodes as replicas"
    for first in range(0, nodes, domain):
        assert not copies.lost(range(first, min(first + domain, nodes))), "a whole domain"
    assert lost_sets or replicas >= min(3, nodes)


@pytest.mark.parametrize(("nodes", "gpus", "replicas", "domain"), WORLDS[:8])
def test_a_run_comes_back_from_memory_exactly_where_a_copy_is_left(nodes, gpus, replicas, domain):
    where = of(nodes, gpus, domain)
    copies = Copies(where, replicas)
    system = {"durable": "peers", "replicas": replicas, "storage_every": 40}
    cluster = {"nodes": nodes, "gpus_per_node": gpus, "nodes_per_domain": domain, "nic_bytes_per_sec": 1e7}
    cluster["pcie_bytes_per_sec"], batch = 1e7, Batch(4 * where.parallel.dp, 4)
    for count in range(1, min(3, nodes) + 1):
        for gone in combinations(range(nodes), count):
            events = [(105.0, node) for node in gone]
            one = told(*events, system=system, cluster=cluster, parallel=where.parallel, batch=batch)
            lost = copies.lost(gone)
            assert one.recovered == {"host": 0, "peer": int(not lost), "storage": int(lost)}
            assert one.history[0].useful_steps == (80 if lost else 100)


def test_copies_lie_outside_of_a_domain_or_not_at_all():
    inside = {"nodes_per_domain": 4}
    with pytest.raises(ConfigError, match=r"outside the failure domain.*all 4 nodes of this run are in this one"):
        told((105.0, 0), system=PEERS, cluster=inside)
    told((105.0, 0), system=LOCAL, cluster=inside)


# --- kinds of failures ---


@pytest.mark.parametrize("kind", [Poisson, Weibull])
def test_shares_of_failures_change_what_fails_and_not_when(kind):
    def events(**shares):
        drawn = kind(100.0, **shares).events(np.random.default_rng(3), 6)
        return [next(drawn) for _ in range(3000)]

    plain = events()
    mixed = events(process_share=0.7)
    assert [(one.at_secs, one.node) for one in mixed] == [(one.at_secs, one.node) for one in plain]
    assert not any(one.process for one in plain)
    assert sum(one.process for one in mixed) / 3000 == pytest.approx(0.7, abs=0.03)
    racks = events(process_share=0.25, domain_share=0.5, domain_nodes=3)
    moments = {one.at_secs: {other.node for other in racks if other.at_secs == one.at_secs} for one in racks[:600]}
    sizes = [len(nodes) for nodes in list(moments.values())[:-1]]
    assert sum(size == 3 for size in sizes) / len(sizes) == pytest.approx(0.5, abs=0.08)
    assert {frozenset(nodes) for nodes in moments.values() if len(nodes) == 3} == {
        frozenset({0, 1, 2}),
        frozenset({3, 4, 5}),
    }


def test_more_of_what_only_ends_processes_costs_less():
    runs = [
        simulate(scenario(Dense(10), failures=Poisson(100.0, process_share=share), system=LOCAL, seed=1))
        for share in (0.0, 0.5, 1.0)
    ]
    assert [run.failures for run in runs] == [runs[0].failures] * 3
    assert runs[0].ettr < runs[1].ettr < runs[2].ettr
    assert runs[2].recovered["storage"] == 0


def test_a_trace_says_where_only_a_process_died(tmp_path):
    path = tmp_path / "killed.csv"
    path.write_text("time,event,node\n105,kill,1\n120,remove,2\n121,add,2\n")
    found = list(Trace(str(path)).events(np.random.default_rng(0), 4))
    assert [(one.node, one.joins, one.process) for one in found] == [
        (1, False, True), (2, False, False), (2, True, False)
    ]  # fmt: skip
    path.write_text("time,event,node\n105,remove,1\n106,kill,1\n")
    with pytest.raises(ConfigError, match="line 3: node 1 has a process killed, but is away"):
        Trace(str(path))


# --- Gemini ---


def test_gemini_by_itself_comes_near_to_a_known_mean():
    """Each checkpoint costs 3 s, in which training waits for the copy. By what is measured, and by what is known."""
    cluster = {"pcie_bytes_per_sec": 12e3, "nic_bytes_per_sec": 1e6}
    given = {"failures": Poisson(600.0), "cluster": cluster, "system": PEERS, "duration_secs": 40_000.0}
    found, known, rare = (
        simulate(scenario(policy, **given))
        for policy in (Gemini("young"), Gemini("young", mtbf_secs=600), Gemini("young", mtbf_secs=600_000))
    )
    assert found.interval == pytest.approx(known.interval, rel=0.3)
    assert found.ettr == pytest.approx(known.ettr, abs=0.01)
    assert rare.ettr < known.ettr - 0.05
