"""Ranks of a Megatron run that hear of another one's death, or fail all together, keep their newest iteration."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.megatron.exactness import Case, finish, kill, require_exact
from tests.megatron.test_exact import EXPERTS_DATA, PIPELINE_EXPERTS, SHARDED
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import Journal

RARELY = {"storage_every": 1000}
MOC = ("MoC", {"k": 1})
WINDOWS = ("MoEvement", {"window": 3})
DENSE = ("Dense", {"every_n_steps": 100})


def case(setup, policy, at, **more) -> Case:
    return Case(setup, policy, (at,), memory=True, copies=RARELY, survives=True, **more)


@pytest.mark.parametrize(
    ("setup", "policy"),
    [
        (Setup(**PIPELINE_EXPERTS), DENSE),
        pytest.param(Setup(**EXPERTS_DATA, **SHARDED), WINDOWS, marks=pytest.mark.slow),
        pytest.param(Setup(**PIPELINE_EXPERTS, **SHARDED), MOC, marks=pytest.mark.slow),
    ],
    ids=["pp2-ep2-dense", "ep2-dp2-windows", "pp2-ep2-moc"],
)
def test_an_error_on_every_rank_costs_the_iteration_under_way(setup, policy, tmp_path):
    run = case(setup, policy, (0, 6, "error"))
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    assert ended.resumed == [5]
    assert ended.replayed(-1) == []
    require_exact(run, tmp_path, ended)
    assert [path for path in (tmp_path / "memory").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("how", ["term", pytest.param("stuck", marks=pytest.mark.slow)])
def test_a_launcher_that_ends_the_ranks_waits_for_their_newest_iteration(how, tmp_path, capfd):
    """Nobody handles SIGTERM in this loop. A rank that waits in a collective never comes to a handler."""
    run = case(Setup(**PIPELINE_EXPERTS), DENSE, (0, 6, how))
    kill(run, tmp_path)
    assert "training stops (SIGTERM): rank 0 keeps its state of iteration 5 in memory" in capfd.readouterr().err
    ended = finish(run, tmp_path)
    assert ended.resumed == [5]
    require_exact(run, tmp_path, ended)


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_experts_of_ranks_that_live_on_are_not_stale(rank, tmp_path):
    """EP2 x DP2 under MoC: each expert is on two ranks, so that no death of one makes it stale."""
    run = case(Setup(**EXPERTS_DATA), MOC, (rank, 6, "forward"))
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    assert ended.resumed == [5]
    assert [result["lost"] for result in ended.results] == [0] * 4
    require_exact(run, tmp_path, ended)


SETUPS = {
    "ep2-dp2": Setup(**EXPERTS_DATA),
    "ep2-dp2-sharded": Setup(**EXPERTS_DATA, **SHARDED),
    "pp2-ep2": Setup(**PIPELINE_EXPERTS),
}
AT_EACH_STEP = {"dense": ("Dense", {"every_n_steps": 1}), "moc": MOC, "moetion": ("MoEtion", {"experts": 1})}


def slow_but(setup: str, policy: str, phase: str) -> Any:
    is_quick = (setup, policy, phase) == ("ep2-dp2", "moc", "updated")
    return pytest.param(setup, policy, phase, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("setup", "policy", "phase"),
    [slow_but(*each) for each in itertools.product(SETUPS, AT_EACH_STEP, ("train", "update", "updated"))],
)
def test_a_rank_that_dies_around_its_update_costs_one_iteration(setup, policy, phase, tmp_path):
    """Before it, between two of its chained optimizers, and after it: others may be at one iteration or the next."""
    run = case(SETUPS[setup], AT_EACH_STEP[policy], (1, 6, phase))
    kill(run, tmp_path)
    journals = [Journal(str(tmp_path / "journal"), rank).lines() for rank in range(run.ranks)]
    reached = max(line.get("updated", 0) for lines in journals for line in lines)
    assert reached in (5, 6)
    ended = finish(run, tmp_path)
    assert len(ended.resumed) == 1
    assert reached - 1 <= ended.resumed[0] <= reached
    if policy == "dense":
        require_exact(run, tmp_path, ended)


@pytest.mark.slow
def test_experts_that_died_with_their_rank_are_stale(tmp_path):
    """PP2 x EP2: each expert is on one rank. Those of the ranks that live on are of the newest iteration."""
    run = case(Setup(**PIPELINE_EXPERTS), MOC, (1, 6, "forward"))
    kill(run, tmp_path)
    [with_survivors] = {result["lost"] for result in finish(run, tmp_path).results}
    alone = tmp_path / "alone"
    alone.mkdir()
    run = replace(run, survives=False)
    kill(run, alone)
    [without] = {result["lost"] for result in finish(run, alone).results}
    assert 0 < with_survivors < without
