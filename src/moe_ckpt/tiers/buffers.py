"""Lends the host memory of one rank for snapshots, within a budget in bytes.

A growing queue of snapshots would take the host down, so no more is lent than the budget. What is lent are rooms of an
arena (``memory.arena``): in a file that outlives the process, or anonymous. Where the file system is full, anonymous
memory beside it serves until there is room again, since storage must get its checkpoints all the same.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

from moe_ckpt.errors import HostMemoryError
from moe_ckpt.memory.arena import ALIGNMENT, Arena, Buffer, rounded_room
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.threads import TaskThread, ThreadName

log = logging.getLogger("moe_ckpt")

_WARMED_NBYTES = 256 << 20
"""Bytes touched at a time, so that more urgent work of the thread does not wait for long."""
_GAPS = 2
"""Rooms of different sizes leave gaps that are too small for a snapshot. Because of these, an arena may be larger than
the budget by one part in so many: a smaller room below two that use up the budget takes up to half of it."""
_ROUNDING_NBYTES = 64 * ALIGNMENT
"""Bytes by which an arena may exceed a small budget, since rooms are rounded up."""
T = TypeVar("T")


class BufferPool:
    """Lends rooms of at most ``budget_bytes`` in all. Safe to use from several threads.

    ``take`` and ``give_back`` are for the training thread: they compute, look whether the file still exists, and rename
    headers of snapshots whose rooms are lent again. ``acquire`` and ``make_ahead`` make memory.

    Args:
        budget_bytes: Of all buffers together.
        pinned: Page-lock the memory for copies from a GPU.
        files: Has the arena in a file, and is open; None for anonymous memory alone.

    Attributes:
        making: How many threads are making memory.
        give_up: Makes room on the file system at the expense of snapshots that only a failure would need; returns False
            if there are none.
    """

    def __init__(self, budget_bytes: int, *, pinned: bool = False, files: MemoryFiles | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.give_up: Callable[[], bool] = lambda: False
        self._pinned, self._files = pinned, files
        self._private = Arena(arena_limit(budget_bytes), locks=pinned)
        self._lent: dict[Buffer, bool] = {}
        self._released: list[Buffer] = []
        self._stuck: list[Buffer] = []
        self.making = 0
        self._retired = self._said_private = self._said_sealed = False
        self._lock = threading.RLock()

    @property
    def _arenas(self) -> tuple[Arena, ...]:
        return (self._private,) if self._files is None else (self._files.arena, self._private)

    def map_private(self) -> None:
        """Maps all private memory, unless CUDA must lock it; the copying thread makes its pages then.

        Where the machine does not overcommit, memory is mapped piece by piece as it is taken.
        """
        if not self._pinned:
            with contextlib.suppress(OSError):
                self._private.grow(self._private.limit, touches=False)

    def take(self, sizes: Sequence[int]) -> list[Buffer] | None:
        """Takes buffers of these sizes in bytes, in memory that is ready; None if there are not all of them.

        For the training thread: no memory is made, touched, page-locked or freed.
        """
        sizes, files = [max(1, nbytes) for nbytes in sizes], self._files
        if files is None:
            return self._lend(self._private, sizes)
        arena = files.arena
        with self._lock:  # nothing is readable any more in a file that somebody has deleted
            self._released = [old for old in self._released if old.arena is arena]
            stuck, self._stuck = [room for room in self._stuck if room.arena is arena], []
        if arena.is_gone:
            return None
        for room in stuck:
            if self._unsealed([room]):
                arena.free(room)
        buffers = self._lend(arena, sizes)
        if buffers is None and self._private.ready and not files.fits(sum(sizes)):
            return self._lend(self._private, sizes)
        if buffers is None or not self._unsealed(buffers):
            return None
        for buffer in buffers:
            buffer.slot = files.slot(buffer)
        return buffers

    def _lend(self, arena: Arena, sizes: Sequence[int]) -> list[Buffer] | None:
        with self._lock:
            if self.lent_bytes + sum(sizes) > self.budget_bytes:
                return None
            buffers = arena.take(sizes)
            self._lent |= {buffer: not at for at, buffer in enumerate(buffers or ())}
            return buffers

    def _unsealed(self, rooms: list[Buffer]) -> bool:
        """Returns whether what was released in these rooms is unsealed. If not, nobody gets them until it is."""
        if self.unseal(rooms) is not None:
            return True
        with self._lock:
            self._stuck += rooms
            for room in rooms:  # like what was released, they do not count as lent
                self._lent.pop(room, None)
        return False

    def unseal(self, rooms: Sequence[Buffer] | None = None) -> list[Buffer] | None:
        """Makes released snapshots unreadable, which stay readable until their rooms are lent again. On any thread.

        Args:
            rooms: Only snapshots that have bytes in these; None for all that were released.

        Returns:
            The buffers of those snapshots; None if one cannot be made unreadable: then all of them stay.
        """
        with self._lock:
            over = [old for old in self._released if rooms is None or any(map(old.overlaps, rooms))]
            self._released = [old for old in self._released if old not in over]
        try:
            for old in over:
                if old.slot is not None:
                    old.slot.unseal()
            return over
        except OSError as error:  # the bytes stay what the headers say
            level = logging.INFO if self._said_sealed else logging.WARNING
            log.log(level, "a memory slot cannot be used again: %s", error)
            with self._lock:
                self._released += over
                self._said_sealed = True
            return None

    def acquire(self, sizes: Sequence[int], require: Callable[[int], None] | None = None) -> list[Buffer] | None:
        """Takes buffers as ``take`` does, and makes memory if it must; None if the budget has no room for all of them.
        Not for the training thread.

        Args:
            sizes: See ``take``.
            require: Called with the bytes of memory to be made. If it is given, private memory does not serve instead.

        Raises:
            HostMemoryError: The buffers can never fit into the budget.
            OSError: ``require`` raised it, or memory that outlives the process cannot be made.
            RuntimeError: The machine has no memory.
        """
        nbytes = sum(sizes)
        if nbytes > self.budget_bytes and not self._retired:
            raise HostMemoryError(nbytes, self.budget_bytes)
        sizes = [max(1, size) for size in sizes]
        with self._being_made():
            while self.fits(nbytes):
                if (buffers := self.take(sizes)) is not None:
                    return buffers
                if self._files is None:
                    return self._take_private(sizes)
                try:
                    if not self._grow(self._files, sizes, require=require):
                        return None
                    self._say_private("")
                except (OSError, RuntimeError) as error:
                    if require is not None:
                        raise
                    if not self.give_up():
                        self._say_private(str(error))
                        return self._take_private(sizes)
        return None

    def _say_private(self, trouble: str) -> None:
        """Logs, once, that snapshots are in private memory now; without ``trouble``, that they no longer are."""
        if trouble and not self._said_private and not self._retired:
            log.warning("a snapshot is kept in private memory, which does not outlive this process: %s", trouble)
        elif self._said_private and not trouble:
            log.info("there is room again for snapshots in memory that outlives this process")
        self._said_private = bool(trouble)

    def _take_private(self, sizes: Sequence[int]) -> list[Buffer] | None:
        """Takes buffers as ``acquire`` does, in anonymous memory."""
        end = self._private.end_for(sizes)
        if end > self._private.limit:
            return None
        try:
            self._private.grow(end, touches=self._pinned)
        except OSError as error:
            raise RuntimeError(f"the machine has no memory for {sum(sizes):,} bytes: {error}") from error
        return self._lend(self._private, sizes)

    def _grow(
        self, files: MemoryFiles, sizes: Sequence[int], *, spare: int = 0, require: Callable[[int], None] | None = None
    ) -> bool:
        """Makes memory in the file; False if the arena has its limit."""
        end = files.arena.end_for(sizes)
        return end <= self._most(files.arena) and files.grow(end, spare=spare, require=require)

    def _most(self, arena: Arena) -> int:
        """Returns the most bytes of the arena. Slots of earlier lives count beside the budget while they are there."""
        return arena_limit(self.budget_bytes) + arena.adopted_nbytes

    def make_ahead(self, nbytes: int, count: int, *, early: bool = False) -> bool:
        """Makes memory for one more snapshot. For a background thread.

        Args:
            nbytes: Of one snapshot.
            count: Snapshots for which there is to be memory.
            early: Make it only where the file system has as much again.

        Returns:
            False if there is memory for ``count`` snapshots, lent or not, or the budget is spent.

        Raises:
            OSError, RuntimeError: The memory cannot be made.
        """
        arena, files = self._arenas[0], self._files
        with self._lock:
            in_use, free = sum(self._lent.values()), self.budget_bytes - self.lent_bytes
        lacking = min(count - in_use, free // max(1, nbytes))
        sizes = next(
            (sizes for more in range(1, lacking + 1) if arena.end_for(sizes := [nbytes] * more) > arena.ready), None
        )
        if sizes is None or self._retired:
            return False
        with self._being_made():
            if files is not None:
                return self._grow(files, sizes, spare=nbytes if early else 0)
            return arena.grow(arena.end_for(sizes))

    def warm_up(self) -> bool:
        """Touches and page-locks a part of the memory in the file of an earlier life; False if all is done. For a
        background thread."""
        arena = self._arenas[0]
        with self._being_made():
            return arena.grow(min(arena.nbytes, self._most(arena), arena.ready + _WARMED_NBYTES))

    def has_ready(self, nbytes: int) -> bool:
        """Returns whether there is memory that is ready for a buffer of so many bytes, whatever the budget."""
        return any(arena.end_for([nbytes]) <= arena.ready for arena in self._arenas)

    @contextlib.contextmanager
    def _being_made(self) -> Iterator[None]:
        with self._lock:
            self.making += 1
        try:
            yield
        finally:
            with self._lock:
                self.making -= 1

    def adopt(self, buffer: Buffer) -> None:
        """Counts a buffer of another pool as lent by this one, even beyond the budget."""
        with self._lock:
            self._lent[buffer] = True

    def give_back(self, buffer: Buffer) -> None:
        """Takes back a buffer that nobody reads or writes any more; one without a room is nobody's. A snapshot that is
        sealed there stays readable for later processes until the room is lent again.

        Raises:
            ValueError: The buffer is not lent. To lend it again would give two snapshots the same memory.
        """
        with self._lock:
            if self._retired or buffer.arena is None:
                return
            if self._lent.pop(buffer, None) is None:
                raise ValueError("a host buffer was returned twice, or to a pool that it does not belong to")
            if buffer.slot is not None:
                self._released.append(buffer)
        buffer.arena.free(buffer)

    def retire(self) -> None:
        """Lends no more buffers. A buffer that is lent lives as long as its user."""
        with self._lock:
            self._retired, self.budget_bytes = True, 0
            self._lent.clear()
            self._released.clear()
        self._private.retire()

    def fits(self, nbytes: int, spare: int = 0) -> bool:
        """Returns whether the budget has room for ``nbytes`` more, once ``spare`` of the lent bytes are back."""
        return self.lent_bytes - spare + nbytes <= self.budget_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes of all buffers that are lent."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self._lent)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that was made, lent or not."""
        return sum(arena.ready for arena in self._arenas)

    @property
    def unmade_bytes(self) -> int:
        """Bytes of the budget for which no memory was made yet."""
        return max(0, self.budget_bytes - self.held_bytes)


