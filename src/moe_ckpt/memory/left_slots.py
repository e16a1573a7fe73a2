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

from moe_ckpt.format.slot import GRADIENTS, STATE
from moe_ckpt.memory.files import FoundSlot, newest_first
from moe_ckpt.threads import ThreadName, ahead, named_pool

log = logging.getLogger("moe_ckpt")

_PIECE_NBYTES = 16 << 20
"""After so many bytes a thread looks whether it is still wanted."""
READERS = 4
"""Threads of a rank that read and verify at once: as quick as most of a host's memory, and they wait together for a far
storage."""
_TASK_NBYTES = 64 << 20
"""A thread takes slices of so many bytes at a time. Mapping their pages takes longest, for each thread by itself."""
_MOST_SNAPSHOTS = 2
"""The newest may lack another rank's share; then it is the one before."""


_Expected = tuple[torch.Tensor, int]
"""Bytes of a slice, and their checksum."""


class SlotChecker:
    """Reads slots on threads of its own, outside of the interpreter's lock; the pages are mapped on the way.

    It finds slots of which every slice is as it was written. Of others it says nothing: whoever reads them finds out.

    Args:
        slots: In this order. They belong to somebody else, and may go at any time.
    """

    def __init__(self, slots: Sequence[FoundSlot]) -> None:
        self._awaited = set(slots)
        self._pool = named_pool(ThreadName.CHECK)
        self._checks: dict[FoundSlot, Future[bool]] = {}
        with contextlib.suppress(RuntimeError):  # no thread to be had: whoever reads them checks them
            for candidate in slots:
                self._checks[candidate] = self._pool.submit(self._is_sound, candidate)

    def only(self, slots: Collection[FoundSlot]) -> None:
        """Nobody will ask for others."""
        self._awaited.intersection_update(slots)
        for candidate in self._checks.keys() - self._awaited:
            self._checks.pop(candidate).cancel()
        if not self._awaited:
            self._pool.shutdown(wait=False)

    def is_sound(self, slot: FoundSlot) -> bool:
        """Returns whether every slice is as it was written, if that is known; waits for a slot that is being read."""
        check = self._checks.get(slot)
        return check is not None and not check.cancel() and check.result()  # one that waits: the caller is as quick

    def close(self) -> None:
        """End the threads. Twice does no harm."""
        self.only(())
        self._pool.shutdown()

    def _is_sound(self, candidate: FoundSlot) -> bool:
        path, memory = str(candidate.slot.path), candidate.slot.memory
        try:
            expected = [
                (memory[part.begin + entry.begin : part.begin + entry.end], entry.checksum)
                for part in candidate.header.parts
                for entry in candidate.header.slices(part, path)
            ]
            check = partial(self._are_as_written, candidate)
            return all(ahead(ThreadName.CHECK, READERS, check, _tasks(expected)))
        except Exception as error:  # whatever it is, who needs the slot verifies it
            log.info("%s is not verified ahead of time: %s", path, error)
            return False

    def _are_as_written(self, candidate: FoundSlot, expected: Sequence[_Expected]) -> bool:
        return all(self._is_as_written(candidate, data, checksum) for data, checksum in expected)

    def _is_as_written(self, candidate: FoundSlot, data: torch.Tensor, checksum: int) -> bool:
        """False, too, once nobody wants to know."""
        hasher = xxhash.xxh3_64()
        for begin in range(0, data.numel(), _PIECE_NBYTES):
            if candidate not in self._awaited:
                return False
            hasher.update(data[begin : begin + _PIECE_NBYTES].numpy().data)
        return hasher.intdigest() == checksum


def _tasks(expected: Sequence[_Expected]) -> Iterator[list[_Expected]]:
    """Yields neighbouring slices of so many bytes that a thread may read them at a time."""
    task, nbytes = list[_Expected](), 0
    for data, checksum in expected:
        task.append((data, checksum))
        nbytes += data.numel()
        if nbytes >= _TASK_NBYTES:
            yield task
            task, nbytes = [], 0
    if task:
        yield task


def newest_of(slots: Sequence[FoundSlot], rank: int, most: int = _MOST_SNAPSHOTS) -> list[FoundSlot]:
    """The slots that a rank's next life most likely goes on from, all of its own share.

    Args:
        slots: That earlier lives left, the newest step first.
        rank: That goes on.
        most: Snapshots, each with what belongs to it.
    """
    shares = [slot for slot in slots if slot.header.rank == rank and slot.header.only != STATE]  # which is small
    chosen: list[FoundSlot] = []
    whole = [candidate for candidate in shares if candidate.header.only != GRADIENTS]
    for _ in range(most):
        newest = next((candidate for candidate in whole if candidate not in chosen), None)
        if newest is None:
            break
        chosen += [candidate for candidate in shares if candidate not in chosen and _goes_with(candidate, newest)]
    return chosen


def _goes_with(candidate: FoundSlot, newest: FoundSlot) -> bool:
    """Whether a checkpoint that ends with ``newest`` needs this one."""
    header, last = candidate.header, newest.header
    if candidate is newest or header.identity.life != last.identity.life:
        return candidate is newest
    if last.contents.since is not None:
        return not header.identity.parting and last.contents.since <= header.identity.number <= last.identity.number
    window, window_of_candidate = last.contents.window, header.contents.window
    return window is not None and window_of_candidate is not None and window_of_candidate.start == window.start


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
