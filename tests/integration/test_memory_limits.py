"""Under a real limit of a memory cgroup, and on a tmpfs that somebody else fills: an error or fewer copies, no kill."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    LIFE_SECS,
    assert_same_run,
    events,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    start,
)
from tests.integration.test_memory_kills import DENSE, in_memory, left, small  # noqa: F401 - a fixture
from tests.integration.test_memory_layouts import CASES, PAIRED, POLICIES, lose
from tests.integration.test_memory_rarely_stored import RARELY, restored
from tests.support.deleting import delete_tree
from tests.support.limits import Cgroup, fill, memory_cgroup, small_file_systems
from tests.support.waiting import retry_until

LARGE = replace(DENSE, model={"layers": 2, "experts": 2048}, samples=24, epochs=1)
LAYOUTS = {"ddp": {"ranks": 2, "replicas": 1}, "fsdp2": {"ranks": 2, "replicas": 1, "sharded": True}}
"""Each rank is a node."""
EXACT = LAYOUTS | {
    f"{layout}-{policy}": {**LAYOUTS[layout], **POLICIES[policy], "samples": 48, "epochs": 1}
    for layout, policy in (name.split("-", 1) for name in PAIRED)
}
"""Dense at each step where no policy is named."""


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    with memory_cgroup() as group:
        yield group


@pytest.fixture
def tmp_path_on_disk() -> Iterator[Path]:
    """``tmp_path`` lies in memory, which would count."""
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_", dir="/var/tmp") as directory:
        yield Path(directory)


def live_in(group: Cgroup, run: Run) -> int:
    """Exit code of one life in a cgroup: of the first rank that does not end well."""
    return max(live_ranks(run, cgroup=group.path), key=abs)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, RARELY])
@pytest.mark.parametrize("slots", [0.5, 1.5, 2.5, 4])
def test_a_limit_is_an_error_or_fewer_copies_and_never_a_kill(slots, every, cgroup, place, tmp_path_on_disk):  # noqa: F811
    """The limit leaves room for so many snapshots, as the run is told, beside training with a single checkpoint.

    The store is on a disk, whose cache makes room.
    """
    nbytes = state_nbytes(place)
    never = {"policy": ("dense", 1000)}
    alone = placed(replace(LARGE, **never), tmp_path_on_disk, "alone")
    assert live_in(cgroup, alone) == 0, output(alone)
    bare = cgroup.peak
    told = {"when_busy": "wait", "host_memory_bytes": int(slots * nbytes)}
    run = in_memory(replace(LARGE, to_storage=every, callback=told), place)
    run = replace(run, store=str(tmp_path_on_disk / "store"))
    cgroup.limit(bare + int(slots * nbytes))
    code = live_in(cgroup, run)
    assert cgroup.kills == 0
    assert code in (0, 1), output(run)
    assert (code == 1) == (slots < 1), output(run)
    if code == 1:
        assert "HostMemoryError" in output(run)
    else:
        assert_same_run(run)
        assert left(run) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "layout"),
    [
        pytest.param(room, layout, id=f"{room}-{name}")
        for name, layout in EXACT.items()
        for room in ((9, 40) if name in LAYOUTS else (16, 40))
    ],
)
def test_copies_that_a_limit_has_no_room_for_are_refused(room, layout, cgroup, place, tmp_path_on_disk):  # noqa: F811
    """Both nodes' ranks are under one limit, which leaves room for so many snapshots, and each may take four for
    its own; the copies of its peer come on top, and what other policies than Dense take beside: up to four more."""
    nbytes = state_nbytes(place) / (2 if "sharded" in layout else 1)
    told = {"when_busy": "wait", "host_memory_bytes": int(4 * nbytes)}
    run = in_memory(replace(LARGE, **layout, to_storage=RARELY, callback=told), place)
    alone = placed(replace(run, memory=None, replicas=0, policy=("dense", 1000), options={}), tmp_path_on_disk, "alone")
    assert live_in(cgroup, alone) == 0, output(alone)
    run = replace(run, store=str(tmp_path_on_disk / "store"))
    cgroup.limit(cgroup.peak + int(room * nbytes))
    code = live_in(cgroup, run)
    assert cgroup.kills == 0
    assert code == 0, output(run)
    refused = "has no room for the copy of step" in output(run)
    assert refused == (room == 9) or room == 16, "either may be"
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("room", [48 << 20, 1 << 30], ids=["none", "enough"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_survivors_have_no_room_for_under_a_limit_is_said(room, layout, cgroup, place):  # noqa: F811
    """The limit leaves so much beside training that ends by an error; what ranks seal then comes on top."""
    told = {"host_memory_bytes": 1 << 30}
    run = replace(LARGE, **{**layout, "replicas": 0}, policy=("dense", 1000), samples=80, callback=told)
    run = replace(run, model={"layers": 2, "experts": 4096})
    (place / "bare").mkdir()
    bare = placed(replace(run, crash=("raise", 8)), place / "bare")
    assert live_ranks(bare, cgroup=cgroup.path) == [1, 1], output(bare)
    delete_tree(place / "bare")
    cgroup.limit(cgroup.peak + room)
    run = in_memory(run, place)
    codes = live_ranks(replace(run, crash=("raise", 8)), cgroup=cgroup.path)
    assert cgroup.kills == 0, (codes, output(run))
    assert codes == [1, 1], output(run)
    words = Path(f"{run.log}.txt").read_text()
    assert ("could not keep step 7 in memory: MemoryFullError" in words) == (room < 100 << 20), words[-6000:]
    assert ("keeps its state of step 7 in memory" in words) == (room > 100 << 20), words[-6000:]
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == (7 if room > 100 << 20 else None)
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.quick("fsdp2-wait")
@pytest.mark.parametrize("when_busy", ["wait", "skip"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_budget_of_two_snapshots_is_enough_for_several_ranks(layout, when_busy, place):  # noqa: F811
    """Ranks learn a step late what the others have. So memory must hold one more, or they have to wait for that."""
    run = in_memory(replace(DENSE, **layout, to_storage=RARELY, callback={"host_memory_bytes": 1000}), place)
    assert live_ranks(run) != [0, 0]
    nbytes = [int(found.replace(",", "")) for found in re.findall(r"needs ([\d,]+) bytes of host memory", output(run))]
    told = {"when_busy": when_busy, "host_memory_bytes": 2 * max(nbytes)}
    (place / "two").mkdir()
    run = in_memory(replace(run, callback=told), place / "two")
    assert KILLED in live_ranks(replace(run, crash=("compute", 9))), output(run)
    lose(run, 1)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) >= (6 if when_busy == "wait" else 2), "of memory, for storage has the first one only"
    assert_same_run(run)
    assert left(run) == []


def state_nbytes(place: Path) -> int:  # noqa: F811
    """Of what one snapshot holds, a little rounded up."""
    (place / "size").mkdir()
    run = in_memory(replace(LARGE, samples=8, epochs=1), place / "size")
    assert live(run) == 0, output(run)
    files = list(Path(run.store).glob("step_*/*.safetensors"))
    return max(sum(f.stat().st_size for f in step.iterdir()) for step in {file.parent for file in files})


@pytest.fixture
def nodes(request, tmp_path) -> Iterator[Path]:
    """Two nodes below a directory, each with a tmpfs of so many bytes."""
    with small_file_systems(request.param, tmp_path / "node_0", tmp_path / "node_1"):
        yield tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [64 << 20], indirect=True)
@pytest.mark.parametrize("layout", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("experts", [2048, 4096], ids=["one snapshot fits", "none does"])
def test_dev_shm_of_containers_that_are_nodes(experts, layout, nodes, place):  # noqa: F811
    """64 MB each. The copy of a peer finds no room beside its own snapshots; what there was room for is of use."""
    run = replace(LARGE, model={"layers": 2, "experts": experts}, **layout)
    run = replace(placed(run, place), memory=str(nodes))
    assert KILLED in live_ranks(replace(run, crash=("compute", 3))), output(run)
    assert live_ranks(run) == [0, 0], output(run)
    assert "bytes free, and the slots of this node's ranks" in output(run), "before training"
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1 << 20], indirect=True)
@pytest.mark.parametrize(
    ("full", "name"),
    [(full, name) for full in ((0,), (0, 1)) for name in LAYOUTS]
    + [((at % 2,), name) for at, name in enumerate(PAIRED)],
)
def test_nodes_that_are_full_in_mid_run_cost_memory_and_not_the_run(full, name, nodes, place):  # noqa: F811
    """Somebody else takes all of it while the run trains; then a rank is killed, and all start again."""
    run = replace(placed(replace(CASES[name], samples=320, epochs=2), place), memory=str(nodes))
    filler = threading.Thread(target=fill_after, args=(run, 5, [nodes / f"node_{node}" for node in full]))
    filler.start()
    codes = live_ranks(replace(run, crash=("compute", 50)))
    filler.join()
    assert KILLED in codes, output(run)
    assert len(events(run)) > 20, "it went on beside the full file systems"
    assert live_ranks(run) == [0, 0], output(run)
    assert_same_run(run)
    assert {path.name for path in left(run)} <= {"filler"}


def fill_after(run: Run, lines: int, directories: list[Path]) -> None:
    """Once the run's log has so many lines."""
    retry_until(lambda: len(events(run)) > lines)
    for directory in directories:
        fill(directory)


