"""Slots are there when the first snapshots of a start begin: training does not wait while the kernel clears pages."""

from __future__ import annotations

import threading
import time

import pytest

from moe_ckpt.engine import early_slots
from moe_ckpt.engine.buffers import HostBufferPool
from moe_ckpt.engine.early_slots import EarlySlots
from moe_ckpt.engine.host_buffer import roomy
from moe_ckpt.errors import MemoryFullError
from moe_ckpt.memory.files import FoundSlot, MemoryFiles
from moe_ckpt.memory.slot import Slot
from moe_ckpt.policies import Dense, MoC
from tests.support.deleting import delete_tree
from tests.support.replicas import header_of
from tests.unit.engine_parts import ALL
from tests.unit.test_engine_host_tier import assert_state, come_back
from tests.unit.test_engine_memory import life, no_memory_of_other_tests, slots, where  # noqa: F401 - fixtures


@pytest.fixture
def made(monkeypatch) -> list[tuple[str, int]]:
    """(thread, bytes) of each slot that is made."""
    found: list[tuple[str, int]] = []
    create = Slot.create.__func__

    def recorded(cls, path, nbytes):
        found.append((threading.current_thread().name, nbytes))
        time.sleep(0.02)  # whoever does not wait for it is found to be early
        return create(cls, path, nbytes)

    monkeypatch.setattr(Slot, "create", classmethod(recorded))
    return found


def on_training_thread(made) -> list[tuple[str, int]]:
    return [each for each in made if each[0] == threading.current_thread().name]


@pytest.mark.parametrize("policy", [Dense(), MoC(k=1)], ids=["all at each step", "partial later"])
def test_the_first_slot_of_a_run_is_not_made_by_training(where, made, policy):  # noqa: F811
    with life(where, policy) as first:
        first.session.training_begins()
        first.go(1)
        assert made
        assert on_training_thread(made) == []


def test_slots_of_all_later_steps_are_there_too(where, made):  # noqa: F811
    with life(where) as first:
        first.session.training_begins()
        first.go(6, settle=True)
        assert on_training_thread(made) == []
        assert len(made) == 3, "as many as there are in the steady state"


def train_and_fail(where, steps=6):  # noqa: F811
    with life(where) as first:
        first.session.training_begins()
        first.go(steps, settle=True)


def test_slots_that_an_earlier_start_left_are_used_again(where, made):  # noqa: F811
    train_and_fail(where)
    left = slots(where[1])
    assert len(left) > 1
    inodes = {path.with_suffix(".data").stat().st_ino for path in left}
    made.clear()
    with life(where) as second:
        come_back(second)
        assert_state(second, dict.fromkeys(ALL, 6))
        second.go(1, settle=True)
        assert on_training_thread(made) == []
        now = {path.with_suffix(".data").stat().st_ino: path for path in slots(where[1])}
        assert inodes & {node for node, path in now.items() if second.session.tier.files.path in path.parents}
        second.go(3, settle=True)
        assert on_training_thread(made) == []
    with life(where) as third:
        come_back(third)
        assert_state(third, dict.fromkeys(ALL, 10))


def test_after_a_start_from_storage_training_makes_no_slot(where, made):  # noqa: F811
    train_and_fail(where)
    delete_tree(where[1])
    where[1].mkdir()
    made.clear()
    with life(where) as second:
        come_back(second)
        second.go(4, settle=True)
        assert made
        assert on_training_thread(made) == []


# --- what is made ahead, and what becomes of it ---


@pytest.fixture
def files(tmp_path):
    found = MemoryFiles(str(tmp_path), "a" * 32, 1, "life", 0, "/a/store")
    yield found
    found.close(keep=False)


def sizes(files: MemoryFiles) -> list[int]:
    return sorted(path.stat().st_size for path in files.path.glob("*.data"))


@pytest.mark.parametrize("needed", [5000, 2000])
def test_what_turns_out_too_large_is_cut(files, needed):
    pool = HostBufferPool(1 << 20, make_slot=files.make)
    assert pool.foresee(5000, 6000, 1)
    assert not pool.foresee(5000, 6000, 1), "there is one"
    buffer = pool.acquire(needed)
    assert sizes(files) == [buffer.nbytes] == [pool.held_bytes] == [roomy(needed)]
    buffer.memory.fill_(7)
    assert (files.path / f"{buffer.slot.path.name}.data").read_bytes() == b"\7" * buffer.nbytes


def test_what_turns_out_too_small_is_given_up(files):
    pool = HostBufferPool(1 << 20, make_slot=files.make)
    assert pool.foresee(5000, 6000, 1)
    buffer = pool.acquire(9000)
    assert sizes(files) == [buffer.nbytes] == [pool.held_bytes]


@pytest.mark.parametrize(("budget", "made"), [(12_400, 2), (12_000, 1), (5999, 0)])
def test_nothing_is_foreseen_beyond_the_budget(files, budget, made):
    pool = HostBufferPool(budget, make_slot=files.make)
    assert [pool.foresee(5000, 6144, 2) for _ in range(3)] == [True] * made + [False] * (3 - made)
    assert len(sizes(files)) == made


def left_of(files: MemoryFiles, tmp_path) -> list[FoundSlot]:
    """A slot that the life before left, of 5,000 bytes."""
    life = MemoryFiles(str(tmp_path), "a" * 32, 0, "before", 0, "/a/store")
    slot = life.make(5000)
    slot.seal(header_of(slot, 5000, step=3, generation=0, rank=0))
    life.close(keep=True)
    return files.take_left(own=True)


@pytest.mark.parametrize(
    ("budget", "free", "is_taken"), [(5000, 5000, True), (4999, 1 << 30, False), (1 << 20, 4999, False)]
)
def test_an_earlier_slot_is_taken_over_within_budget_and_room(files, tmp_path, monkeypatch, budget, free, is_taken):
    monkeypatch.setattr(early_slots, "free_bytes", lambda path: free)
    pool = HostBufferPool(budget, make_slot=files.make)
    found = left_of(files, tmp_path)
    rest = EarlySlots(0, files, pool).take_over(found)
    assert rest == ([] if is_taken else found)
    assert sizes(files) == ([5000] if is_taken else [])
    assert not list(files.path.glob("*.head")), "nobody takes its bytes for a checkpoint"
    if is_taken:
        assert pool.warm_up()
        assert pool.acquire(4800).slot is found[0].slot


def test_slots_of_other_ranks_are_not_taken_over(files, tmp_path):
    found = left_of(files, tmp_path)
    pool = HostBufferPool(1 << 20, make_slot=files.make)
    assert EarlySlots(1, files, pool).take_over(found) == found


def test_where_room_is_scarce_nothing_is_made_early(files, monkeypatch):
    monkeypatch.setattr(early_slots, "free_bytes", lambda path: 9999)
    early = EarlySlots(0, files, HostBufferPool(1 << 20))
    with pytest.raises(MemoryFullError, match="9,999 bytes free"):
        early.make(5000)
    assert sizes(files) == []
