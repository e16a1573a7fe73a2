"""Megatron with little memory: nodes of 64 MB, a node that is full in mid-run, a cgroup's limit: no kill, same run."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.megatron.exactness import Case, finish, kill, life_of, require_exact, start_life
from tests.megatron.test_exact import EXPERTS_DATA, PIPELINE_EXPERTS, SHARDED, dense
from tests.megatron.test_memory import COPIES, left
from tests.support.deleting import delete_tree
from tests.support.limits import fill, memory_cgroup, small_file_systems
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import Journal
from tests.support.waiting import retry_until

pytestmark = pytest.mark.slow

LAYOUTS = {"pp2-ep2": Setup(**PIPELINE_EXPERTS), "ep2-dp2": Setup(**EXPERTS_DATA, **SHARDED)}
layouts = pytest.mark.parametrize("setup", LAYOUTS.values(), ids=LAYOUTS)
LARGE = {"hidden": 128, "ffn": 1024}
SHARE_NBYTES = 13 << 20
"""Of one rank, a little rounded up."""


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk, whose cache makes room, but for memory directories, which lie in ``tmp_path``."""
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_", dir="/var/tmp") as directory:
        Path(directory, "memory").symlink_to(tmp_path)
        yield Path(directory)


def case_of(setup: Setup, steps: int, at: int) -> Case:
    return Case(setup, dense(1), ((2, at, "train"),), steps=steps, memory=True, copies=COPIES)


def nodes(directory: Path) -> list[Path]:
    return [directory / "memory" / f"node_{node}" for node in (0, 1)]


@layouts
def test_dev_shm_of_containers_that_are_nodes(setup, tmp_path):
    """64 MB each, as Docker gives unless it is told otherwise: too little for snapshots and copies of two ranks."""
    case = case_of(replace(setup, **LARGE), 6, 4)
    with small_file_systems(64 << 20, *nodes(tmp_path)):
        kill(case, tmp_path)
        ended = finish(case, tmp_path)
        require_exact(case, tmp_path, ended)
        assert left(tmp_path) == []


@layouts
def test_a_node_that_is_full_in_mid_run_costs_memory_and_not_the_run(setup, tmp_path):
    """Somebody else takes all of it while the run trains; then a rank is killed, and all start again."""
    case = case_of(setup, 24, 20)
    journal, full = Journal(life_of(case, tmp_path).journal, 0), nodes(tmp_path)[1]

    def fill_in_mid_run() -> None:
        retry_until(lambda: len(journal.lines()) > 8)
        fill(full)

    with small_file_systems(4 << 20, *nodes(tmp_path)):
        filler = threading.Thread(target=fill_in_mid_run)
        filler.start()
        kill(case, tmp_path)
        filler.join()
        require_exact(case, tmp_path, finish(case, tmp_path))
        assert [path.name for path in left(tmp_path)] == ["filler"]


@layouts
def test_a_budget_of_two_snapshots_is_enough(setup, tmp_path):
    """Ranks learn a step late what the others have, and wait for that where memory has no room for one more."""
    case = case_of(setup, 8, 6)
    (tmp_path / "none").mkdir()
    none = replace(case, kills=(), options={"host_memory_bytes": 1000})
    ended = start_life(none, life_of(none, tmp_path / "none"))
    found = re.findall(r"needs ([\d,]+) bytes of host memory", "".join(outcome.error or "" for outcome in ended))
    case = replace(case, options={"host_memory_bytes": 2 * max(int(each.replace(",", "")) for each in found)})
    kill(case, tmp_path)
    delete_tree(nodes(tmp_path)[1])
    ended = finish(case, tmp_path)
    assert ended.resumed >= [4], "of memory, for storage has the first one only"
    require_exact(case, tmp_path, ended)
    assert left(tmp_path) == []


@layouts
@pytest.mark.parametrize("room", [12, 80])
def test_copies_that_a_limit_has_no_room_for_are_refused(room, setup, on_disk):
    """All ranks are under one limit, which leaves room for so many shares of a rank beside training; each may take
    three for its own snapshots, and the copies of peers come on top."""
    case = replace(case_of(replace(setup, **LARGE), 6, 0), kills=(), options={"host_memory_bytes": 3 * SHARE_NBYTES})
    with memory_cgroup() as group:
        bare = replace(case, memory=False, copies={}, policy=("Dense", {"every_n_steps": 1000}))
        (on_disk / "bare").mkdir()
        outcomes = start_life(bare, replace(life_of(bare, on_disk / "bare"), sabotage=group.join))
        assert all(outcome.ok for outcome in outcomes), outcomes
        group.limit(group.peak + room * SHARE_NBYTES)
        ended = finish(case, on_disk, sabotage=group.join)
        assert group.kills == 0
    require_exact(case, on_disk, ended)
    assert left(on_disk) == []
    copied = [result["records"][case.steps].replica_lag_steps for result in ended.results]
    assert (max(copied) > 1) == (room == 12), copied
