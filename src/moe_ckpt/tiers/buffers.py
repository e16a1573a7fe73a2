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
from moe_ckpt.memory.arena import ALIGNMENT, Arena, Buffer, rounded
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.threads import TaskThread, ThreadName

log = logging.getLogger("moe_ckpt")

_WARMED_NBYTES = 256 << 20
"""In one go: what is due comes between."""
_GAPS = 3
"""Rooms of different sizes leave gaps that hold none of them. Where those are in the way of a snapshot that the budget
has room for, an arena may become larger than the budget by one part in so many."""
_ROUNDING_NBYTES = 64 * ALIGNMENT
"""What rooms of a small budget may take beyond it, because they are rounded up."""
T = TypeVar("T")


class BufferPool:
    """Lends rooms of never more than ``budget_bytes`` in all. Safe to use from several threads.

    ``take`` and ``give_back`` are for the training thread: arithmetic, a look whether the file is still there, and the
    deletion of headers of what was there before. ``acquire`` and ``make_ahead`` make memory.

    Args:
        budget_bytes: Of all buffers together.
        pinned: Page-locked, for copies from a GPU.
        files: Has the arena in a file, which is open; None for anonymous memory alone.

    Attributes:
        making: How many other threads are making memory.
        give_up: Makes room on the file system at the expense of what only a failure would need; False if there is none
            such.
    """

    def __init__(self, budget_bytes: int, *, pinned: bool = False, files: MemoryFiles | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.give_up: Callable[[], bool] = lambda: False
        self._pinned, self._files = pinned, files
        self._private = Arena(arena_limit(budget_bytes), locks=pinned)
        self._lent: dict[Buffer, bool] = {}
        self._released: list[Buffer] = []
        self.making = 0
        self._retired = self._said_private = False
        self._lock = threading.RLock()

    @property
    def _arenas(self) -> tuple[Arena, ...]:
        return (self._private,) if self._files is None else (self._files.arena, self._private)

    def map_private(self) -> None:
        """Map all of private memory, unless CUDA must lock it: whoever copies into it makes its pages.

        Where the machine does not overcommit, it is mapped piece by piece as it is taken.
        """
        if not self._pinned:
            with contextlib.suppress(OSError):
                self._private.grow(self._private.limit, touches=False)

    def take(self, sizes: Sequence[int]) -> list[Buffer] | None:
        """Buffers of these sizes in bytes, of memory that is ready; None if there are not all of them.

        For the training thread: no memory is made, touched, page-locked or freed.
        """
        sizes, files = [max(1, nbytes) for nbytes in sizes], self._files
        if files is None:
            return self._lend(self._private, sizes)
        if files.arena.is_gone:
            return None
        buffers = self._lend(files.arena, sizes)
        if buffers is None and self._private.ready and not files.fits(sum(sizes)):
            return self._lend(self._private, sizes)
        if buffers is None or self.unseal(buffers) is None:  # in the latter case the rooms stay lent
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
            log.warning("a memory slot cannot be used again: %s", error)
            with self._lock:
                self._released += over
            return None

    def acquire(self, sizes: Sequence[int], require: Callable[[int], None] | None = None) -> list[Buffer] | None:
        """Takes buffers as ``take`` does, making memory if need be; None if the budget has no room for all of them. Not
        for the training thread.

        Args:
            sizes: See ``take``.
            require: Called before memory for so many bytes is made, which outlives the process or is of no use.

        Raises:
            HostMemoryError: They can never fit into the budget.
            OSError: ``require`` raised it, or memory of that kind cannot be made.
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
        """Tell, once, that snapshots are in private memory, or are so no longer."""
        if trouble and not self._said_private and not self._retired:
            log.warning("a snapshot is kept in private memory, which does not outlive this process: %s", trouble)
        elif self._said_private and not trouble:
            log.info("there is room again for snapshots in memory that outlives this process")
        self._said_private = bool(trouble)

    def _take_private(self, sizes: Sequence[int]) -> list[Buffer] | None:
        """As ``acquire``, of anonymous memory."""
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
        """Make memory in the file; False if neither the budget nor what earlier lives left has room for it."""
        end = files.arena.end_for(sizes)
        return end <= self._most(files.arena) and files.grow(end, spare=spare, require=require)

    def _most(self, arena: Arena) -> int:
        """Bytes that the arena may have: what earlier lives left counts beside the budget while it is needed."""
        return arena_limit(self.budget_bytes) + arena.adopted_nbytes

    def make_ahead(self, nbytes: int, count: int, *, early: bool = False) -> bool:
        """Make memory for one more snapshot of so many bytes. Meant for a background thread.

        Args:
            nbytes: Of one.
            count: Snapshots.
            early: Only where as much again is free on the file system.

        Returns:
            False if that of ``count`` is there, lent out or not, or the budget is spent.

        Raises:
            OSError: It cannot be made.
            RuntimeError: Likewise.
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
        """Touch, and page-lock, some of what an earlier life left; False if that is done. On a background thread."""
        arena = self._arenas[0]
        with self._being_made():
            return arena.grow(min(arena.nbytes, self._most(arena), arena.ready + _WARMED_NBYTES))

    def has_ready(self, nbytes: int) -> bool:
        """True if ``take`` finds a buffer of so many bytes, as far as memory is ready."""
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
        """Count a buffer as lent out by this pool although another one made it, even beyond the budget."""
        with self._lock:
            self._lent[buffer] = True

    def lend_nothing(self) -> Buffer:
        """Returns an empty buffer, which needs no room, for an empty snapshot."""
        buffer = Buffer(0, torch.empty(0, dtype=torch.uint8))
        with self._lock:
            self._lent[buffer] = False
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """The lender no longer reads or writes ``buffer``. What is sealed in it stays readable until it is lent again.

        Raises:
            ValueError: It is not lent out. Lending it on would give two snapshots the same memory.
        """
        with self._lock:
            if self._retired:
                return
            if self._lent.pop(buffer, None) is None:
                raise ValueError("a host buffer was returned twice, or to a pool that it does not belong to")
            if buffer.slot is not None:
                self._released.append(buffer)
        if buffer.arena is not None:
            buffer.arena.free(buffer)

    def retire(self) -> None:
        """Lends no more buffers. A lent buffer lives as long as its user."""
        with self._lock:
            self._retired, self.budget_bytes = True, 0
            self._lent.clear()
            self._released.clear()
        self._private.retire()

    def fits(self, nbytes: int, spare: int = 0) -> bool:
        """True if the budget has room for so many bytes more, once ``spare`` bytes lent out are returned."""
        return self.lent_bytes - spare + nbytes <= self.budget_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes lent out."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self._lent)

    @property
    def held_bytes(self) -> int:
        """Memory held now, lent out or free."""
        return sum(arena.ready for arena in self._arenas)


def arena_limit(budget_bytes: int) -> int:
    """Returns the most bytes of an arena for so many of buffers: rooms are rounded up, and leave gaps between them."""
    return rounded(budget_bytes + budget_bytes // _GAPS) + _ROUNDING_NBYTES


class WorkThread:
    """Makes memory in the background, on a thread that starts with the first work. For the training thread."""

    def __init__(self) -> None:
        self._tasks: TaskThread | None = None
        self._is_closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Calls ``work`` once, after what was started before. On the calling thread if there is no other."""
        result: Future[T] = Future()

        def run() -> bool:
            try:
                result.set_result(work())
            except BaseException as error:  # it is the caller's
                result.set_exception(error)
            return False

        if not self.start(run):
            run()
        return result

    def start(self, work: Callable[[], bool]) -> bool:
        """Call ``work`` on the thread until it returns False, in turns with other work. Its errors are logged.

        Returns:
            False if that will not happen: no thread can be started, or this one is closed.
        """
        if self._is_closed:
            return False
        try:
            self._tasks = self._tasks or TaskThread(ThreadName.MAKE, _say_unmade)
        except RuntimeError:  # no thread can be started
            return False
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._tasks.put(partial(self._turn, self._tasks, work, torch.cuda.current_device() if is_used else None))
        return True

    def _turn(self, tasks: TaskThread, work: Callable[[], bool], device: int | None) -> None:
        if device is not None:  # else what is page-locked belongs to the first device, whichever this rank uses
            with contextlib.suppress(RuntimeError):  # training meets the same error, and says so
                torch.cuda.set_device(device)
        if not self._is_closed and work():
            tasks.put(partial(self._turn, tasks, work, device))

    def close(self) -> None:
        """Start no more work; return when the work in hand is done."""
        self._is_closed = True
        if self._tasks is not None:
            self._tasks.close()


def _say_unmade(error: Exception) -> None:
    """Whatever it is, the next snapshot asks again."""
    log.error("memory could not be made ahead of time", exc_info=error)
