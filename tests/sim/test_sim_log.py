"""An upstream log in the simulation: in host memory, on the network when a stage goes back, and its budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.cluster.upstream_log import SimulatedUpstreamLog
from moe_ckpt_sim.failures.failures import FailureEvent
from moe_ckpt_sim.failures.traces import Trace
from moe_ckpt_sim.planner.resources import use_of
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.system import System
from moe_ckpt_sim.workload.training import Iteration
from tests.sim.builders import LOCAL, sparse

WINDOW, LOGGED = 4, 50e3
"""Iterations, and bytes in each of them: a second of a rank's network."""


def run(*kills, logged=LOGGED, **system):
    """Four stages of two ranks, a node each."""
    iteration = Iteration(secs=1.0, update_secs=0.1, stage_secs=0.4, boundary_bytes=logged)
    events = Trace(recorded=tuple(FailureEvent(at, node, process=True) for at, node in kills)) if kills else None
    given = {**LOCAL, **system}
    tried = sparse(WINDOW, failures=events, iteration=iteration, system=given, duration_secs=200.0)
    return simulate(tried), tried


def test_bytes_in_host_memory_by_the_formula():
    log = SimulatedUpstreamLog(10.0)
    assert [log.held_bytes(window) for window in (None, 1, 4)] == [30.0, 30.0, 90.0]
    assert SimulatedUpstreamLog(10.0, 75.0).held_bytes(4) == 70.0, "whole iterations"
    assert SimulatedUpstreamLog(10.0, 5.0).held_bytes(4) == 0.0
    assert SimulatedUpstreamLog(0.0, 5.0).held_bytes(4) == 0.0
    assert [SimulatedUpstreamLog(10.0, 75.0).reaches(steps) for steps in (6, 7)] == [True, False], "one is under way"
    assert SimulatedUpstreamLog(10.0).reaches(10**6)
    assert SimulatedUpstreamLog(0.0, 75.0).reaches(10**6), "nothing is sent"


def test_what_a_run_and_its_planner_say():
    told, tried = run()
    assert (told.logged_bytes_per_step, told.log_bytes) == (LOGGED, 9 * LOGGED)
    use = use_of(tried, told)
    bare, bare_tried = run(logged=0.0)
    assert told.mean_stall_secs == bare.mean_stall_secs, "snapshots get their rate beside the log"
    assert use.log_bytes == told.log_bytes
    more = use.host_bytes - use_of(bare_tried, bare).host_bytes
    assert more == pytest.approx(tried.layout.ranks_per_node * told.log_bytes)
    for name in ("pcie", "host_memory"):
        assert use.utilisation[name] > use_of(bare_tried, bare).utilisation[name]
    no_log, _ = run(rollback="global")
    assert (no_log.logged_bytes_per_step, no_log.log_bytes) == (0.0, 0.0)


@pytest.mark.parametrize("at", [100.5, 101.5, 102.5, 103.5])
def test_a_stage_that_goes_back_is_brought_the_logs_of_what_it_computes_alone(at):
    """From a window's first step on, over the network, before it begins."""
    with_log, _ = run((at, 1))
    without, _ = run((at, 1), logged=0.0)
    alone = with_log.steps_again // 2  # ranks of a stage
    assert WINDOW - 1 <= alone <= 2 * WINDOW
    assert with_log.spent.retrieve - without.spent.retrieve == pytest.approx(alone * 1.0)
    assert with_log.spent.replay == without.spent.replay


def test_rank_iterations_computed_again():
    """By a stage of two ranks, by two neighbours, and by all eight, who do what was trained since once more, too."""
    one, two = run((100.5, 0))[0].steps_again, run((100.5, 0), (100.5, 1))[0].steps_again
    every = run((100.5, 0), rollback="global")[0].steps_again
    assert (two, every) == (2 * one, 4 * one)
    assert run()[0].steps_again == 0


def test_the_step_that_a_run_came_back_to_is_in_no_new_window():
    """As in a trainer, which asks its policy when a step has ended: four iterations later there is no new one yet."""
    first, _ = run((100.5, 1))
    back_at = first.history[0].at_secs
    for later, steps in ((4.05, 4), (5.05, WINDOW - 1 - first.steps_again // 2 + 1)):
        twice, _ = run((100.5, 1), (back_at + later, 1))
        second = (twice.steps_again - first.steps_again) // 2
        assert second == first.steps_again // 2 + steps


def test_a_log_that_does_not_reach_far_enough_sends_all_back():
    needed = run((102.5, 1))[0].steps_again // 2
    for steps, everybody in ((needed + 1, False), (needed, True)):
        told, _ = run((102.5, 1), upstream_bytes=steps * LOGGED)
        assert told.steps_again == (8 if everybody else 2) * needed
        assert (told.history[0].useful_steps < 102) is everybody


def test_bad_budgets():
    policy = sparse().system.policy
    with pytest.raises(ConfigError, match=r"rollback='global', upstream_bytes=5.*leave upstream_bytes out"):
        System("tried", policy, durable="peers", upstream_bytes=5)
    said = System("tried", policy, durable="peers", rollback="localized", upstream_bytes="8GB")  # as in moe_ckpt.Memory
    assert said.log_bytes == 8e9
    with pytest.raises(ConfigError, match="upstream_bytes"):
        System("tried", policy, durable="peers", rollback="localized", upstream_bytes=0)


def test_memory_of_the_node_itself_is_enough_for_a_killed_process():
    """And for a lost node it is not: all go back to storage."""
    told, tried = run((100.5, 1), durable="node", storage_every=20.0)
    assert told.recovered == {"host": 1, "peer": 0, "storage": 0}
    assert told.history[0].useful_steps == 100
    lost = replace(tried, failures=Trace(recorded=(FailureEvent(100.5, 1),)))
    assert simulate(lost).recovered == {"host": 0, "peer": 0, "storage": 1}
