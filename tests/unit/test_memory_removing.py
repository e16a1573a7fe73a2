"""Slots that are let go of: gone for later lives at once, and their room when it is needed."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from moe_ckpt.errors import MemoryFullError
from moe_ckpt.memory import mapping
from moe_ckpt.memory import slot as slot_module
from moe_ckpt.memory.arena import COPIES, Arena
from moe_ckpt.memory.files import FoundSlot, MemoryFiles
from moe_ckpt.memory.slot import Slot
from moe_ckpt.storage.local import free_bytes
from tests.support.limits import small_file_systems
from tests.support.mapped import deleted_slots
from tests.support.replicas import header_of
from tests.support.slots import create_slot

NBYTES = 4096


@pytest.fixture
def files(tmp_path: Path):
    found = MemoryFiles(str(tmp_path), "a-run", 1, "a-life", 0, "a-store")
    yield found
    found.close(keep=False)


@pytest.fixture
def let_go(monkeypatch) -> threading.Event:
    """Until it is set, the kernel is busy with the pages of what is deleted."""
    event, remove = threading.Event(), slot_module.remove_files

    def slow(path: Path) -> bool:
        event.wait()
        return remove(path)

    monkeypatch.setattr(slot_module, "remove_files", slow)
    yield event
    event.set()


def sealed(files: MemoryFiles) -> FoundSlot:
    slot = files.make(NBYTES)
    slot.seal(header_of(slot, NBYTES, step=1, generation=1, rank=0))
    return FoundSlot(*Slot.open(slot.path))


def test_a_forked_child_keeps_no_slot_that_its_parent_deletes(files):
    """As a data loader's workers, which live as long as the training."""
    found, held = sealed(files), files.make(NBYTES)
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=time.sleep, args=(60,))
    child.start()
    held.memory.fill_(7)
    looking = fork.Process(target=lambda: sys.exit(int(held.memory.sum()) + int(held.memory.fill_(1).sum() == NBYTES)))
    looking.start()
    looking.join()
    assert looking.exitcode == 1, "zeros, which may be written over"
    assert int(held.memory.sum()) == 7 * NBYTES
    try:
        files.remove([found])
        held.remove()
        files.wait_removed()
        (files.path / COPIES).unlink()
        assert deleted_slots(files.path), "this process holds it"
        assert not deleted_slots(files.path, child.pid)
        descriptors = [os.readlink(each) for each in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert not [path for path in descriptors if path.startswith(str(files.path)) and COPIES in path]
    finally:
        child.kill()
        child.join()


def test_nobody_comes_back_to_what_is_let_go_of_and_nobody_waits_for_it(files, let_go):
    found = [sealed(files), sealed(files)]
    files.remove(found)
    assert found == []
    assert not list(files.path.glob("*.head"))
    let_go.set()
    files.wait_removed()
    assert not list(files.path.glob("copy_*"))


def test_who_finds_no_room_waits_for_what_is_being_deleted(files, let_go, monkeypatch):
    found = [sealed(files)]
    old, grow, tries = found[0].slot.path.with_suffix(".starts"), Arena.grow, []
    old.touch()

    def full(arena: Arena, end: int, **how: Any) -> bool:
        tries.append(end)
        let_go.set()
        if len(tries) == 1 or old.exists():
            raise MemoryFullError(str(arena.path), end, 0)
        return grow(arena, end, **how)

    files.remove(found)
    monkeypatch.setattr(Arena, "grow", full)
    assert files.make(2 * NBYTES).memory.numel() == 2 * NBYTES
    assert len(tries) == 2


def test_no_room_is_an_error_where_nothing_is_being_deleted(files, monkeypatch):
    def full(arena: Arena, end: int, **how: Any) -> bool:
        raise MemoryFullError(str(arena.path), end, 0)

    monkeypatch.setattr(Arena, "grow", full)
    with pytest.raises(MemoryFullError):
        files.make(NBYTES)


def test_nothing_to_delete_takes_no_thread(files, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("one was started"))
    files.remove([])


def test_a_slot_that_is_too_large_takes_nothing_from_others(files, monkeypatch):
    """The kernel would take all that is free first, and give it back."""
    monkeypatch.setattr(mapping.Pages, "_touch", lambda *_: pytest.fail("pages were taken"))
    free = shutil.disk_usage(files.path).free
    with pytest.raises(MemoryFullError):
        files.make(2 * free)
    assert (files.path / COPIES).stat().st_size == 0


def test_a_slot_is_reserved_piece_by_piece_so_that_signals_cost_little_of_it(files, monkeypatch):
    """Some kernels give back what a call has reserved when a signal comes, and Python begins it again."""
    touch, asked = mapping.Pages._touch, []
    monkeypatch.setattr(mapping.Pages, "_touch", lambda *args: (asked.append(args[1:]), touch(*args)))
    nbytes = (128 << 20) + 1000
    made = files.make(nbytes)
    assert [end - begin for begin, end in asked[:-1]] == [64 << 20] * 2
    assert 0 < asked[-1][1] - asked[-1][0] < 64 << 20
    assert os.stat(files.path / COPIES).st_blocks * 512 >= made.memory.numel() == nbytes


def test_a_tmpfs_without_a_limit_is_not_full(tmp_path):
    with small_file_systems(0, tmp_path):
        assert os.statvfs(tmp_path).f_blocks == 0
        assert free_bytes(str(tmp_path)) == sys.maxsize
        assert create_slot(tmp_path / "slot_000", 4096).memory.numel() == 4096


# --- what the arena of an earlier life may be used for ---


def left_by_a_life(root: Path) -> bytes:
    """Header of a copy that a life before has sealed there."""
    before = MemoryFiles(str(root), "b" * 32, 0, "before", 0, "/a/store")
    found = sealed(before)
    header = found.slot.path.with_suffix(".head").read_bytes()
    before.close(keep=True)
    return header


def test_nothing_is_made_once_the_next_life_may_have_the_directory(tmp_path):
    """A thread that receives a copy may be late: it would take the next life's rooms for free."""
    life = MemoryFiles(str(tmp_path), "b" * 32, 0, "before", 0, "/a/store")
    life.make(NBYTES)
    life.close(keep=True)
    with pytest.raises(OSError, match="is closed"):
        life.make(NBYTES)


def test_an_arena_that_somebody_deletes_is_not_linked_again_over_slots_of_the_life_before(tmp_path):
    left_by_a_life(tmp_path)
    life = MemoryFiles(str(tmp_path), "b" * 32, 1, "now", 0, "/a/store")
    left = life.take_left(same_rank=True)
    life.open_arena(1 << 20)
    [found] = life.adopt(left)
    before = found.slot.memory.clone()
    (life.path / COPIES).unlink()
    life.make(NBYTES).memory.fill_(7)
    assert bool((found.slot.memory == before).all())
    life.close(keep=False)


def test_a_slot_that_could_not_be_opened_keeps_its_bytes(tmp_path, monkeypatch):
    """For want of a descriptor, for instance: its header stays."""
    left_by_a_life(tmp_path)
    life = MemoryFiles(str(tmp_path), "b" * 32, 1, "now", 0, "/a/store")
    with monkeypatch.context() as patched:
        patched.setattr(Slot, "open", lambda path: (_ for _ in ()).throw(OSError("too many open files")))
        assert life.take_left(same_rank=True) == []
    life.open_arena(1 << 20)
    life.make(NBYTES).memory.fill_(7)
    [path] = (path for path in tmp_path.rglob("*.head") if life.path not in path.parents)
    found, header = Slot.open(path)
    [first, *_] = header.slices(header.parts[0], "")
    data = found.memory[first.begin : first.end].numpy().data
    assert xxhash.xxh3_64_intdigest(data) == first.checksum
    life.close(keep=False)


def test_a_slot_is_never_sealed_in_a_directory_that_does_not_say_whose_it_is(files, monkeypatch):
    files.make(100)
    files._own.is_described = False
    (files.path / "owner.json").unlink()
    files.make(100)
    assert (files.path / "owner.json").exists()


def test_a_sealed_slot_keeps_no_file_open(files):
    """A gradient log has hundreds, and a process may have a thousand files open."""
    one = sealed(files)
    before = len(os.listdir("/proc/self/fd"))
    slots = [Slot.open(one.slot.path) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(header.nbytes == NBYTES for _, header in slots)
