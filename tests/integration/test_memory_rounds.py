"""Lives that are really killed, one after the other: nothing grows, no files of others are touched, none are left."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.memory.directory import RankDirectory, boot_id, make_rank_directory
from moe_ckpt.memory.slot import Slot
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_same_losses,
    assert_store_sound,
    events,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    split_lives,
    undisturbed,
)
from tests.integration.test_memory_kills import DENSE, in_memory
from tests.integration.test_memory_layouts import DDP, FSDP2
from tests.integration.test_memory_rarely_stored import RARELY
from tests.support.opened import shards_opened

STEPS_OF_EPOCH, STEPS_OF_LIFE = 10, 2
STRANGER = 4321
LAYOUTS = {"one": DENSE, "ddp": DDP, "fsdp2": FSDP2}
SLACK = 4
"""What is under way at the moment of a kill: a slot that is made, a header that is written, a thread that removes."""
FAULT_NBYTES = 64
"""Each header lists the recoveries of the run."""
SLACK_BYTES = 48 << 20
"""Of resident memory: libraries that one life happens to touch and another does not."""


def others(root: Path, mine: str) -> Callable[[], dict[str, tuple[int, int, bytes]]]:
    """Puts files of others beside the run's own, and returns what tells them: another run of this user, whose process
    is alive; one that waits for its restart; another user's; and something that is no run."""
    user = root / f"moe_ckpt-{os.geteuid()}"
    kept: list[RankDirectory] = []
    for run_id, lives in (("a" * 32, True), ("b" * 32, False)):
        held = make_rank_directory(str(root), run_id, 0, 0, "/another/store")
        slot = Slot.create(held.path / "slot_000", 4096)
        slot.seal(b"a header of another format")
        if lives:
            kept.append(held)
        else:
            owner = {"pid": 1, "host": "h", "boot_id": boot_id(), "store": "/another/store"}
            (held.path / "owner.json").write_text(json.dumps({**owner, "begun_unix_secs": time.time()}))
            held.release()
    stranger = root / f"moe_ckpt-{STRANGER}" / mine / "000000" / "rank_00000"
    stranger.mkdir(parents=True)
    (stranger / "slot_000.data").write_bytes(b"theirs")
    if os.geteuid() == 0:
        for path in (root / f"moe_ckpt-{STRANGER}", *root.glob(f"moe_ckpt-{STRANGER}/**/*")):
            os.chown(path, STRANGER, STRANGER)
    (user / "notes.txt").write_text("no run")
    (root / "sem.something").write_bytes(b"of another program")

    def told() -> dict[str, tuple[int, int, bytes]]:
        roots = [user / ("a" * 32), user / ("b" * 32), user / "notes.txt", root / f"moe_ckpt-{STRANGER}"]
        paths = [path for each in (*roots, root / "sem.something") for path in (each, *each.rglob("*"))]
        files = [path for path in paths if path.is_file() and path.name != "lock"]
        assert kept or not paths
        return {str(each): (each.stat().st_ino, each.stat().st_mtime_ns, each.read_bytes()) for each in files}

    return told


def own(run: Run, told: Callable[[], dict[str, tuple[int, int, bytes]]]) -> list[Path]:
    """What the run's lives have in memory."""
    theirs = told().keys()
    files = (path for path in Path(run.memory).rglob("*") if path.is_file())
    foreign = ("a" * 32, "b" * 32)
    return [path for path in files if str(path) not in theirs and not any(name in path.parts for name in foreign)]


def rounds(run: Run, place: Path, count: int) -> None:  # noqa: F811
    run = in_memory(replace(run, to_storage=RARELY, watched=True, epochs=count), place)
    run = replace(run, samples=STEPS_OF_EPOCH * 4 * run.ranks)
    root = Path(run.memory, "node_0") if run.replicas else Path(run.memory)
    root.mkdir(exist_ok=True)
    told = others(root, "c" * 32)
    before, taken, sizes, restored = told(), list[dict[str, int]](), list[tuple[int, int, int]](), list[int]()
    for _ in range(count):
        assert KILLED in live_ranks(replace(run, crash=("compute", STEPS_OF_LIFE + 1))), output(run)
        found = own(run, told)
        nbytes = [path.stat().st_size for path in found]
        sizes.append((len(found), sum(nbytes), max(nbytes, default=0)))
        taken.append(split_lives(events(run))[-1][0]["resources"])
        restored.append(split_lives(events(run))[-1][0]["step"] or 0)
    assert restored == sorted(restored), "no life goes on from before the one before it"
    assert restored[-1] >= count // 4, "the newest step may still be on its way into memory when its process dies"
    early = slice(1, 1 + count // 3)
    most, most_early = (tuple(map(max, zip(*part, strict=True))) for part in (sizes[1:], sizes[early]))
    assert most[0] <= most_early[0] + SLACK, "files"
    one_more_slot = most_early[2]  # which was being made when the process was killed
    assert most[1] <= most_early[1] + one_more_slot + FAULT_NBYTES * count * most[0], "bytes"
    for what, slack in (("descriptors", SLACK), ("threads", SLACK), ("resident", SLACK_BYTES)):
        assert max(each[what] for each in taken[1:]) <= max(each[what] for each in taken[early]) + slack, what
    run = replace(run, epochs=-(-(restored[-1] + STEPS_OF_LIFE) // STEPS_OF_EPOCH) + 1)
    assert live_ranks(run) == [0] * run.ranks, output(run)
    truth = replace(run, memory=None, watched=False, to_storage=1, replicas=0)
    for rank, logged in enumerate(undisturbed(truth)[1]):
        assert_same_losses(events(run, rank), logged)
    assert_store_sound(run, ended=True)
    assert shards_opened(f"{run.log}.opened") == [], "all tensors of all lives came from memory"
    assert own(run, told) == []
    assert told() == before


def test_twelve_rounds(place):  # noqa: F811
    rounds(DENSE, place, 12)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_three_hundred_rounds(layout, place):  # noqa: F811
    rounds(layout, place, 300)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=name, marks=[pytest.mark.slow] * (layout.ranks > 1)) for name, layout in LAYOUTS.items()],
)
def test_after_kill_9_no_tensor_is_read_from_storage(layout, place):  # noqa: F811
    """Every checkpoint is there, too: none of its shards is even opened."""
    run = in_memory(replace(layout, watched=True), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 9))), output(run)
    assert live_ranks(run) == [0] * run.ranks, output(run)
    assert split_lives(events(run))[-1][0]["step"] >= 7
    assert shards_opened(f"{run.log}.opened") == []


def test_without_memory_tensors_are_read_and_that_is_seen(place):  # noqa: F811
    """So the tests above can fail."""
    run = replace(in_memory(replace(DENSE, watched=True), place), memory=None)
    assert KILLED in live_ranks(replace(run, crash=("compute", 9))), output(run)
    assert live_ranks(run) == [0], output(run)
    assert len(shards_opened(f"{run.log}.opened")) > 2
