"""A dense step in memory opens under another layout of Megatron, and gives what the same step on storage gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.megatron.exactness import Case, Ended, differing, finish, kill, shards_read
from tests.megatron.test_exact import EXPERTS_DATA, PIPELINE_EXPERTS, SHARDED, dense
from tests.megatron.test_memory import COPIES, left, newest
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import EXACT

pytestmark = pytest.mark.slow

EP2 = Setup(**EXPERTS_DATA)
EP2_SHARDED = replace(EP2, **SHARDED)
PP2_EP2 = Setup(**PIPELINE_EXPERTS)
MOVES = {
    "ep2-dp2 to ep2": (EP2, 4, EP2, 2),
    "ep2-dp2-sharded to ep2": (EP2_SHARDED, 4, EP2, 2),
    "pp2-ep2 to ep2": (PP2_EP2, 4, EP2, 2),
    "pp2-ep2-bias to ep2": (replace(PP2_EP2, expert_bias=True), 4, replace(EP2, expert_bias=True), 2),
    "ep2 to ep2-dp2-sharded": (EP2, 2, EP2_SHARDED, 4),
}
AT = 5
"""The iteration that one rank is killed in."""


def iteration_of(directory: str) -> int:
    return int(directory.split("_")[1])


def same_iteration_on_storage(case: Case, iteration: int, directory: Path) -> None:
    """A run that has no memory, and has written each iteration to storage, up to that one."""
    kept = {"retention": RetentionPolicy(keep_every_n_steps=1)}
    kill(replace(case, memory=False, copies={}, options=kept, kills=((1, iteration + 2, "train"),)), directory)
    for newer in (directory / "store").glob("step_*"):
        if iteration_of(newer.name) > iteration:
            delete_tree(newer)
    assert iteration_of(newest(directory)) == iteration


def require_alike(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        for what in (*EXACT, "losses"):
            assert (differ := differing(one[what], other[what])) == [], f"rank {rank}: {what}: {differ}"


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("lost", [False, True], ids=["no node lost", "one node lost"])
def test_another_layout_gets_from_memory_what_storage_would_give(name, lost, tmp_path):
    """Two nodes before and after, each with a copy of the other one's; or one of them comes back with nothing."""
    before, ranks, after, others = MOVES[name]
    start = Case(before, dense(1), ((1, AT, "train"),), ranks, memory=True, ranks_per_node=ranks // 2, copies=COPIES)
    moved = replace(start, setup=after, ranks=others, ranks_per_node=others // 2)
    at, twin = tmp_path / "run", tmp_path / "twin"
    for directory in (at, twin):
        directory.mkdir()
    kill(start, at)
    stored = iteration_of(newest(at))
    if lost:
        delete_tree(at / "memory" / "node_1")
    ended = ends(moved, at)
    [iteration] = {result["progress"].iteration for result in ended.results}
    assert iteration > stored, "storage has only what the first life began with"
    assert shards_read(replace(moved, ranks=max(ranks, others)), at) == [[]] * max(ranks, others), "of all lives"
    assert left(at) == []
    same_iteration_on_storage(start, iteration, twin)
    expected = ends(replace(moved, memory=False, copies={}), twin)
    assert {result["progress"].iteration for result in expected.results} == {iteration}
    require_alike(ended.results, expected.results)
    assert ended.results[0]["losses"].keys() == set(range(iteration + 1, start.steps + 1))


def ends(case: Case, directory: Path) -> Ended:
    ended = finish(case, directory)
    reader = StoreReader(open_storage(str(directory / "store")))
    assert iteration_of(reader.directories()[0]) == case.steps
    return ended
