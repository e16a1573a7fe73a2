"""The host memory of one rank: made once, in the background, and lent in rooms of any size.

Fresh memory costs more than the copy into it: the kernel clears its pages, and CUDA page-locks them, at 0.4 s for each
GB. So memory that was made is kept for the life of the process, and the file behind it for the next start. It lies in a
file on a tmpfs, which outlives the process, or is anonymous; nothing else differs.

An arena grows on a background thread, in pieces, and only at its end. The training thread takes rooms of what is ready,
by arithmetic alone. Bytes are written only while no slot names them: a slot is unsealed before its room is given back.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from bisect import bisect, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_ckpt.errors import MemoryFullError
from moe_ckpt.memory.mapping import LOCK_NBYTES, Identity, Pages, identity, identity_at
from moe_ckpt.storage.local import PRIVATE, free_bytes

if TYPE_CHECKING:
    from moe_ckpt.memory.slot import Slot

log = logging.getLogger("moe_ckpt")

ALIGNMENT = 64
"""Rooms begin at multiples of this, so that a tensor of any type can begin there."""
_STEPS_PER_DOUBLING = 64

Span = tuple[int, int]
"""First byte and end."""
ARENA, COPIES = "arena", "copies"
"""Names of a rank's files: of its own snapshots, and of copies of others' and plain states."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
"""Errors of a file system without room."""
_PIECE_NBYTES = LOCK_NBYTES
"""Made by one call: signals, as a profiler sends a hundred in a second, may make the kernel begin a call again."""
_RECORDS_NBYTES, _RECORDS_PORTION = 16 << 20, 16
"""So much of the file system, but no more than one part in so many of it, is left to headers of slots."""


class FreeSpace:
    """Rooms in a range of bytes that grows at its end. Rooms never overlap.

    A room is put where the first gap is that holds it. Not safe for use from several threads.

    Attributes:
        end: Rooms are taken below this byte.
        used: The rooms, in order.
    """

    def __init__(self) -> None:
        self.end = 0
        self.used: list[Span] = []

    def take(self, sizes: Sequence[int]) -> list[int] | None:
        """Take rooms of so many bytes, all or none; returns where they begin."""
        rooms = self._rooms(sizes, self.end)
        if rooms is None:
            return None
        for room in rooms:
            insort(self.used, room)
        return [begin for begin, _ in rooms]

    def end_for(self, sizes: Sequence[int]) -> int:
        """Returns where the range must end so that ``take`` finds rooms of these sizes."""
        return max([self.end, *(end for _, end in self._rooms(sizes, sys.maxsize) or ())])

    def _rooms(self, sizes: Sequence[int], end: int) -> list[Span] | None:
        """Returns free rooms of these sizes below ``end``; None if there are not all of them."""
        rooms: list[Span] = []
        for nbytes in map(rounded, sizes):
            gaps = _gaps([*self.used, *rooms], end)
            begin = next((low for low, high in gaps if high - low >= nbytes), None)
            if begin is None:
                return None
            rooms.append((begin, begin + nbytes))
        return rooms

    def adopt(self, begin: int, nbytes: int) -> None:
        """Mark a room that an earlier process has filled, below ``end`` or not.

        Raises:
            ValueError: Another room has some of its bytes, or it begins where none can.
        """
        span = begin, begin + rounded(nbytes)
        at = bisect(self.used, span)
        neighbours = self.used[max(0, at - 1) : at + 1]
        if begin < 0 or begin % ALIGNMENT or any(low < span[1] and begin < high for low, high in neighbours):
            raise ValueError(f"a room of {nbytes} bytes at {begin} overlaps another one, or begins at no room's place")
        self.used.insert(at, span)

    def free(self, begin: int, nbytes: int) -> None:
        """Give a room back. Raises ``ValueError``: nobody has taken it."""
        self.used.remove((begin, begin + rounded(nbytes)))

    def fits(self, nbytes: int) -> bool:
        """True if ``take`` finds a room of so many bytes."""
        return self._rooms([nbytes], self.end) is not None

    def gaps(self) -> Iterator[Span]:
        """Yields the free spans below ``end``."""
        return _gaps(self.used, self.end)


