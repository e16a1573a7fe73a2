"""PP2 x EP2 under Megatron, killed and started again many times: nothing grows on any rank, and no bit differs."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration import memory_phases
from tests.integration.test_dead_jobs import RANKS, SLOTS, dead_job, files_in
from tests.integration.test_memory_rounds import STRANGER, others
from tests.megatron.exactness import (
    Case,
    finish,
    kill,
    life_of,
    require_exact,
    require_killed,
    shards_read,
    split_lives,
    start_life,
)
from tests.megatron.test_exact import EXPERTS_DATA, PIPELINE_EXPERTS
from tests.megatron.test_memory import COPIES
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import Journal

LAYOUTS = {"pp2-ep2": Setup(**PIPELINE_EXPERTS), "ep2-dp2": Setup(**EXPERTS_DATA)}
RARELY = {"storage_every": 10_000}
SLACK = 4
"""Of descriptors and threads: what is under way at the moment when they are counted."""
SLACK_BYTES = 48 << 20
"""Of resident memory: libraries that one life happens to touch and another does not."""
FAULT_NBYTES = 128
"""By which headers grow with each recovery of the run, which they list."""


def of_rank(directory: Path, rank: int) -> list[list[dict[str, Any]]]:
    return split_lives(Journal(str(directory / "journal"), rank).lines())


def reached(directory: Path, case: Case) -> int:
    """The newest iteration that every rank has ended."""
    lives = [of_rank(directory, rank) for rank in range(case.ranks)]
    return min(max((line.get("updated", 0) for life in each for line in life), default=0) for each in lives)


def files(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in (directory / "memory").rglob("*") if path.is_file()}


def rounds(setup: Setup, directory: Path, count: int) -> None:
    case = Case(setup, ("Dense", {"every_n_steps": 1}), (), memory=True, copies=RARELY, steps=10**6)
    found = []
    for number in range(count):
        at = number % case.ranks, reached(directory, case) + 2, "train"
        life = replace(life_of(case, directory), kill=at, seed=1 + number, number=number)
        require_killed(start_life(case, life), at)
        found.append(files(directory))
    last = replace(case, steps=reached(directory, case) + 2)
    ended = finish(replace(last, kills=((0, 0, ""),) * count), directory)
    assert len(ended.lives) == count + 1
    assert ended.resumed == sorted(ended.resumed), "no life goes on from before the one before it"
    assert ended.resumed[-1] >= count - 1, "each life ends an iteration or two"
    early = slice(1, 2 + count // 3)
    for rank in range(case.ranks):
        taken = [life[0]["resources"] for life in of_rank(directory, rank)]
        for what, slack in (("descriptors", SLACK), ("threads", SLACK), ("resident", SLACK_BYTES)):
            most, at_first = (max(each[what] for each in some) for some in (taken[1:], taken[early]))
            assert most <= at_first + slack, f"{what} of rank {rank}"
    kinds = [Counter(path.suffix or path.name for path in sizes) for sizes in found]
    for kind in set().union(*kinds):
        most, at_first = (max(each[kind] for each in some) for some in (kinds, kinds[early]))
        assert most <= at_first + case.ranks, f"files {kind}"
    heads = max(sum(path.suffix == ".head" for path in sizes) for sizes in found)
    slot = max(max(sizes.values()) for sizes in found[early])
    most, at_first = (max(sum(sizes.values()) for sizes in some) for some in (found, found[early]))
    assert most <= at_first + case.ranks * slot + heads * FAULT_NBYTES * count, "bytes in memory"
    assert shards_read(case, directory) == [[]] * case.ranks, "no rank reads a tensor from storage"
    require_exact(last, directory, ended)
    assert files(directory) == {}


def test_three_rounds(tmp_path):
    rounds(LAYOUTS["pp2-ep2"], tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [30, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rounds(layout, count, tmp_path):
    rounds(LAYOUTS[layout], tmp_path, count)


def die_clearing() -> None:
    """Whichever rank of the second node is the first to remove what a dead job left."""
    if int(os.environ["RANK"]) >= 2:
        memory_phases.kill_in("clear", 1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_of_others_are_never_touched_and_those_of_a_dead_job_are_removed(layout, tmp_path):
    """On both nodes; a start is killed while it removes the dead job's."""
    kills = ((1, 4, "train"), (2, 1, "clear"), (3, 8, "train"))
    case = Case(LAYOUTS[layout], ("Dense", {"every_n_steps": 1}), kills, memory=True, copies=COPIES, steps=10)
    nodes = [tmp_path / "memory" / f"node_{node}" for node in (0, 1)]
    for node in nodes:
        node.mkdir(parents=True)
    theirs = [others(node, "c" * 32) for node in nodes]
    before = [told() for told in theirs]
    kill(replace(case, kills=kills[:1]), tmp_path)
    dead = [dead_job(node) for node in nodes]
    second = replace(life_of(case, tmp_path), sabotage=die_clearing, seed=2, number=1)
    assert -signal.SIGKILL in [outcome.exitcode for outcome in start_life(case, second)]
    assert 0 < len(files_in(dead[1])) < 2 * SLOTS * RANKS, "it was half removed"
    third = replace(life_of(case, tmp_path), kill=kills[2], seed=3, number=2)
    require_killed(start_life(case, third), kills[2])
    assert not any(each.exists() for each in dead)
    ended = finish(case, tmp_path)
    assert ended.resumed[-1] >= 4
    require_exact(case, tmp_path, ended)
    assert [told() for told in theirs] == before
    foreign = ("a" * 32, "b" * 32, "notes.txt", "sem.something", f"moe_ckpt-{STRANGER}")
    assert [path for path in files(tmp_path) if not any(part.startswith(foreign) for part in path.parts)] == []
