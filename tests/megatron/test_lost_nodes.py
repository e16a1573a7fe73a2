"""Megatron, each rank a node with two copies: two nodes are lost, and one more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.policies import Dense, MoC
from tests.megatron.exactness import Case, finish, kill, require_exact, shards_read
from tests.megatron.moc_recount import Store
from tests.megatron.test_exact import EXPERTS_DATA, PIPELINE_EXPERTS, SHARDED, moevement
from tests.megatron.test_memory import GEMINI, left, newest
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.megatron_two_lives import RANKS, Lines, both_lives, require_versions

LAST = 5
SETUPS = {
    "plain": Setup(ep=2, layers=2, num_microbatches=2),
    "dist-opt": Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True, precision="bf16"),
}


def every(setup: Setup, step: int) -> dict[tuple[int, int], int]:
    return {(layer, expert): step for layer in range(setup.layers) for expert in range(setup.experts)}


def versions(told: list[dict[str, Any]], lines: list[Lines]) -> dict[tuple[int, int], int]:
    """The step as of which each expert came back, by its bytes on all ranks that hold it."""
    found: dict[tuple[int, int], int] = {}
    for rank, each in enumerate(told):
        for expert in each["digests"].keys() - {"rest"}:
            layer, number = map(int, expert.split("/"))
            same = [t for t, line in enumerate(lines[rank], 1) if line["digests"][expert] == each["digests"][expert]]
            assert found.setdefault((layer, number), max(same)) == max(same), "two holders, two versions"
    return found


@pytest.mark.parametrize("name", ["plain", pytest.param("dist-opt", marks=pytest.mark.slow)])
def test_as_many_nodes_as_copies_may_be_lost(tmp_path: Path, name: str):
    """Two of four nodes: every bit of every rank is that of the last step, of which storage has nothing."""
    told, lines = both_lives(tmp_path, SETUPS[name], [Dense()] * RANKS, LAST, (0, 2), replicas=2)
    assert {rank["step"] for rank in told} == {LAST}
    require_versions(told, lines, every(SETUPS[name], LAST), LAST)


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), "dist-opt"])
def test_one_more_goes_back_to_storage_and_names_the_steps_that_are_lost(tmp_path: Path, name: str):
    told, lines = both_lives(tmp_path, SETUPS[name], [Dense()] * RANKS, LAST, (0, 1, 2), replicas=2)
    assert {rank["step"] for rank in told} == {1}
    require_versions(told, lines, every(SETUPS[name], 1), 1)
    [said] = [text for text in told[0]["said"] if "lost, and must be computed again" in text]
    assert f"iterations 2 to {LAST} are lost, and must be computed again: memory holds only a part of iteration" in said
    assert not any("computed again" in text for rank in told[1:] for text in rank["said"]), "rank 0 says it for all"


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_experts_of_moc_are_as_old_as_their_turns_and_what_they_lack_is_counted(tmp_path: Path, name: str):
    """Storage has the first iteration only; after it each of four experts has had its turn once."""
    setup = SETUPS[name]
    told, lines = both_lives(tmp_path, setup, [MoC(k=1)] * RANKS, LAST, (0, 2), replicas=2)
    assert {rank["step"] for rank in told} == {LAST}
    wanted = versions(told, lines)
    for layer in range(setup.layers):
        assert sorted(wanted[layer, expert] for expert in range(setup.experts)) == [2, 3, 4, LAST]
    require_versions(told, lines, wanted, LAST)
    assert told[0]["lost"] > 0


@pytest.mark.parametrize(
    "lost",
    [pytest.param((), id="none"), *(pytest.param(each, marks=pytest.mark.slow) for each in [(0, 2), (0, 1, 2, 3)])],
)
@pytest.mark.parametrize(
    ("name", "snapshot_k"),
    [("plain", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in [("dist-opt", 3), ("plain", 4)])],
)
def test_after_kill_9_memory_has_more_experts_of_moc_than_storage(
    tmp_path: Path, name: str, snapshot_k: int, lost: tuple[int, ...]
):
    """Every step goes to storage with one of four experts, and to memory with more. Versions are told by bytes."""
    setup, policy = SETUPS[name], MoC(k=1, snapshot_k=snapshot_k)
    told, lines = both_lives(tmp_path, setup, [policy] * RANKS, LAST, lost, replicas=2, to_storage=1)
    assert {rank["step"] for rank in told} == {LAST}
    store = Store.read(tmp_path)
    stored = store.versions(max(key for key in store.manifests if key[1] == LAST))
    back = versions(told, lines)
    require_versions(told, lines, back, LAST)
    for layer in range(setup.layers):
        of_layer = [sorted(found[layer, expert] for expert in range(setup.experts)) for found in (stored, back)]
        in_memory = [LAST] * snapshot_k + [LAST - 1] * (setup.experts - snapshot_k)
        assert of_layer == [[2, 3, 4, LAST], [2, 3, 4, LAST] if len(lost) == RANKS else sorted(in_memory)]
    assert len(lost) < RANKS or back == stored
    assert (told[0]["lost"] > 0) == (len(lost) == RANKS or snapshot_k < setup.experts)


FOUR = Case(
    Setup(**PIPELINE_EXPERTS),
    GEMINI,
    ((1, 7, "train"),),
    memory=True,
    ranks_per_node=1,
    copies={"replicas": 2, "storage_every": 1000},
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [GEMINI, moevement(2)], ids=["gemini", "windows"])
@pytest.mark.parametrize("setup", [FOUR.setup, Setup(**EXPERTS_DATA, **SHARDED)], ids=["pp2-ep2", "ep2-dp2"])
@pytest.mark.parametrize("lost", [(0, 2), (0, 1, 2)], ids=["two", "three"])
def test_runs_of_rarer_checkpoints_end_alike(tmp_path: Path, lost: tuple[int, ...], setup: Setup, policy):
    """Gemini every other step, and windows of two: as many lost nodes as copies cost nothing, one more is said."""
    case = replace(FOUR, setup=setup, policy=policy)
    kill(case, tmp_path)
    before = int(newest(tmp_path).split("_")[1])
    for node in lost:
        delete_tree(tmp_path / "memory" / f"node_{node}")
    ended = finish(case, tmp_path)
    require_exact(case, tmp_path, ended)
    assert left(tmp_path) == []
    [resumed] = ended.resumed
    said = [text for text in ended.results[0]["said"] if "lost, and must be computed again" in text]
    if len(lost) == 2:
        assert (resumed > before, said) == (True, []), "storage has only what the run began with"
        assert shards_read(case, tmp_path) == [[]] * case.ranks
    else:
        assert resumed == before
        assert [text.startswith(f"iterations {before + 1} to ") for text in said] == [True], ended.results[0]["said"]