@pytest.mark.slow
@pytest.mark.parametrize("small", [64 << 20], indirect=True)
@pytest.mark.parametrize("experts", [2048, 4096], ids=["one snapshot fits", "none does"])
def test_dev_shm_of_a_container_and_a_larger_model(experts, small, place):  # noqa: F811
    """64 MB, as Docker gives unless it is told otherwise: snapshots of 38 and 75 MB."""
    run = replace(LARGE, model={"layers": 2, "experts": experts})
    run = replace(placed(run, place), memory=str(small))
    assert live(replace(run, crash=("compute", 5))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert "bytes free, but a snapshot of this rank needs" in output(run), output(run)
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.parametrize("small", [1 << 20], indirect=True)
def test_a_start_on_a_tmpfs_without_a_free_page_makes_room_of_what_the_run_left(small, place):  # noqa: F811
    """Somebody else has all the rest. Nobody has to free anything by hand, and memory gets on, though single snapshots
    may lie in private memory: headers take pages of the arena's end."""
    run = replace(placed(replace(DENSE, samples=80, to_storage=RARELY), place), memory=str(small))
    for reached in (0, 6):
        assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
        assert reached == 0 or restored(run) >= reached, output(run)
        fill(small)
        assert os.statvfs(small).f_bavail == 0
    assert live(run) == 0, output(run)
    assert restored(run) >= 12, output(run)
    assert_same_run(run)
    assert [path.name for path in left(run)] == ["filler"]


@pytest.mark.parametrize("small", [1 << 20], indirect=True)
def test_a_tmpfs_that_is_full_in_mid_run_costs_memory_and_not_the_run(small, place):  # noqa: F811
    """Somebody else takes all of it while the run trains; when it dies it has what it had before, or storage."""
    run = replace(placed(replace(DENSE, samples=160), place), memory=str(small))
    process = start(run)
    try:
        retry_until(lambda: len(events(run)) > 4 or not process.is_alive())
        fill(small)
        process.join(LIFE_SECS)
        assert process.exitcode == 0, output(run)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    assert_same_run(run)
    assert [path.name for path in left(run)] == ["filler"]
