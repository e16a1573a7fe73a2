"""Lives that are really killed, one after the other: nothing grows, no files of others are touched, none are left."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from moe_ckpt.memory.arena import ARENA, COPIES
from moe_ckpt.memory.directory import RankDirectory, boot_id, make_rank_directory
from moe_ckpt.run.options import Settings
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_same_losses,
    assert_same_run,
    assert_store_sound,
    events,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    shards_read,
    split_lives,
    undisturbed,
)
from tests.integration.test_memory_kills import DENSE, in_memory
from tests.integration.test_memory_layouts import DDP, FSDP2
from tests.integration.test_memory_rarely_stored import RARELY
from tests.support.slots import create_slot

STEPS_OF_EPOCH, STEPS_OF_LIFE = 10, 3
"""A life of three steps leaves one more than the one before, however busy the machine: before training begins a
snapshot it waits until at most one of those before it is not sealed (``when_busy="wait"``, ``max_in_flight``), and when
one rank is killed after its backward pass, the others have begun all three, too."""
STRANGER = 4321
LAYOUTS = {"one": DENSE, "ddp": DDP, "fsdp2": FSDP2}
SLACK = 4
"""Of descriptors and threads: what is under way at the moment when they are counted."""
HEADER_NBYTES, FAULT_NBYTES = 1 << 10, 64
"""The most by which two headers differ but for the recoveries of the run, which they list; and for each of those."""
STATES_NBYTES = 1 << 20
"""Of plain states, at most."""
BUDGET = 1 << 30
"""Without it each life takes half of what is free when it begins, and how large slots are depends on that a little."""
SLACK_BYTES = 48 << 20
"""Of resident memory: libraries that one life happens to touch and another does not."""


def others(root: Path, mine: str) -> Callable[[], dict[str, tuple[int, int, bytes]]]:
    """Puts files of others beside the run's own, and returns what tells them: another run of this user, whose process
    is alive; one that waits for its restart; another user's; and something that is no run."""
    user = root / f"moe_ckpt-{os.geteuid()}"
    kept: list[RankDirectory] = []
    runs: list[Path] = []
    for run_id, lives in (("a" * 32, True), ("b" * 32, False)):
        held = make_rank_directory(str(root), run_id, 0, 0, "/another/store")
        runs.append(held.path.parent.parent)
        slot = create_slot(held.path / "slot_000", 4096)
        slot.seal(b"a header of another format")
        if lives:
            kept.append(held)
        else:
            owner = {"pid": 1, "host": "h", "boot_id": boot_id(), "store": "/another/store"}
            (held.path / "owner.json").write_text(json.dumps({**owner, "begun_unix_secs": time.time()}))
            held.release()
    stranger = root / f"moe_ckpt-{STRANGER}" / mine / "000000" / "rank_00000"
    stranger.mkdir(parents=True)
    (stranger / "copies").write_bytes(b"theirs")
    if os.geteuid() == 0:
        for path in (root / f"moe_ckpt-{STRANGER}", *root.glob(f"moe_ckpt-{STRANGER}/**/*")):
            os.chown(path, STRANGER, STRANGER)
    (user / "notes.txt").write_text("no run")
    (root / "sem.something").write_bytes(b"of another program")

    def told() -> dict[str, tuple[int, int, bytes]]:
        roots = [*runs, user / "notes.txt", root / f"moe_ckpt-{STRANGER}"]
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
    others_here = (path for path in files if str(path) not in theirs)
    return [path for path in others_here if not any(part.startswith(foreign) for part in path.parts)]


def most_left(run: Run) -> Counter[str]:
    """The most files, by their suffix, that a killed life may leave together with those before it, on all ranks.

    A life ends in the step after ``STEPS_OF_LIFE`` and saves all at each step. So it has made

    - a slot for each snapshot, or as many as the pool makes ahead of time: those in flight, and one more;
    - a copy of each snapshot of each rank that sends here, of which there are as many as ``replicas``;
    - under DDP, a small slot for the plain state of the newest step, beside that of the step before.

    When it began, it removed what had no header, and kept what it went on from: one snapshot, and the copies of it. A
    thread removes the others that were sealed, and may not have begun to when the process is killed.
    """
    kept = 1 + run.replicas
    made = max(STEPS_OF_LIFE, Settings().max_in_flight + 1) + STEPS_OF_LIFE * run.replicas
    slots, states = made + STEPS_OF_LIFE * kept + kept, 4 * (run.ranks > 1 and not run.sharded)
    lives = 3  # this one, the one before it, and one that was gone on from twice, since the one before sealed nothing
    being_sealed = kept + states // 4
    spare = 1  # the file of a header that was withdrawn, which the next one is written over
    of_lives = {"lock": lives, "owner.json": lives, ARENA: lives, COPIES: lives}
    most = {".head": slots + states, ".tmp": being_sealed + spare, ".starts": kept}
    return Counter({kind: number * run.ranks for kind, number in (most | of_lives).items()})


