"""Localized rollback: which stages recover together, which side by side, and when all must go back after all."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from moe_ckpt_sim.cluster.cluster import Parallel
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.run.recovery import Recoveries, host_nodes
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.workload.training import Iteration
from tests.sim.builders import LOCAL, layout, sparse, trace

SHORT = {"duration_secs": 200.0}

STAGED = Iteration(secs=1.0, update_secs=0.1, stage_secs=0.4)
"""16 micro-batches: one stage alone needs 0.5 s, two 0.525, all at most a whole iteration."""


def staged(*events, parallel=None, replicas=3, **cluster):
    system = {**LOCAL, "replicas": replicas}
    failures = trace(*events)
    return sparse(4, failures=failures, iteration=STAGED, cluster=cluster, parallel=parallel, system=system, **SHORT)


def _costs(tried):
    return Costs(tried.layout, tried.precision, tried.iteration, tried.system)


def test_stages_alone():
    tried = staged((50.0, 0))
    recoveries = Recoveries(_costs(tried), tried.batch.micro_batches(1))
    assert [recoveries.alone_secs(n) for n in (1, 2, 3)] == pytest.approx([0.5, 0.525, 0.55])
    slow = Recoveries(_costs(replace(tried, iteration=Iteration(1.0, 0.1, 0.9))), 16)
    assert slow.alone_secs(4) == pytest.approx(1.0, abs=1e-8)  # never longer than all stages


def test_the_others_keep_what_they_computed():
    told = simulate(staged((100.5, 1)))
    assert told.history[0].useful_steps == 100
    assert told.spent.lost == pytest.approx(0.5, abs=1)
    assert 0 < told.spent.replay < (3 + 4 + 3) * 0.5


def repaired(*events, **given):
    """Seconds of down, retrieve and replay together: from the first failure until training goes on."""
    spent = simulate(staged(*events, **given)).spent
    return spent.down + spent.retrieve + spent.replay


def test_stages_apart_recover_side_by_side_and_neighbours_together():
    alone = repaired((100.5, 0))
    assert repaired((100.5, 0), (100.5, 2)) == pytest.approx(alone)
    assert repaired((100.5, 0), (100.5, 2), (100.5, 3)) == pytest.approx(repaired((100.5, 2), (100.5, 3)))
    assert repaired((100.5, 0), (100.5, 1)) > alone + 0.05
    orders = {repaired(*((100.5, node) for node in order)) for order in permutations((0, 1, 3))}
    assert len(orders) == 1


def test_a_second_failure_apart_does_not_disturb_the_first_and_one_beside_it_does():
    alone = repaired((100.5, 0))
    assert repaired((100.5, 0), (102.5, 2)) == pytest.approx(2 + alone)
    beside = repaired((100.5, 0), (102.5, 1))
    assert beside == pytest.approx(2 + repaired((100.5, 0), (100.5, 1)))


def test_a_failure_of_another_stage_after_the_first_is_back_is_on_its_own():
    alone = repaired((100.5, 0))
    assert repaired((100.5, 0), (130.5, 1)) == pytest.approx(2 * alone, rel=0.2)


def test_a_recovery_between_two_others_joins_them():
    """0 and 2 recover apart, then 1 between them fails: all three begin anew, together."""
    joined = repaired((100.5, 0), (100.5, 2), (101.5, 1))
    assert joined == pytest.approx(1 + repaired((100.5, 0), (100.5, 1), (100.5, 2)))


@pytest.mark.parametrize(
    ("gpus", "parallel", "node", "stages"),
    [(1, None, 3, (1, 1)), (4, None, 1, (2, 3)), (2, Parallel(pp=4, ep=2), 2, (2, 2)), (3, None, 1, (1, 2))],
)
def test_a_node_takes_its_stages_with_it(gpus, parallel, node, stages):
    quick = {"nodes": 8, "gpus_per_node": gpus, "nic_bytes_per_sec": 10e6, "replicas": 1}  # few nodes have few peers
    tried = staged((100.5, node), parallel=parallel, **quick)
    span = tried.layout.stages_of(node)
    assert (span.start, span.stop - 1) == stages
    same = {"nodes": 4, "gpus_per_node": 2, "nic_bytes_per_sec": 10e6 * 2 / tried.layout.ranks_per_node}
    of_stages = repaired(*((100.5, stage) for stage in range(stages[0], stages[1] + 1)), **same)
    of_node = repaired((100.5, node), parallel=parallel, **quick)
    assert of_node == pytest.approx(of_stages, rel=0.02)


def test_one_that_is_back_already_is_not_joined():
    """0 is back at 109.5 s and 3 at 113.5 s; when 1 fails at 112 s, its neighbour 0 computes again."""
    alone = repaired((100.5, 0))
    assert 8.5 < alone < 9.4
    assert repaired((100.5, 0), (104.5, 3), (112.0, 1)) == pytest.approx(11.5 + alone)


def test_the_longest_recovery_counts_not_the_last_one():
    assert repaired((100.5, 0), (100.5, 1), (100.51, 3)) == pytest.approx(repaired((100.5, 0), (100.5, 1)))


def test_iterations_since_the_window_are_caught_up_with():
    """Half a second each for one stage, and none to three of them, however the windows lie."""
    found = sorted(simulate(staged((100.5 + at, 0))).spent.replay for at in range(4))
    assert [secs - found[0] for secs in found] == pytest.approx([0.0, 0.5, 1.0, 1.5], abs=1e-6)


def test_where_peers_are_lost_all_go_back():
    """The second failure takes the last replica: no logs bring that stage back, so everybody returns to the backup."""
    events = ((100.5, 0), (102.5, 2))
    local = {**LOCAL, "replicas": 1, "storage_every": 40.0}
    tried = sparse(4, failures=trace(*events), iteration=STAGED, system=local, **SHORT)
    told = simulate(tried)
    assert told.fallbacks == 1
    assert told.history[0].useful_steps <= 80
    assert told.spent.lost > 20


def test_before_the_first_window_all_begin_anew():
    told = simulate(sparse(4, failures=trace((0.25, 0)), **SHORT))
    assert told.history[0].useful_steps == 0


@pytest.mark.parametrize(
    ("parallel", "nodes"),
    [
        (Parallel(pp=4, ep=2), {(0, 0): [0], (0, 7): [0], (3, 0): [3]}),
        (Parallel(pp=2, dp=2, ep=2), {(0, 0): [0, 1], (0, 7): [0, 1], (3, 0): [2, 3]}),
        (Parallel(pp=1, ep=8), {(0, 0): [0], (0, 7): [3], (3, 4): [2]}),
        (Parallel(pp=2, dp=4), {(0, 0): [0, 0, 1, 1], (3, 7): [2, 2, 3, 3]}),
        (Parallel(dp=8), {(0, 0): [0], (3, 7): [3]}),
    ],
)
def test_whose_memory_an_expert_is_copied_into(parallel, nodes):
    found = host_nodes(layout(parallel))
    assert {place: found[place].tolist() for place in nodes} == nodes
