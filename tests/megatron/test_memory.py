"""Memory slots under Megatron: a killed rank takes the job down; nodes come back from what their memory holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.megatron.exactness import Case, finish, kill, require_exact, shards_read
from tests.megatron.test_exact import EXPERTS_DATA, PIPELINE_EXPERTS, SHARDED, dense
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.spoiled import spoil_experts

CASES = {
    "pp2-ep2": Case(Setup(**PIPELINE_EXPERTS), dense(1), ((1, 4, "train"),), steps=6, memory=True),
    "ep2-dp2-sharded": Case(Setup(**EXPERTS_DATA, **SHARDED), dense(1), ((2, 4, "train"),), steps=6, memory=True),
}
SLOW = ("ep2-dp2-sharded",)
fast_and_slow = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in CASES.items()]
)


def newest(directory: Path) -> str:
    return StoreReader(open_storage(directory / "store")).directories()[0]


def left(directory: Path) -> list[Path]:
    return [path for path in (directory / "memory").rglob("*") if path.is_file()]


@fast_and_slow
def test_all_nodes_come_back_from_their_memory(case, tmp_path):
    kill(case, tmp_path)
    directory = newest(tmp_path)
    spoil_experts(tmp_path / "store" / directory)  # retention removes it before the run ends
    ended = finish(case, tmp_path)
    assert ended.resumed >= [int(directory.split("_")[1])], "of which storage has no undamaged expert"
    assert shards_read(case, tmp_path) == [[]] * case.ranks, "no rank reads a tensor from there"
    require_exact(case, tmp_path, ended)
    assert left(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_node_that_is_lost_with_its_memory_reads_storage(case, tmp_path):
    """So do the others, whose memory is of a newer step: that no rank reads from there can be told on every one."""
    kill(case, tmp_path)
    delete_tree(tmp_path / "memory" / "node_1")
    ended = finish(case, tmp_path)
    assert all(shards_read(case, tmp_path))
    require_exact(case, tmp_path, ended)
    assert left(tmp_path) == []


COPIES = {"replicas": 1, "storage_every": 1000}
MOEVEMENT = ("MoEvement", {"window": 2})
GEMINI = ("Gemini", {"every_n_steps": 2})
REPLICATED = {
    "pp2-ep2": replace(CASES["pp2-ep2"], copies=COPIES),
    "ep2-dp2-sharded": replace(CASES["ep2-dp2-sharded"], copies=COPIES),
    "pp2-ep2-windows": replace(CASES["pp2-ep2"], copies=COPIES, policy=MOEVEMENT, steps=8, kills=((1, 6, "train"),)),
    "ep2-dp2-windows": replace(
        CASES["ep2-dp2-sharded"], copies=COPIES, policy=MOEVEMENT, steps=8, kills=((2, 6, "train"),)
    ),
    "pp2-ep2-gemini": replace(CASES["pp2-ep2"], copies=COPIES, policy=GEMINI, steps=8, kills=((1, 6, "train"),)),
    "ep2-dp2-gemini": replace(
        CASES["ep2-dp2-sharded"], copies=COPIES, policy=GEMINI, steps=8, kills=((2, 6, "train"),)
    ),
}


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "pp2-ep2")) for n in REPLICATED])
@pytest.mark.quick("pp2-ep2-1")
def test_a_node_that_is_lost_with_its_memory_comes_back_from_its_peer(name, lost, tmp_path):
    case = REPLICATED[name]
    kill(case, tmp_path)
    before = newest(tmp_path)
    delete_tree(tmp_path / "memory" / f"node_{lost}")
    ended = finish(case, tmp_path)
    assert ended.resumed > [int(before.split("_")[1])], "storage has only what the run began with"
    assert shards_read(case, tmp_path) == [[]] * case.ranks
    require_exact(case, tmp_path, ended)
    assert left(tmp_path) == []


DATA = replace(CASES["ep2-dp2-sharded"], setup=Setup(**EXPERTS_DATA), copies=COPIES)
"""No optimizer state is divided: experts are in two data-parallel groups, all else in one of four ranks."""


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_data_parallel_peers_had_anyway_brings_a_lost_node_back(lost, tmp_path):
    kill(DATA, tmp_path)
    before = newest(tmp_path)
    delete_tree(tmp_path / "memory" / f"node_{lost}")
    ended = finish(DATA, tmp_path)
    assert ended.resumed > [int(before.split("_")[1])], "storage has only what the run began with"
    require_exact(DATA, tmp_path, ended)
    assert left(tmp_path) == []
    newest_records = [result["records"][DATA.steps] for result in ended.results]
    assert all(record.replica_saved_nbytes > 0 for record in newest_records)
