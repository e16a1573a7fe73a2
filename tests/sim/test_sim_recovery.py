"""Failures: what they undo, who recovers with whom, from where, and how long that takes; times made by hand."""

from __future__ import annotations

import pytest

from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.failures.failures import Poisson
from moe_ckpt_sim.run.failing import SpareNodes
from moe_ckpt_sim.run.recovery import Copies
from moe_ckpt_sim.run.run import simulate
from tests.sim.builders import layout, scenario, sparse, trace

DOWN = 5.0
"""Detect and restart of the toy cluster."""
SHORT = {"duration_secs": 200.0}
PEERS = {"durable": "peers", "replicas": 1}


def costs_of(tried):
    return Costs(tried.layout, tried.precision, tried.iteration, tried.system)


def load_secs(tried):
    """From storage into host memory, and into the GPUs."""
    costs = costs_of(tried)
    return costs.bytes_of.dense.total / 400e3 + costs.bytes_of.dense.rank / 200e3


# --- all ranks ---


def test_a_failure_undoes_what_is_not_committed():
    """That of step 100 is under way still, so that of step 90 it is."""
    tried = scenario(Dense(10), failures=trace((100.5, 0)), **SHORT)
    told = simulate(tried)
    assert told.history[0].useful_steps == 90
    assert told.spent.lost == pytest.approx(10.5 + (200 - 105.5 - load_secs(tried)) % 1)
    assert (told.spent.down, told.spent.retrieve) == pytest.approx((DOWN, load_secs(tried)))
    assert (told.failures, told.spent.replay) == (1, 0)


def test_a_failure_after_the_commit_undoes_less():
    told = simulate(scenario(Dense(10), failures=trace((101.5, 0)), **SHORT))
    assert told.history[0].useful_steps == 100


def test_a_failure_at_the_very_end_of_an_iteration_keeps_it():
    """Step 10 is reached at 10 s to the dot, when that of step 9, begun at 9 s, is committed since 0.9 s."""
    told = simulate(scenario(Dense(3), failures=trace((10.0, 0)), duration_secs=10.5))
    assert told.spent.lost == pytest.approx(10 - 9)
    assert told.history[0].useful_steps == 9


@pytest.mark.parametrize("every", [1, 3, 7, 50])
def test_an_iteration_that_ends_with_the_run_counts(every):
    assert simulate(scenario(Dense(every), duration_secs=10.0)).steps == 10
    assert simulate(scenario(Dense(every), duration_secs=10.0, stepwise=True)).steps == 10
    fast = {"pcie_bytes_per_sec": 1e8, "storage_bytes_per_sec": 1e8}
    tenths = scenario(Dense(every), secs=0.1, update_secs=0.0, cluster=fast, duration_secs=10.0)
    assert simulate(tenths).steps == 100


def test_before_the_first_commit_a_run_begins_anew_with_nothing_to_load():
    told = simulate(scenario(Dense(10), failures=trace((5.0, 0)), **SHORT))
    assert (told.spent.retrieve, told.spent.lost, told.history[0].useful_steps) == (0, 5, 0)


def test_a_failure_during_recovery_begins_it_anew():
    tried = scenario(Dense(10), failures=trace((101.5, 0), (104.5, 1), (108.75, 2)), **SHORT)
    told = simulate(tried)
    assert told.failures == 3
    assert told.spent.down == pytest.approx(3 + 4.25 + DOWN)
    assert told.spent.retrieve == pytest.approx(load_secs(tried))
    assert [one.useful_steps for one in told.history][:-1] == [100]


def test_a_failure_while_loading_loads_anew():
    tried = scenario(Dense(10), failures=trace((101.5, 0), (106.75, 1)), **SHORT)
    assert simulate(tried).spent.retrieve == pytest.approx(0.25 + load_secs(tried))


def test_several_nodes_at_one_moment_are_one_failure():
    one, many = (
        simulate(scenario(Dense(10), failures=trace(*events), **SHORT))
        for events in (
            ((50.0, 2),),
            ((50.0, 2), (50.0, 3), (50.0, 1)),
        )
    )
    assert one.failures == many.failures == 1
    assert one.spent == many.spent


def test_a_run_that_ends_during_recovery_is_all_accounted_for():
    told = simulate(scenario(Dense(10), failures=trace((101.5, 0)), duration_secs=103.0))
    assert (told.spent.down, told.spent.useful, told.spent.lost) == pytest.approx((1.5, 100, 1.5))