def _gaps(used: Sequence[Span], end: int) -> Iterator[Span]:
    at = 0
    for low, high in sorted(used):
        if at < min(low, end):
            yield at, min(low, end)
        at = high
    if at < end:
        yield at, end


def rounded(nbytes: int) -> int:
    """Returns the bytes that a room of ``nbytes`` takes: at most a 64th more, so that snapshots whose sizes differ a
    little fit into each other's rooms."""
    grain = max(ALIGNMENT, (1 << max(1, nbytes).bit_length() - 1) // _STEPS_PER_DOUBLING)
    return -(-max(1, nbytes) // grain) * grain


@dataclass(eq=False)
class Buffer:
    """A room that is lent out, until ``Arena.free``.

    Attributes:
        begin: First byte in the arena.
        memory: ``[nbytes]`` uint8. The room may be lent again once the buffer was given back.
        arena: That it is a room of; None for an empty buffer, which needs none.
        slot: The same bytes with the files that make them outlive the process; None for private memory.
        is_adopted: An earlier process has filled it.
    """

    begin: int
    memory: torch.Tensor
    arena: Arena | None = None
    slot: Slot | None = None
    is_adopted: bool = False

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def overlaps(self, other: Buffer) -> bool:
        """Returns whether both have bytes of the same arena in common."""
        apart = self.begin + self.nbytes <= other.begin or other.begin + other.nbytes <= self.begin
        return self.arena is other.arena and not apart


class Arena:
    """An arena of host memory: see the module. Safe to use from several threads; ``grow`` and ``shrink`` are slow.

    Args:
        limit: Bytes that it may grow to.
        path: Of the file that it lies in, which is made if there is none, and whose bytes stay what they are; None for
            anonymous memory.
        locks: Page-lock it for copies from a GPU. Where CUDA refuses, it stays unlocked.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, limit: int, *, path: Path | None = None, locks: bool = False) -> None:
        self.path = path
        self._locks = locks
        descriptor, self._identity = -1, None
        if path is not None:
            descriptor = PRIVATE.create(str(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._identity = identity(os.fstat(descriptor))
            limit = max(limit, os.fstat(descriptor).st_size)
        self._pages = Pages(limit, descriptor)
        self._space = FreeSpace()
        self._adopted = 0
        self._growing = threading.Lock()
        self._lock = threading.RLock()  # the collector may give a room back in the middle of anything (``Slot.remove``)

    @property
    def limit(self) -> int:
        """Bytes that it may grow to."""
        return self._pages.limit

    @property
    def ready(self) -> int:
        """Bytes that were made."""
        return self._space.end

    @property
    def nbytes(self) -> int:
        """Bytes that it holds: of its file, or what was made."""
        return max(self.ready, self._pages.file_nbytes)

    @property
    def identity(self) -> Identity | None:
        """Returns the identity of its file; None without one."""
        return self._identity

    @property
    def is_gone(self) -> bool:
        """Somebody has deleted its file."""
        return self.path is not None and identity_at(self.path) != self._identity

    @property
    def adopted_nbytes(self) -> int:
        """Bytes of the rooms that earlier processes have filled and nobody has given back."""
        return self._adopted

    def take(self, sizes: Sequence[int]) -> list[Buffer] | None:
        """Lend rooms of so many bytes of what is ready; None if there are not all of them. No call of the system."""
        with self._lock:
            begins = self._space.take(sizes)
        if begins is None:
            return None
        return [
            Buffer(begin, self._pages.bytes(begin, nbytes), self) for begin, nbytes in zip(begins, sizes, strict=True)
        ]

    def adopt(self, begin: int, nbytes: int) -> Buffer:
        """Lend the room that an earlier process has filled.

        Raises:
            ValueError: Another room has some of its bytes, or it lies outside.
        """
        if begin + nbytes > self._pages.file_nbytes:
            raise ValueError(f"{nbytes} bytes at {begin} are not in a file of {self._pages.file_nbytes}")
        with self._lock:
            self._space.adopt(begin, nbytes)
            self._adopted += nbytes
        return Buffer(begin, self._pages.bytes(begin, nbytes), self, is_adopted=True)

    def free(self, buffer: Buffer) -> None:
        """Nobody reads or writes the buffer any more.

        Raises:
            ValueError: It is not lent out. Lending it on would give two snapshots the same memory.
        """
        with self._lock:
            self._space.free(buffer.begin, buffer.nbytes)
            self._adopted -= buffer.nbytes * buffer.is_adopted

    def fits(self, nbytes: int) -> bool:
        """Returns whether ``take`` finds a room of so many bytes."""
        with self._lock:
            return self._space.fits(nbytes)

    def grow(
        self, end: int, *, spare: int = 0, touches: bool = True, require: Callable[[int], None] | None = None
    ) -> bool:
        """Make it so large, as far as its limit allows. On a background thread.

        Args:
            end: Bytes in all.
            spare: Bytes that the file system must still have free then.
            touches: See ``Pages.grow``.
            require: Called before anything is made, with the bytes that come.

        Returns:
            Whether it is larger than before.

        Raises:
            MemoryFullError: The file system has no room; what was made stays.
            OSError: ``require`` raised it, or it cannot be made.
        """
        with self._growing:
            before, end = self.ready, min(end, self.limit)
            if end <= before:
                return False
            more = end - max(before, self._pages.file_nbytes)
            if require is not None and more > 0:
                require(more)
            if self.path is not None and more > 0:
                self._require_free(more, spare)
            while self._space.end < end:
                piece = min(end, (self._space.end // _PIECE_NBYTES + 1) * _PIECE_NBYTES)
                self._grow(piece if touches or self._locks else end, touches=touches)
            return True

    def _require_free(self, more: int, spare: int) -> None:
        size = os.statvfs(self._pages.descriptor)
        records = min(_RECORDS_NBYTES, size.f_blocks * size.f_frsize // _RECORDS_PORTION)
        free = free_bytes(self._pages.descriptor)
        if free < more + max(spare, records):
            raise MemoryFullError(str(self.path), more + records, free)

    def _grow(self, end: int, *, touches: bool) -> None:
        before = self._space.end
        try:
            self._pages.grow(end, locks=self._locks, touches=touches)
        except RuntimeError as error:
            self._locks = False
            log.warning("host memory is not page-locked, so that copies from the GPU take longer: %s", error)
            self._pages.grow(end, touches=touches)
        except OSError as error:
            if self.path is None or error.errno not in FULL:
                raise
            raise MemoryFullError(str(self.path), end - before, free_bytes(self._pages.descriptor)) from error
        with self._lock:
            self._space.end = self._pages.ready

    def shrink(self, end: int) -> None:
        """Give back what lies behind ``end`` and behind the last room. On a background thread."""
        with self._growing:
            with self._lock:
                end = max([end, *(high for _, high in self._space.used)])
                if end >= max(self._space.end, self._pages.file_nbytes):
                    return
                before, self._space.end = self._space.end, min(self._space.end, end)
            try:
                self._pages.shrink(end)
            except OSError as error:
                log.info("%s stays larger than it need be: %s", self.path, error)
            with self._lock:
                self._space.end = min(before, self._pages.ready)

    def retire(self) -> None:
        """No room is lent any more. What is lent lives as long as its user; of anonymous memory the rest is freed."""
        with self._growing, self._lock:
            gaps, self._space.end = list(self._space.gaps()), 0
            if self.path is None:
                self._pages.unlock()
                for begin, end in gaps:
                    self._pages.drop(begin, end)

    def end_for(self, sizes: Sequence[int]) -> int:
        """Returns how large it must be so that ``take`` finds rooms of these sizes."""
        with self._lock:
            return self._space.end_for(sizes)
