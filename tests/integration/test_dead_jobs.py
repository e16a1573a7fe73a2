"""A start that is killed while it removes what a dead job of the same user left on its node: the next one ends that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.memory.directory import make_rank_directory
from tests.integration.lives import (
    KILLED,
    assert_same_run,
    live,
    output,
    place,  # noqa: F401 - a fixture
)
from tests.integration.test_memory_kills import DENSE, in_memory, left
from tests.integration.test_memory_rarely_stored import RARELY, restored, stored
from tests.support.slots import create_slot

RANKS, SLOTS = 2, 2


def dead_job(root: Path) -> Path:
    """What a job left before the machine was booted: the directory of its run, with sealed slots of two ranks."""
    for rank in range(RANKS):
        held = make_rank_directory(str(root), "d" * 32, 0, rank, "/another/store")
        for number in range(SLOTS):
            create_slot(held.path / f"slot_{number:03d}", 4096).seal(b"a header of another format")
        owner = json.loads((held.path / "owner.json").read_text())
        (held.path / "owner.json").write_text(json.dumps({**owner, "boot_id": "of another boot"}))
        held.release()
    return held.path.parents[1]


def files_in(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.suffix == ".head")


@pytest.mark.parametrize("n", [1, 2])
def test_killed_while_the_files_of_a_dead_job_are_removed(n, place):  # noqa: F811
    """In its first, or its second directory. What the killed life's own run has in memory is not touched."""
    run = in_memory(replace(DENSE, to_storage=RARELY), place)
    assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
    theirs = dead_job(Path(run.memory))
    assert len(files_in(theirs)) == SLOTS * RANKS
    assert live(replace(run, crash=("clear", n))) == KILLED, output(run)
    assert 0 < len(files_in(theirs)) < SLOTS * RANKS, "it was half removed"
    before = stored(run)
    assert live(run) == 0, output(run)
    assert not theirs.exists()
    assert restored(run) > before, "storage has only what the first life began with"
    assert_same_run(run)
    assert left(run) == []