def test_after_a_failure_link_and_buffer_are_free():
    """A commit takes 120 s, loading 40 s. That of step 30 would be committed at 370 s, but is lost at 260 s: it begins
    anew at 316 s, and at 450 s it is there."""
    slow = {"nic_bytes_per_sec": 1637.0}
    system = {"durable": "peers", "replicas": 3, "max_in_flight": 1}
    events = trace((260.0, 0), (450.0, 1))
    told = simulate(scenario(Dense(10), failures=events, cluster=slow, system=system, duration_secs=500.0))
    assert [one.useful_steps for one in told.history[:2]] == [20, 30]


# --- spares ---


def test_spares_run_out():
    told = simulate(
        scenario(failures=trace((50.0, 0), (80.0, 1)), cluster={"spare_nodes": 1, "repair_secs": None}, **SHORT)
    )
    assert not told.advances
    assert "no spare node" in told.verdict
    assert told.spent.idle == pytest.approx(200 - 81)
    assert told.spent.total == pytest.approx(200)


def test_a_run_that_stands_still_does_not_fail_any_more():
    cluster = {"spare_nodes": 0, "repair_secs": None}
    told = simulate(scenario(failures=Poisson(60.0), cluster=cluster, duration_secs=1e5))
    assert (told.failures, told.spent.total) == (1, pytest.approx(1e5))
    assert told.verdict.startswith("no spare node")


def test_a_repaired_node_is_a_spare_again():
    tried = scenario(failures=Poisson(100.0), cluster={"spare_nodes": 0, "repair_secs": 20.0}, duration_secs=3000.0)
    told = simulate(tried)
    assert told.advances
    assert 15 < told.failures < 60
    assert 12.0 * told.failures < told.spent.idle <= 20.0 * told.failures  # less where one fails while another waits


def test_a_trace_brings_nodes_back_and_nothing_else_does():
    """The cluster's repair_secs does not count then."""
    tried = scenario(
        failures=trace((50.0, 0), (90.0, 0, True)), cluster={"spare_nodes": 0, "repair_secs": 1.0}, **SHORT
    )
    assert simulate(tried).spent.idle == pytest.approx(39.0)


def test_all_dead_nodes_need_a_spare_each():
    """Two die, one comes back at 100 s and the other at 120 s: training goes on after 120 s."""
    events = ((50.0, 0), (60.0, 1), (100.0, 0, True), (120.0, 1, True))
    told = simulate(scenario(failures=trace(*events), cluster={"spare_nodes": 0}, **SHORT))
    assert told.advances
    assert told.spent.idle == pytest.approx(9 + 59)
    at_once = simulate(scenario(failures=trace((50.0, 0), (50.0, 1), *events[2:]), cluster={"spare_nodes": 0}, **SHORT))
    assert at_once.spent.idle == pytest.approx(69)


def test_spares_are_given_to_who_died_first():
    spares = SpareNodes(1, 100.0)
    assert spares.replace([3], 0.0) == 0.0
    assert spares.replace([4], 10.0) == 100.0  # node 3 is repaired
    assert spares.replace([4], 20.0) == 100.0  # it is dead already
    assert spares.replace([5], 30.0) == 110.0
    assert SpareNodes(None, None).replace([1, 2], 5.0) == 5.0
    assert SpareNodes(1, None).replace([1, 2], 5.0) == float("inf")


# --- peers and storage ---


def test_who_holds_replicas():
    """Four nodes in pairs, 0 and 2, 1 and 3; with two copies each on the next two; with none only its own."""
    one, two, none = (Copies(layout(), replicas) for replicas in (1, 2, 0))
    assert [one.lost(nodes) for nodes in ({0, 2}, {1, 3}, {0, 1, 2})] == [True] * 3
    assert [one.lost(nodes) for nodes in ({0, 1}, {3, 0}, {2}, ())] == [False] * 4
    assert not any(two.lost({first, second}) for first in range(4) for second in range(4))
    assert [two.lost(nodes) for nodes in ({0, 1, 2}, {3, 0, 1})] == [True, True]
    assert [none.lost(nodes) for nodes in ({0}, ())] == [True, False]


@pytest.mark.parametrize(("nodes", "fallbacks"), [((0, 1), 0), ((0, 2), 1), ((3, 1), 1)])
def test_a_node_and_its_peer_fall_back_to_the_backup(nodes, fallbacks):
    events = trace(*((150.0, node) for node in nodes))
    tried = scenario(Dense(10), failures=events, system={**PEERS, "storage_every": 60.0}, duration_secs=300.0)
    told = simulate(tried)
    assert told.fallbacks == fallbacks
    assert told.history[0].useful_steps == (110 if fallbacks else 140)