def kinds_of(sizes: dict[Path, int]) -> Counter[str]:
    """How many files there are, as ``most_left`` names them."""
    return Counter(path.name if path.suffix in ("", ".json") else path.suffix for path in sizes)


def assert_no_more_is_left(run: Run, found: list[dict[Path, int]]) -> None:
    """Each round left no more files than ``most_left``, and no more bytes than those take.

    Args:
        found: Of each round, the size of each file.
    """
    arena_nbytes, most = max(nbytes for path, nbytes in found[0].items() if path.name == ARENA), most_left(run)
    headers = [max((sizes[path] for path in sizes if path.suffix == ".head"), default=0) for sizes in found]
    header_nbytes = next(filter(None, headers)) + HEADER_NBYTES + FAULT_NBYTES * len(found)
    most_nbytes = (most[ARENA] + most[COPIES] * run.replicas) * 2 * arena_nbytes + most[".head"] * header_nbytes
    most_nbytes += most[COPIES] * STATES_NBYTES
    for number, sizes in enumerate(found):
        assert kinds_of(sizes) <= most, f"files that round {number} left"
        assert headers[number] <= header_nbytes, f"a header that round {number} left"
        assert max(sizes.values()) <= 2 * arena_nbytes, f"memory that round {number} left"
        assert sum(sizes.values()) <= most_nbytes, f"bytes that round {number} left"


def rounds(run: Run, place: Path, count: int) -> None:  # noqa: F811
    run = in_memory(replace(run, to_storage=RARELY, watched=True, epochs=count), place)
    run = replace(run, samples=STEPS_OF_EPOCH * 4 * run.ranks, callback={**run.callback, "host_memory_bytes": BUDGET})
    root = Path(run.memory, "node_0") if run.replicas else Path(run.memory)
    root.mkdir(exist_ok=True)
    told = others(root, "c" * 32)
    before, found, restored = told(), list[dict[Path, int]](), list[int]()
    taken: list[list[dict[str, int]]] = [[] for _ in range(run.ranks)]
    for _ in range(count):
        assert KILLED in live_ranks(replace(run, crash=("compute", STEPS_OF_LIFE + 1))), output(run)
        found.append({path: path.stat().st_size for path in own(run, told)})
        for rank, each in enumerate(taken):
            each.append(split_lives(events(run, rank))[-1][0]["resources"])
        restored.append(split_lives(events(run))[-1][0]["step"] or 0)
    assert all(one < other for one, other in pairwise(restored)), f"a life left no new step: {restored}"
    assert restored[-1] >= count - 1
    assert_no_more_is_left(run, found)
    early = slice(1, 1 + count // 3)
    for what, slack in (("descriptors", SLACK), ("threads", SLACK), ("resident", SLACK_BYTES)):
        for rank, each in enumerate(taken):
            assert len(each) == count
            most, at_first = (max(one[what] for one in some) for some in (each[1:], each[early]))
            assert most <= at_first + slack, f"{what} of rank {rank}"
    run = replace(run, epochs=-(-(restored[-1] + STEPS_OF_LIFE) // STEPS_OF_EPOCH) + 1)
    assert live_ranks(run) == [0] * run.ranks, output(run)
    truth = replace(run, memory=None, watched=False, to_storage=1, replicas=0)
    for rank, logged in enumerate(undisturbed(truth)[1]):
        assert_same_losses(events(run, rank), logged)
    assert_store_sound(run, ended=True)
    assert shards_read(run) == [[]] * run.ranks, "all tensors of all lives came from memory"
    assert own(run, told) == []
    assert told() == before


def test_twelve_rounds(place):  # noqa: F811
    rounds(DENSE, place, 12)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_six_rounds_of_several_ranks(layout, place):  # noqa: F811
    rounds(layout, place, 6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_three_hundred_rounds(layout, place):  # noqa: F811
    rounds(layout, place, 300)


every_layout = pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=name, marks=[pytest.mark.slow] * (layout.ranks > 1)) for name, layout in LAYOUTS.items()],
)


@every_layout
def test_after_kill_9_no_tensor_is_read_from_storage(layout, place):  # noqa: F811
    """Every checkpoint is there, too: no rank even opens one of its shards."""
    run = in_memory(replace(layout, watched=True), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 9))), output(run)
    assert live_ranks(run) == [0] * run.ranks, output(run)
    assert split_lives(events(run))[-1][0]["step"] >= 7
    assert shards_read(run) == [[]] * run.ranks
    assert_same_run(run)


@every_layout
def test_without_memory_tensors_are_read_and_that_is_seen(layout, place):  # noqa: F811
    """So the tests above can fail, on every rank."""
    run = replace(in_memory(replace(layout, watched=True), place), memory=None)
    assert KILLED in live_ranks(replace(run, crash=("compute", 9))), output(run)
    assert live_ranks(run) == [0] * run.ranks, output(run)
    assert all(shards_read(run))
