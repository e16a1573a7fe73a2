"""Slots that earlier lives of the run left in this rank's memory, from the start of this life until it has its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from moe_ckpt.memory.checking import SlotChecker
from moe_ckpt.memory.files import FoundSlot, newest_first


class LeftSlots:
    """Owns these slots. ``remove`` may be called on any thread, the rest on the training thread.

    Counts starts, too: one that resumes from a slot is noted there (``Slot.note_start``) until it gets somewhere. A
    start that is killed in a replay counts for nothing, since a replay takes long; one whose replay diverges does. What
    ranks kept of the newest step counts each start in which only some go back, until a step ends: whether such a one
    diverged is known to those that went back alone.

    Args:
        found: The slots, which this process owns now, the newest first.
        delete: Deletes slots in the background, and empties the list (``MemoryFiles.remove``).
        likely: Those of them that the run most likely resumes from, which are verified ahead of time.

    Attributes:
        checker: Verifies them.
    """

    def __init__(
        self,
        slots: Sequence[FoundSlot],
        delete: Callable[[list[FoundSlot]], None],
        likely: Sequence[FoundSlot] = (),
    ) -> None:
        self.checker = SlotChecker(likely)
        self._slots = list(slots)
        self._delete = delete
        self._noted: list[FoundSlot] = []
        self._lasting: list[FoundSlot] = []
        self._is_chosen = self._replays = self._gets_on = False
        self._lock = threading.Lock()

    @property
    def slots(self) -> tuple[FoundSlot, ...]:
        """Returns the slots that are still there."""
        with self._lock:
            return tuple(self._slots)

    def add(self, slots: Iterable[FoundSlot]) -> None:
        """Adds slots that this process owns now; nothing was decided yet."""
        with self._lock:
            self._slots = newest_first((*self._slots, *slots))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of memory of these slots."""
        return sum(leftover.slot.memory.numel() for leftover in self.slots)

    def keep(self, used: Collection[FoundSlot]) -> None:
        """The run resumes from these slots, or from none: the others are deleted."""
        self._is_chosen = True
        self._noted.clear()
        self.checker.only(())
        with self._lock:
            over = [leftover for leftover in self._slots if leftover not in used]
            self._slots = [leftover for leftover in self._slots if leftover in used]
        self._delete(over)  # the only one to know them now: who is last frees their memory, which takes long

    def note_start(self, leftover: FoundSlot, *, lasting: bool = False) -> None:
        """This start resumed from a slot.

        Args:
            lasting: It counts until a step ends.
        """
        leftover.slot.note_start()
        self._noted.append(leftover)
        if lasting:
            self._lasting.append(leftover)

    def withdraw_starts(self) -> None:
        """This start ends by an error that is no slot's fault, before anything was computed."""
        for leftover in self._noted:
            leftover.slot.withdraw_start()
        self._noted.clear()

    def training_begins(self) -> None:
        """Without a call of ``keep``, the run resumes from none: a later life must not return to these slots either."""
        if not self._is_chosen:
            self.keep(())

    def step_ended(self) -> None:
        """Training advances: the next start may resume from these slots, too."""
        if not self._gets_on:
            self._gets_on = self._replays = True
            for leftover in self.slots:
                leftover.slot.forget_starts()

    def step_replayed(self, *, equal: bool) -> None:
        """A step was computed again, here or on ranks that this one waits for.

        Args:
            equal: To what was recorded.
        """
        for leftover in () if equal and self._replays else self.slots:
            if not self._replays and leftover not in self._lasting:
                leftover.slot.withdraw_start()
            if not equal:
                leftover.slot.note_start()
        self._replays = True

    def remove(self) -> bool:
        """Remove them all, and do not use their directories again; returns whether there were any."""
        slots = self.forget()
        were_any = bool(slots)
        self._delete(slots)
        return were_any

    def forget(self) -> list[FoundSlot]:
        """Leave their files as they are; returns them."""
        self._noted.clear()
        self.checker.only(())
        with self._lock:
            slots, self._slots = self._slots, []
        return slots