def test_without_a_backup_it_begins_anew():
    told = simulate(scenario(Dense(10), failures=trace((150.0, 0), (150.0, 2)), system=PEERS, duration_secs=300.0))
    assert (told.fallbacks, told.history[0].useful_steps, told.spent.retrieve) == (1, 0, 0)


@pytest.mark.parametrize(("second", "fallbacks"), [(152.0, 1), (158.0, 1), (175.0, 0)])
def test_a_replaced_node_holds_nothing_until_the_next_commit(second, fallbacks):
    """At 158 s training is back, but nothing has been saved since: node 1's copy of node 3 is still gone."""
    told = simulate(scenario(Dense(10), failures=trace((150.5, 3), (second, 1)), system=PEERS, duration_secs=300.0))
    assert told.fallbacks == fallbacks
    assert told.failures == 2


def test_what_came_from_storage_is_not_on_peers_before_the_next_commit():
    events = trace((150.5, 0), (150.5, 2), (158.5, 3))
    tried = scenario(Dense(10), failures=events, system={**PEERS, "storage_every": 60.0}, duration_secs=300.0)
    assert simulate(tried).spent.retrieve == pytest.approx(2 * load_secs(tried))


def test_after_the_next_commit_peers_hold_all_again():
    events = trace((150.5, 0), (150.5, 2), (190.5, 3))
    tried = scenario(Dense(10), failures=events, system={**PEERS, "storage_every": 60.0}, duration_secs=300.0)
    costs = costs_of(tried)
    from_peers = costs.bytes_of.dense.rank / 50e3 + costs.bytes_of.dense.rank / 200e3
    assert simulate(tried).spent.retrieve == pytest.approx(load_secs(tried) + from_peers)


def test_a_backup_counts_once_it_is_written():
    """Writing takes 28 s: at 66 s that of 60 s is not there, at 95 s it is."""
    slow = {"cluster": {"storage_bytes_per_sec": 10e3}, "system": {**PEERS, "storage_every": 60.0}}
    steps = [
        simulate(scenario(Dense(10), failures=trace((at, 0), (at, 2)), **slow, **SHORT)).history[0].useful_steps
        for at in (66.0, 95.0)
    ]
    assert steps == [0, 50]


@pytest.mark.parametrize(("storage", "steps"), [(10e3, 70), (1e9, 50)])
def test_a_backup_that_a_failure_cuts_off_is_begun_again(storage, steps):
    """Writing takes 28 s: that of 60 s is cut off at 76.5 s, and the next one is not put off until 120 s."""
    events = trace((76.5, 3), (115.0, 0), (115.0, 2))
    system = {**PEERS, "storage_every": 60.0}
    tried = scenario(Dense(10), failures=events, cluster={"storage_bytes_per_sec": storage}, system=system, **SHORT)
    told = simulate(tried)
    assert told.fallbacks == 1
    assert told.history[-2].useful_steps == steps


# --- replay ---


def test_frozen_operators_need_no_weight_gradients():
    full, frozen = (
        simulate(sparse(4, failures=trace((100.5, 1)), system={"durable": "peers", "freeze": freeze}, **SHORT))
        for freeze in (False, True)
    )
    assert full.spent.replay == pytest.approx(3.0)
    assert 3.0 * (1 - 1 / 3) < frozen.spent.replay < 3.0
    assert full.spent.lost == pytest.approx(frozen.spent.lost, abs=1)


def test_a_checkpoint_that_is_returned_to_twice_loses_its_tokens_once():
    once, twice = (
        simulate(scenario(MoC(k=1, every_n_steps=10), failures=trace(*events), **SHORT))
        for events in (((155.0, 0),), ((155.0, 0), (165.0, 1)))
    )
    assert once.lost_tokens == twice.history[1].lost_tokens > 0
    assert twice.failures == 2


def test_a_window_that_has_begun_is_gone_on_with():
    """Though the system skips: what is skipped is a window's beginning. It waits for slots two to four then."""
    slow = {"cluster": {"storage_bytes_per_sec": 40e3}, "failures": trace((200.5, 0)), "duration_secs": 300.0}
    skips, waits = (
        simulate(scenario(MoEvement(window=4), system={"when_busy": busy, "max_in_flight": 1}, **slow))
        for busy in ("skip", "wait")
    )
    assert skips.history[0].useful_steps > 50
    assert 0 < skips.spent.stall < waits.spent.stall


def test_windows_of_one_step_need_no_replay():
    assert simulate(scenario(MoEvement(window=1), failures=trace((100.5, 1)), **SHORT)).spent.replay == 0
