"""The host memory of one rank: made once, in the background, and lent in rooms of any size.

To make memory takes longer than to copy into it: the kernel clears its pages, and CUDA page-locks them, at 0.4 s for
each GB. So the process keeps memory that it has made, and the next start of the run gets the file behind it. The memory
is in a file on a tmpfs, which outlives the process, or anonymous; nothing else differs.

An arena grows on a background thread, in pieces, and only at its end. The training thread takes rooms in memory that
is ready, by arithmetic alone. Bytes are written only while no sealed slot has them: a slot is unsealed before its room
is lent again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import sys
import threading
from bisect import bisect, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
"""Rooms begin at multiples of this, where a tensor of any type may begin."""
_STEPS_PER_DOUBLING = 64

Span = tuple[int, int]
"""First byte and end."""
ARENA, COPIES = "arena", "copies"
"""Names of a rank's files: one for its own snapshots, one for copies of other ranks' snapshots and for plain states."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
"""Errors of a file system without room."""


@contextlib.contextmanager
def telling_if_full(directory: Path, nbytes: int) -> Iterator[None]:
    """Turns the errors of a file system without room for so many bytes into ``MemoryFullError``."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise MemoryFullError(str(directory), nbytes, free_bytes(str(directory))) from error


_PIECE_NBYTES = LOCK_NBYTES
"""Bytes made by one call. A signal may make the kernel begin a call again, and a profiler sends a hundred a second."""
_RECORDS_NBYTES, _RECORDS_PORTION = 16 << 20, 16
"""Bytes of the file system that arenas leave free for headers of slots, but at most one part in so many of all."""


class FreeSpace:
    """Rooms in a range of bytes that grows at its end. Rooms never overlap.

    A room goes into the first gap that is large enough. Not safe for use from several threads.

    Attributes:
        end: Rooms are taken below this byte.
        used: The rooms, in order.
    """

    def __init__(self) -> None:
        self.end = 0
        self.used: list[Span] = []

    def take(self, sizes: Sequence[int]) -> list[int] | None:
        """Takes rooms of these sizes in bytes, all or none. Returns where they begin."""
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
        for nbytes in map(rounded_room, sizes):
            gaps = _gaps([*self.used, *rooms], end)
            begin = next((low for low, high in gaps if high - low >= nbytes), None)
            if begin is None:
                return None
            rooms.append((begin, begin + nbytes))
        return rooms

    def adopt(self, begin: int, nbytes: int) -> None:
        """Marks a room that an earlier process has filled, below ``end`` or not.

        Raises:
            ValueError: Another room has some of its bytes, or it begins where none can.
        """
        span = begin, begin + rounded_room(nbytes)
        at = bisect(self.used, span)
        neighbours = self.used[max(0, at - 1) : at + 1]
        if begin < 0 or begin % ALIGNMENT or any(low < span[1] and begin < high for low, high in neighbours):
            raise ValueError(f"a room of {nbytes} bytes at {begin} overlaps another one, or begins at no room's place")
        self.used.insert(at, span)

    def free(self, begin: int, nbytes: int) -> None:
        """Gives a room back. Raises ``ValueError`` if nobody has taken it."""
        self.used.remove((begin, begin + rounded_room(nbytes)))

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


def rounded_room(nbytes: int) -> int:
    """Returns the bytes that a room for ``nbytes`` takes: up to a 64th more, so that snapshots of nearly the same size
    fit into each other's rooms."""
    grain = max(ALIGNMENT, (1 << max(1, nbytes).bit_length() - 1) // _STEPS_PER_DOUBLING)
    return -(-max(1, nbytes) // grain) * grain


@dataclass(eq=False)
class Buffer:
    """A room that is lent out, until ``Arena.free``.

    Attributes:
        begin: First byte in the arena.
        memory: ``[nbytes]`` uint8. The room may be lent again once the buffer was given back.
        arena: The arena of the room; None for an empty buffer, which has no room.
        slot: The same bytes with the files that make them outlive the process; None for private memory.
        is_adopted: An earlier process has filled the room.
    """

    begin: int
    memory: torch.Tensor
    arena: Arena | None = None
    slot: Slot | None = None
    is_adopted: bool = False

    @classmethod
    def empty(cls) -> Buffer:
        """Returns a buffer without a room, for an empty snapshot."""
        return cls(0, torch.empty(0, dtype=torch.uint8, device="cpu"))

    @cached_property
    def nbytes(self) -> int:
        return self.memory.numel()

    def overlaps(self, other: Buffer) -> bool:
        """Returns whether both have bytes of the same arena in common."""
        apart = self.begin + self.nbytes <= other.begin or other.begin + other.nbytes <= self.begin
        return self.arena is other.arena and not apart


class Arena:
    """An arena of host memory: see the module. Safe to use from several threads; ``grow`` and ``shrink`` are slow.

    Args:
        limit: The most bytes that the arena may have.
        path: The file with the memory, which is made if it does not exist, and keeps its bytes if it does; None for
            anonymous memory.
        locks: Page-lock the memory for copies from a GPU. Where CUDA refuses, it stays unlocked.

    Attributes:
        limit: As given, or the size of the file if that is larger.
        identity: Of the file; None without one.
        adopted_nbytes: Bytes of rooms that earlier processes have filled and nobody has given back.

    Raises:
        OSError: The arena cannot be made.
    """

    def __init__(self, limit: int, *, path: Path | None = None, locks: bool = False) -> None:
        self.path = path
        self._locks = locks
        descriptor = -1
        self.identity: Identity | None = None
        if path is not None:
            descriptor = PRIVATE.create(str(path), os.O_RDWR)
            self.identity = identity(os.fstat(descriptor))
            limit = max(limit, os.fstat(descriptor).st_size)
        self._pages = Pages(limit, descriptor)
        self.limit = self._pages.limit
        self.adopted_nbytes = 0
        self._space = FreeSpace()
        self._growing = threading.Lock()
        self._lock = threading.RLock()  # the collector may give a room back in the middle of anything (``Slot.remove``)

    @property
    def ready(self) -> int:
        """Bytes of memory that was made."""
        return self._space.end

    @property
    def nbytes(self) -> int:
        """Bytes of the file, or of the memory that was made."""
        return max(self.ready, self._pages.file_nbytes)

    @property
    def is_gone(self) -> bool:
        """True if somebody has deleted the file."""
        return self.path is not None and identity_at(self.path) != self.identity

    def take(self, sizes: Sequence[int]) -> list[Buffer] | None:
        """Lends rooms of these sizes in memory that is ready; None if there are not all of them. Makes no system
        call."""
        with self._lock:
            begins = self._space.take(sizes)
        if begins is None:
            return None
        return [
            Buffer(begin, self._pages.bytes(begin, nbytes), self) for begin, nbytes in zip(begins, sizes, strict=True)
        ]

    def adopt(self, begin: int, nbytes: int) -> Buffer:
        """Lends the room that an earlier process has filled.

        Raises:
            ValueError: Another room has some of its bytes, or it is not in the file.
        """
        if begin + nbytes > self._pages.file_nbytes:
            raise ValueError(f"{nbytes} bytes at {begin} are not in a file of {self._pages.file_nbytes}")
        with self._lock:
            self._space.adopt(begin, nbytes)
            self.adopted_nbytes += nbytes
        return Buffer(begin, self._pages.bytes(begin, nbytes), self, is_adopted=True)

    def free(self, buffer: Buffer) -> None:
        """Gives back a buffer that nobody reads or writes any more.

        Raises:
            ValueError: The buffer is not lent out. To lend it again would give two snapshots the same memory.
        """
        with self._lock:
            self._space.free(buffer.begin, buffer.nbytes)
            self.adopted_nbytes -= buffer.nbytes * buffer.is_adopted

    def grow(
        self, end: int, *, spare: int = 0, touches: bool = True, require: Callable[[int], None] | None = None
    ) -> bool:
        """Makes memory, as far as the limit allows. The first call takes all that earlier processes have made, unless
        that must be page-locked. On a background thread.

        Args:
            end: Bytes that the arena is to have in all.
            spare: Bytes that the file system must still have free afterwards.
            touches: See ``Pages.grow``.
            require: Called before anything is made, with the bytes to be made.

        Returns:
            True if the arena is larger than before.

        Raises:
            MemoryFullError: The file system has no room; memory that was made stays.
            OSError: ``require`` raised it, or the memory cannot be made.
        """
        with self._growing:
            before, end = self.ready, min(end, self.limit)
            if not self._pages.ready and not self._locks:
                self._reuse()
            if end <= self.ready:
                return self.ready > before
            more = end - max(self.ready, self._pages.file_nbytes)
            if require is not None and more > 0:
                require(more)
            if self.path is not None and more > 0:
                self._require_free(more, spare)
            while self._space.end < end:
                piece = min(end, (self._space.end // _PIECE_NBYTES + 1) * _PIECE_NBYTES)
                self._grow(piece if touches or self._locks else end, touches=touches)
            return True

    def _reuse(self) -> None:
        self._pages.reuse()
        with self._lock:
            self._space.end = self._pages.ready

    def _require_free(self, more: int, spare: int) -> None:
        size = os.statvfs(self._pages.descriptor)
        records = min(_RECORDS_NBYTES, size.f_blocks * size.f_frsize // _RECORDS_PORTION)
        free = free_bytes(self._pages.descriptor)
        if free < more + max(spare, records):
            raise MemoryFullError(str(self.path), more + records, free)

    def _grow(self, end: int, *, touches: bool) -> None:
        nbytes = end - self._space.end
        with contextlib.nullcontext() if self.path is None else telling_if_full(self.path.parent, nbytes):
            try:
                self._pages.grow(end, locks=self._locks, touches=touches)
            except RuntimeError as error:
                self._locks = False
                _say_unlocked(error)
                self._pages.grow(end, touches=touches)
        with self._lock:
            self._space.end = self._pages.ready

    def shrink(self, end: int) -> None:
        """Gives back the memory behind ``end`` and behind the last room. On a background thread."""
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
        """Lends no more rooms. Rooms that are lent live as long as their users; other anonymous memory is freed."""
        with self._growing, self._lock:
            gaps, self._space.end = list(self._space.gaps()), 0
            if self.path is None:
                self._pages.unlock()
                for begin, end in gaps:
                    self._pages.drop(begin, end)

    def end_for(self, sizes: Sequence[int]) -> int:
        """Returns the bytes that the arena must have so that ``take`` finds rooms of these sizes: no more than
        ``ready`` if it finds them now."""
        with self._lock:
            return self._space.end_for(sizes)


def _say_unlocked(error: RuntimeError) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = "" if limit == resource.RLIM_INFINITY else f"; this process may lock {limit:,} bytes (ulimit -l)"
    log.warning("host memory is not page-locked, so that copies from the GPU take longer: %s%s", error, limited)
