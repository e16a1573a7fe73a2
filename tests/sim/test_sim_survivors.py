"""What ranks that live on seal when training stops: which failures then cost no step, and which experts stay fresh."""

from __future__ import annotations

import pytest

from moe_ckpt.policies import Dense, MoC, MoEtion, MoEvement
from moe_ckpt_sim.cluster.cluster import Parallel
from moe_ckpt_sim.cluster.surviving import Survivors
from moe_ckpt_sim.failures.failures import FailureEvent
from moe_ckpt_sim.failures.traces import Trace
from moe_ckpt_sim.run.run import simulate
from tests.sim.builders import layout, scenario

ALIKE = Parallel(pp=1, dp=8, ep=1)
"""Plain data parallelism: every rank holds everything."""
SHARED = Parallel(pp=1, dp=4, ep=2)


def killed(at, node=0):
    return FailureEvent(at, node, process=True)


def run(policy, *events, parallel=ALIKE, durable="node", survivors=True, stored=None, **given):
    """stored: steps between checkpoints on storage."""
    replicas = {"replicas": 1} if durable == "peers" else {}
    system = {"durable": durable, "survivors": survivors, "when_busy": "skip", **replicas}
    system["storage_every"] = stored
    failures = Trace(recorded=events)
    return simulate(scenario(policy, failures=failures, parallel=parallel, system=system, duration_secs=400.0, **given))


@pytest.mark.parametrize("policy", [Dense(1000), MoC(k=1, every_n_steps=50), MoEvement(window=4), MoEtion(experts=1)])
def test_a_killed_process_costs_no_step_where_others_hold_everything(policy):
    """But the one that was under way; nothing is computed again, and no expert is stale."""
    one = run(policy, killed(205.5), killed(301.5, 2))
    assert one.recovered == {"host": 2, "peer": 0, "storage": 0}
    assert one.spent.lost < 2 * 1.1, "twice a part of an iteration"
    assert one.spent.replay == 0
    assert one.lost_tokens == 0
    without = run(policy, killed(205.5), killed(301.5, 2), survivors=False)
    assert without.steps < one.steps or without.lost_tokens > 0


def test_sealing_takes_as_long_as_a_copy_of_everything():
    kept, gone = (run(Dense(1), killed(205.5), survivors=survivors) for survivors in (True, False))
    assert 0.1 < kept.spent.down - gone.spent.down < 0.4, "0.2 to 0.3 s of the toy model"


def test_a_node_takes_with_it_what_it_sealed():
    alone = {"nodes": 8, "gpus_per_node": 1}
    for cluster in ({}, alone):  # alone, too: what others lend lacks the plain state of its ranks
        assert run(Dense(50), FailureEvent(205.5, 0), durable="peers", cluster=cluster).history[0].useful_steps == 200
    kept = run(Dense(50), killed(205.5), FailureEvent(212.0, 0), durable="peers", stored=100)
    assert kept.recovered == {"host": 1, "peer": 0, "storage": 1}
    assert [each.useful_steps for each in kept.history[:2]] == [205, 200], "no peer has what was sealed"


def test_a_node_that_is_lost_during_the_recovery():
    """The restart takes 4 s from 206.5 on."""
    one = run(Dense(50), killed(205.5), FailureEvent(208.0, 0), durable="peers")
    assert one.history[0].useful_steps == 200


def test_after_a_hundred_failures_without_a_checkpoint_a_run_that_advances_is_not_given_up():
    events = [killed(60.5 + 20 * number, number % 4) for number in range(120)]
    failures = Trace(recorded=tuple(events))
    system = {"durable": "node", "survivors": True}
    one = simulate(scenario(Dense(10**6), failures=failures, parallel=ALIKE, system=system, duration_secs=2600.0))
    assert one.advances, one.verdict
    assert one.steps > 1500


def lost_tokens(policy, event):
    """With and without survivors."""
    return tuple(
        run(policy, event, parallel=SHARED, durable="peers", survivors=seal).lost_tokens for seal in (True, False)
    )


def test_experts_of_ranks_that_live_on_are_fresh():
    """Of a checkpoint of the newest step; only what the dead rank held a part of is as old as its copy."""
    sealed, without = lost_tokens(MoC(k=1), killed(205.85))
    assert 0 < sealed < without
    sealed, without = lost_tokens(MoC(k=1), FailureEvent(205.85, 0))
    assert sealed == without, "every expert has a part on every node"


def test_who_ends_an_update_alone_seals_the_next_step_which_joins_no_checkpoint():
    """The update takes the last tenth of a second."""
    sealed, without = lost_tokens(MoC(k=1), killed(205.95))
    assert sealed == without > 0
    again = (killed(205.95), killed(215.85)), (killed(205.85), killed(215.85))
    both, one = (run(MoC(k=1), *events, parallel=SHARED, durable="peers").lost_tokens for events in again)
    assert both > one, "of the second failure it is not known any more"


@pytest.mark.parametrize(("policy", "step"), [(Dense(1), 205), (Dense(50), 200), (Dense(1000), 0)])
def test_who_ends_an_update_alone_goes_back_to_the_checkpoint_that_the_dead_rank_has(policy, step):
    """Also where all ranks hold everything."""
    one = run(policy, killed(205.95))
    assert one.history[0].useful_steps == step


def test_not_of_an_older_checkpoint():
    """Of step 200, and survivors are at 205: no rank that died has that."""
    sealed, without = lost_tokens(MoC(k=1, every_n_steps=10), killed(205.5))
    assert sealed == without > 0


def test_who_lends():
    alike = Survivors(layout(ALIKE), seal=True)
    assert alike.have_everything({0})
    assert alike.have_everything({0, 2, 5})
    assert not alike.have_everything({3, 4}), "rank 3 lends what rank 4 writes"
    assert not alike.have_everything(set(range(8)))
    assert not Survivors(layout(ALIKE), seal=False).have_everything({0})
    assert not Survivors(layout(SHARED), seal=True).have_everything({0}), "a distributed optimizer's ranks differ"
    assert alike.dead((1,), (3,)) == {2, 3, 6}


def test_in_place_a_restart_is_shorter_where_a_spare_is_there():
    in_place = {"in_place_secs": 1.0}
    kept = run(Dense(1), killed(205.5), cluster=in_place)
    assert kept.spent.down == pytest.approx(run(Dense(1), killed(205.5)).spent.down - 3.0)
    late = {"spare_nodes": 0, "repair_secs": 30.0}
    waits = run(Dense(1), FailureEvent(205.5, 0), durable="peers", cluster={**in_place, **late})
    assert waits.spent.down == run(Dense(1), FailureEvent(205.5, 0), durable="peers", cluster=late).spent.down
