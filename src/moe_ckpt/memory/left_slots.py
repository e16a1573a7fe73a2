"""Slots that earlier lives of the run left in this rank's memory, from the start of this life until it has its own.

They are compared with their checksums while the ranks of a new life still wait for one another.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import torch
import xxhash

from moe_ckpt.memory.files import FoundSlot, newest_first
from moe_ckpt.memory.slot import forget_starts
from moe_ckpt.threads import ThreadName, map_ahead, named_pool

log = logging.getLogger("moe_ckpt")

_PIECE_NBYTES = 16 << 20
"""After so many bytes a thread looks whether anybody still waits for the result."""
READERS = 4
"""Threads of a rank that read and verify together: enough for the speed of most hosts' memory, and for a storage that
answers slowly."""
_TASK_NBYTES = 64 << 20
"""Bytes of the slices that a thread takes at a time. Most of its time it maps their pages."""
_Expected = tuple[torch.Tensor, int]
"""Bytes of a slice, and their checksum."""


class SlotChecker:
    """Verifies slots ahead of time, on threads that do not hold the interpreter's lock, and maps their pages thereby.

    It confirms slots whose slices are all as they were written. For others, the reader verifies each slice itself.

    Args:
        slots: To verify, in this order. Their owner may delete them at any time.
    """

    def __init__(self, slots: Sequence[FoundSlot]) -> None:
        self._awaited = set(slots)
        self._pool = named_pool(ThreadName.CHECK)
        self._checks: dict[FoundSlot, Future[bool]] = {}
        with contextlib.suppress(RuntimeError):  # no thread can be started: readers verify the slots
            for candidate in slots:
                self._checks[candidate] = self._pool.submit(self._is_sound, candidate)

    def only(self, slots: Collection[FoundSlot]) -> None:
        """Stops verifying slots other than these."""
        self._awaited.intersection_update(slots)
        for candidate in self._checks.keys() - self._awaited:
            self._checks.pop(candidate).cancel()
        if not self._awaited:
            self._pool.shutdown(wait=False)

    def is_sound(self, slot: FoundSlot) -> bool:
        """Returns True if every slice is known to be as it was written. Waits for a slot that is being verified; one
        whose turn has not come is left to the caller."""
        check = self._checks.get(slot)
        return check is not None and not check.cancel() and check.result()

    def close(self) -> None:
        """Ends the threads. A second call has no effect."""
        self.only(())
        self._pool.shutdown()

    def _is_sound(self, candidate: FoundSlot) -> bool:
        try:
            expected = [(data, entry.checksum) for entry, data in candidate.slices()]
            check = partial(self._are_as_written, candidate)
            return all(map_ahead(ThreadName.CHECK, READERS, check, _tasks(expected)))
        except Exception as error:  # whatever it is, the reader of the slot verifies it
            log.info("%s is not verified ahead of time: %s", candidate.slot.path, error)
            return False

    def _are_as_written(self, candidate: FoundSlot, expected: Sequence[_Expected]) -> bool:
        """Returns whether slices have their checksums; False, too, if nobody waits for the result any more."""
        for data, checksum in expected:
            hasher = xxhash.xxh3_64()
            for begin in range(0, data.numel(), _PIECE_NBYTES):
                if candidate not in self._awaited:
                    return False
                hasher.update(data[begin : begin + _PIECE_NBYTES].numpy().data)
            if hasher.intdigest() != checksum:
                return False
        return True


def _tasks(expected: Sequence[_Expected]) -> Iterator[list[_Expected]]:
    """Yields neighbouring slices of ``_TASK_NBYTES`` together."""
    task, nbytes = list[_Expected](), 0
    for data, checksum in expected:
        task.append((data, checksum))
        nbytes += data.numel()
        if nbytes >= _TASK_NBYTES:
            yield task
            task, nbytes = [], 0
    if task:
        yield task


class LeftSlots:
    """Owns slots of earlier lives. ``remove`` may be called on any thread, all else on the training thread.

    It also counts starts, so that no run resumes from the same slot for ever: a start that resumes from a slot is noted
    there (``Slot.note_start``) until training advances. A start that is killed during a replay does not count, since a
    replay takes long; one whose replay diverges does. A *lasting* start, in which only some ranks go back, counts until
    a step ends, since only those ranks know whether the replay diverged.

    Args:
        slots: The slots, the newest first.
        delete: Deletes slots in the background, and empties the list (``MemoryFiles.remove``).
        likely: The slots from which the run most likely resumes, the newest first, which are verified ahead of time
            until it is known from which it does.

    Attributes:
        checker: Verifies ``likely``.
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
        """Returns the slots that were not deleted."""
        with self._lock:
            return tuple(self._slots)

    def add(self, slots: Iterable[FoundSlot]) -> None:
        """Adds slots, before ``keep``."""
        with self._lock:
            self._slots = newest_first((*self._slots, *slots))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of memory of these slots."""
        return sum(leftover.slot.memory.numel() for leftover in self.slots)

    def keep(self, used: Collection[FoundSlot]) -> None:
        """Deletes all slots but these, from which the run resumes."""
        self._is_chosen = True
        self._noted.clear()
        self._lasting = [leftover for leftover in self._lasting if leftover in used]
        self.checker.only(())
        with self._lock:
            over = [leftover for leftover in self._slots if leftover not in used]
            self._slots = [leftover for leftover in self._slots if leftover in used]
        self._delete(over)  # without another reference here: the last one frees their memory, which takes long

    def note_start(self, leftover: FoundSlot, *, lasting: bool = False) -> None:
        """Notes that this start resumes from a slot.

        Args:
            leftover: The slot.
            lasting: See the class.
        """
        leftover.slot.note_start()
        self._noted.append(leftover)
        if lasting:
            self._lasting.append(leftover)

    def withdraw_starts(self) -> None:
        """Takes the notes of this start back: it ends by an error that no slot has caused, before any step."""
        for leftover in self._noted:
            leftover.slot.withdraw_start()
        self._noted.clear()

    def training_begins(self) -> None:
        """Deletes all slots unless ``keep`` was called: a later life must not return to them either."""
        if not self._is_chosen:
            self.keep(())

    def step_ended(self) -> None:
        """Forgets the starts that were counted, once: training has advanced."""
        if not self._gets_on:
            self._gets_on = self._replays = True
            for leftover in self.slots:
                forget_starts(leftover.slot.path)

    def step_replayed(self, *, equal: bool) -> None:
        """Notes that a step was replayed, on this rank or on ranks that this one waits for.

        Args:
            equal: The result is what was recorded; False if the replay diverged.
        """
        for leftover in () if equal and self._replays else self.slots:
            if not self._replays and leftover not in self._lasting:
                leftover.slot.withdraw_start()
            if not equal:
                leftover.slot.note_start()
        self._replays = True

    def remove(self) -> bool:
        """Deletes all slots; returns whether there were any."""
        slots = self.forget()
        were_any = bool(slots)
        self._delete(slots)
        return were_any

    def forget(self) -> list[FoundSlot]:
        """Returns all slots, and owns them no more. Their files stay."""
        self._noted.clear()
        self._lasting.clear()
        self.checker.only(())
        with self._lock:
            slots, self._slots = self._slots, []
        return slots
