"""Copies that peers do not get because the network is behind: decided as an engine decides it, and what that costs."""

from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from moe_ckpt.commit.room import Room
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.peers.messages import SealedSlot
from moe_ckpt.peers.replica_placement import ReplicaPlacement
from moe_ckpt.peers.replication import Replicator, Roster
from moe_ckpt.peers.wire import Listener
from moe_ckpt.policies import Dense, MoEvement
from moe_ckpt.run.agreement import StepConsensus
from moe_ckpt.run.options import Settings
from moe_ckpt.session.backlog import Backlog
from moe_ckpt_sim.failures.failures import FailureEvent
from moe_ckpt_sim.failures.traces import Trace
from moe_ckpt_sim.run.run import simulate
from tests.sim.builders import MODEL, scenario
from tests.support.slots import create_slot

STEPS = 6
NEVER = {"nic_bytes_per_sec": 1e-3}
"""No copy arrives while these runs last."""
SLOW = {"nic_bytes_per_sec": 60e3}
"""A copy of everything takes several iterations."""
PEERS = {"durable": "peers", "replicas": 1, "when_busy": "skip"}


def decided(max_in_flight, when_busy, tmp_path):
    """Of an engine: whether each of a few snapshots goes to a peer that answers none."""
    settings = Settings(max_in_flight=max_in_flight, when_busy=when_busy)
    found = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        listener = Listener(60.0)
        placement = ReplicaPlacement(((1,), (0,)), ((1,), (0,)))
        addresses = (listener.address, ("127.0.0.1", silent.getsockname()[1]))
        roster = Roster(0, "a-run", 1, placement, addresses, b"s" * 16)
        replicator = Replicator(roster, listener, lambda nbytes: create_slot(tmp_path / "copy", nbytes), 60.0)
        try:
            slot = create_slot(tmp_path / "own", 4096)
            run = SimpleNamespace(settings=settings, policy=Dense())
            files = SimpleNamespace(path=tmp_path)
            tier = SimpleNamespace(pool=None, replicator=replicator, outlives_process=True, files=files)
            room = Room(run, tier, None, None)
            backlog = Backlog(settings, SimpleNamespace(rank=1), windows=False)
            for step in range(STEPS):
                plan = SnapshotPlan(step, MODEL.catalog.everything)
                found.append(backlog.to_peers(plan, StepConsensus(copies_behind=room.copies_behind)))
                if found[-1]:
                    replicator.submit(step, SealedSlot(step, slot.memory, b"a header"))
        finally:
            silent.close()  # all is decided; closing need not wait for answers
            replicator.close()
    return found


@pytest.mark.parametrize("when_busy", ["skip", "wait"])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_copies_are_left_out_where_an_engine_leaves_them_out(max_in_flight, when_busy, tmp_path):
    engine = decided(max_in_flight, when_busy, tmp_path)
    system = {**PEERS, "when_busy": when_busy, "max_in_flight": max_in_flight}
    tried = scenario(Dense(1), cluster=NEVER, system=system, duration_secs=STEPS - 0.5)
    outcome = simulate(tried)
    everything = round(outcome.heaviest_bytes)
    begun = round(outcome.rank_bytes_per_step * max(1, outcome.steps) / everything)
    sent = round(outcome.sent_bytes_per_step * max(1, outcome.steps) / everything)
    if when_busy == "wait":
        assert all(engine)
        assert sent == begun == max_in_flight, "then no buffer is left"
        return
    assert begun == outcome.steps >= STEPS - 1, "memory gets each step"
    assert sent == sum(engine) == max_in_flight
    assert engine == sorted(engine, reverse=True)


def restored(*events, policy=None, cluster=SLOW, **system):
    """The step that each failure went back to, and where from."""
    made = {**PEERS, **system}
    tried = scenario(
        policy or Dense(1), failures=Trace(recorded=events), cluster=cluster, system=made, duration_secs=80.0
    )
    outcome = simulate(tried)
    return [each.useful_steps for each in outcome.history[:-1]], outcome.recovered


def test_a_killed_process_goes_on_from_its_own_memory_and_a_lost_node_from_the_newest_copy():
    steps, recovered = restored(FailureEvent(45.6, 0, process=True))
    assert steps == [45], "all that was trained"
    assert recovered["host"] == 1
    older, recovered = restored(FailureEvent(45.6, 0))
    assert recovered["peer"] == 1
    assert 35 < older[0] < 45, "some steps got no copy"
    assert restored(FailureEvent(45.6, 0), cluster={"nic_bytes_per_sec": 1e6})[0] == [45]


def test_a_start_keeps_no_copies_of_other_steps_than_it_goes_on_from():
    """So a node that is lost before peers have something of the new life takes all ranks back to storage."""
    _, recovered = restored(FailureEvent(45.6, 0, process=True), FailureEvent(52.0, 1), storage_every=10)
    assert (recovered["host"], recovered["storage"]) == (1, 1)


def test_of_a_window_all_slots_go_to_peers_or_none():
    runs = []
    for most in (1, 2, 3):
        system = {**PEERS, "max_in_flight": most}
        runs.append(simulate(scenario(MoEvement(window=3), cluster=NEVER, system=system, duration_secs=30.5)))
    one, *others = runs
    assert {each.rank_bytes_per_step for each in others} == {one.rank_bytes_per_step}, "memory gets each step"
    sent = [each.sent_bytes_per_step / one.sent_bytes_per_step for each in runs]
    dense, window, another = sent[0], sent[1] - sent[0], sent[2] - sent[1]
    assert dense == 1.0, "which comes first"
    assert window == pytest.approx(another), "so many windows may be on their way"
    assert window > dense, "with all slots, of which some hold compute weights, too"


def test_moving_ahead_changes_nothing():
    for policy in (Dense(1), MoEvement(window=3)):
        for busy in ("skip", "wait"):
            tried = scenario(
                policy,
                failures=Trace(recorded=(FailureEvent(145.6, 0, process=True), FailureEvent(301.3, 1))),
                cluster=SLOW,
                system={**PEERS, "when_busy": busy, "storage_every": 50},
                duration_secs=500.0,
            )
            one, other = simulate(tried), simulate(replace(tried, stepwise=True))
            assert one.spent == other.spent, (policy, busy)
            assert (one.steps, one.recovered, one.sent_bytes_per_step) == (
                other.steps,
                other.recovered,
                other.sent_bytes_per_step,
            )
