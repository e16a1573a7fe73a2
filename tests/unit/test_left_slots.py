"""What earlier lives left in memory, once it is known what the run goes on from."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

from moe_ckpt.memory.files import FoundSlot
from moe_ckpt.memory.left_slots import LeftSlots


def test_who_deletes_slots_is_the_last_to_know_them():
    """The pages go where the last reference does: not on the training thread, which this is."""
    known: list[weakref.ref[FoundSlot]] = []

    def delete(found: list[FoundSlot]) -> None:
        while found:
            known.append(weakref.ref(found.pop()))
            assert known[-1]() is None

    left = LeftSlots([_found(at) for at in range(3)], delete)
    used = left.slots[0]
    left.keep([used])
    assert len(known) == 2
    assert left.slots == (used,)


def _found(number: int) -> FoundSlot:
    return FoundSlot(SimpleNamespace(path=f"slot_{number}"), SimpleNamespace(step=number, generation=0))


def test_no_slot_is_held_that_was_deleted():
    """Also one whose start was to be noted for long: its memory could never be used again."""
    left = LeftSlots([_found(at) for at in range(3)], lambda slots: slots.clear())
    slots = [weakref.ref(slot) for slot in left.slots]
    for slot in left.slots:
        slot.slot.note_start = lambda: None
        left.note_start(slot, lasting=True)
    del slot
    left.keep([left.slots[0]])
    assert [slot() is None for slot in slots] == [False, True, True]
    left.remove()
    assert slots[0]() is None
