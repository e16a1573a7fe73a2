"""Slots that are verified ahead of time: what is sound is not read again, and what is damaged is still found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moe_ckpt.memory.files import FoundSlot
from moe_ckpt.memory.left_slots import SlotChecker
from moe_ckpt.memory.slot import Slot
from moe_ckpt.reading import slices as reading
from tests.support.replicas import bytes_of, header_of
from tests.support.slots import create_slot
from tests.support.spoiled import slots_of, spoil_slot
from tests.support.waiting import retry_until
from tests.unit.test_engine_memory_only import (
    make_nodes,
    no_memory_of_other_tests,  # noqa: F401 - a fixture
    replicated,
    where,  # noqa: F401 - a fixture
)

_NBYTES = 1 << 20


def found(directory: Path, step: int) -> FoundSlot:
    """A slot of that step."""
    slot = create_slot(directory / f"slot_{step:03d}", _NBYTES)
    slot.memory[:] = bytes_of(0, step, _NBYTES)
    slot.seal(header_of(slot, _NBYTES, step=step, generation=1, rank=0))
    return FoundSlot(*Slot.open(slot.path))


def flipped(slot: FoundSlot) -> FoundSlot:
    slot.slot.memory[_NBYTES // 3] ^= 16
    return slot


def test_every_bit_counts(tmp_path):
    good, bad = found(tmp_path, 3), flipped(found(tmp_path, 4))
    checker = SlotChecker([bad, good])
    retry_until(lambda: all(check.done() for check in checker._checks.values()))
    assert [checker.is_sound(each) for each in (bad, good)] == [False, True]
    checker.close()


def test_a_header_that_is_none_says_nothing(tmp_path):
    slot = found(tmp_path, 3)
    [part] = slot.header.parts[:1]
    broken = FoundSlot(slot.slot, replace(slot.header, parts=(replace(part, raw=part.raw[:-9]),)))
    checker = SlotChecker([broken])
    assert not checker.is_sound(broken)
    checker.close()


def test_what_nobody_wants_any_more_is_let_go_of(tmp_path):
    """Whoever removes a slot gets its memory back: the thread keeps none of it."""
    slots = [found(tmp_path, step) for step in (3, 4)]
    checker = SlotChecker(slots)
    checker.only(slots[:1])
    assert not checker.is_sound(slots[1])
    checker.close()
    assert not checker.is_sound(slots[0])
    checker.close()


def read_by(monkeypatch, is_sound: Callable[[SlotChecker, FoundSlot], bool], where, nodes) -> Counter[tuple[int, str]]:  # noqa: F811
    """(rank, path) -> slices that it read to verify them in a return."""
    found: Counter[tuple[int, str]] = Counter()
    plain = reading._check_run

    def check(storage, run):
        found[storage.inner.comm.rank, run[0].path] += len(run)
        return plain(storage, run)

    with monkeypatch.context() as patched:
        patched.setattr(SlotChecker, "is_sound", is_sound)
        patched.setattr(reading, "_check_run", check)
        assert replicated(where, nodes, again=True, steps=1)[0][1] == "memory"
    return found


def test_a_return_reads_no_slice_again_that_was_found_sound(where, tmp_path, monkeypatch):  # noqa: F811
    """All ranks hold all tensors, and read what others wrote from the copies; their own shares they know."""
    plain = SlotChecker.is_sound

    def awaited(self, slot):
        retry_until(lambda: slot not in self._checks or self._checks[slot].done())  # it may not have begun
        return plain(self, slot)

    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes)
    ahead = read_by(monkeypatch, awaited, where, nodes)
    assert ahead
    assert not [path for rank, path in ahead if f"rank_{rank:05d}" in path]


def test_without_that_every_slice_is_read(where, tmp_path, monkeypatch):  # noqa: F811
    """So the test above can fail."""
    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes)
    found = read_by(monkeypatch, lambda self, slot: False, where, nodes)
    assert [path for rank, path in found if f"rank_{rank:05d}" in path]


def test_damage_is_found_whether_the_slot_was_verified_ahead_or_not(where, tmp_path):  # noqa: F811
    """And its copy is taken."""
    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes)
    for path in slots_of(nodes[0], 0):
        spoil_slot(path, "flip")
    assert replicated(where, nodes, again=True, steps=1)[0][1] == "memory"
    assert len(list(nodes[0].rglob("*.damaged"))) == 0, "the run has ended, and left nothing"