def arena_limit(budget_bytes: int) -> int:
    """Returns the most bytes of an arena for buffers of so many bytes, with gaps and rounding."""
    return rounded_room(budget_bytes + budget_bytes // _GAPS) + _ROUNDING_NBYTES


class WorkThread:
    """A thread that makes memory in the background, and starts with the first work. For the training thread."""

    def __init__(self) -> None:
        self._tasks: TaskThread | None = None
        self._is_closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has ``work`` called once, after earlier work; on the calling thread if no other can be started."""
        result: Future[T] = Future()

        def run() -> bool:
            try:
                result.set_result(work())
            except BaseException as error:  # for whoever reads the result
                result.set_exception(error)
            return False

        if not self.start(run):
            run()
        return result

    def start(self, work: Callable[[], bool]) -> bool:
        """Has ``work`` called until it returns False, in turns with other work. Its errors are logged.

        Returns:
            False if ``work`` will not be called: no thread can be started, or this one is closed.
        """
        if self._is_closed:
            return False
        try:
            self._tasks = self._tasks or TaskThread(ThreadName.MAKE, partial(log.exception, "memory was not made: %s"))
        except RuntimeError:  # no thread can be started
            return False
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._tasks.put(partial(self._turn, self._tasks, work, torch.cuda.current_device() if is_used else None))
        return True

    def _turn(self, tasks: TaskThread, work: Callable[[], bool], device: int | None) -> None:
        if device is not None:  # by default, page-locked memory would belong to the first device
            with contextlib.suppress(RuntimeError):  # training meets the same error
                torch.cuda.set_device(device)
        if not self._is_closed and work():
            tasks.put(partial(self._turn, tasks, work, device))

    def close(self) -> None:
        """Waits for the work under way, and starts no more."""
        self._is_closed = True
        if self._tasks is not None:
            self._tasks.close()
