"""The part of the buffer pool that a background thread calls, to make buffers before a snapshot needs them."""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from moe_ckpt.engine.host_buffer import WHOLE, HostBuffer, let_go, roomy, serves

_MANY = 64


class EarlyBuffers(ABC):
    """The part of ``HostBufferPool`` that makes buffers ahead of time. Safe to use from several threads.

    Args:
        budget_bytes: Of all buffers together.
        pinned: Page-locked, for copies from a GPU.
    """

    def __init__(self, budget_bytes: int, *, pinned: bool) -> None:
        self.budget_bytes = budget_bytes
        self._pinned = pinned
        self._free: list[HostBuffer] = []
        self._lent: set[HostBuffer] = set()
        self._making_bytes = 0
        self._ahead: list[int] = []
        self._usual_bytes = self._least_bytes = 0  # that a new buffer has, and that it must have
        self._retired = False
        self._lock = threading.Lock()

    @abstractmethod
    def _make(self, size: int, require: Callable[[int], None] | None = None) -> HostBuffer:
        """New memory for bytes that are already counted as being made, which they are not if it raises."""

    @abstractmethod
    def _make_early(self, size: int) -> HostBuffer:
        """As ``_make``, but takes no room from anything else."""

    @abstractmethod
    def _warm(self, buffer: HostBuffer) -> bool:
        """Touches the pages of a slot of an earlier life, and page-locks them for CUDA; False if that fails."""

    def top_up(self, count: int, *, early: bool = False) -> bool:
        """Make one more buffer of the usual size, unless ``count`` exist or the budget is spent; True if it did.

        Slow, and meant for a background thread: its pages are touched here.

        Args:
            count: See above.
            early: Take no room from anything else: see ``HostBufferPool``, ``make_early``.
        """
        with self._lock:
            size, least = self._usual_bytes, self._least_bytes
            there = sum(b.kind == WHOLE and serves(b, least) for b in (*self._free, *self._lent))
            if not size or there >= count or self._held() + size > self.budget_bytes:
                return False
            self._begin_ahead(size)
        return self._make_ahead(size, early=early)

    def foresee(self, least: int, most: int, count: int) -> bool:
        """As ``top_up``, before the usual size is known: makes a buffer for a need of ``least`` to ``most`` bytes."""
        with self._lock:
            there = sum(b.kind == WHOLE and b.nbytes >= least for b in (*self._free, *self._lent))
            size = self._size(most)
            if self._usual_bytes or there >= count or self._held() + size > self.budget_bytes:
                return False
            self._begin_ahead(size)
        return self._make_ahead(size, early=True, foreseen=True)

    def _make_ahead(self, size: int, *, early: bool, foreseen: bool = False) -> bool:
        try:
            buffer = self._make_early(size) if early else self._make(size)
        except (OSError, RuntimeError):
            with self._lock:
                self._ahead.remove(size)
            raise
        buffer.foreseen = foreseen
        if not self._pinned:
            ctypes.memset(buffer.memory.data_ptr(), 0, size)
        self._end_ahead(buffer)
        return True

    def warm_up(self) -> bool:
        """Touch, and page-lock, one slot of an earlier life, as a background thread; False if there is none."""
        with self._lock:
            buffer = next((b for b in self._free if b.is_cold), None)
            if buffer is None:
                return False
            self._free.remove(buffer)
            self._begin_ahead(buffer.nbytes)
        if self._warm(buffer):
            self._end_ahead(buffer)
            return True
        with self._lock:
            self._making_bytes -= buffer.nbytes
            self._ahead.remove(buffer.nbytes)
        let_go(buffer)
        return True

    def _begin_ahead(self, size: int) -> None:
        self._making_bytes += size
        self._ahead.append(size)

    def _end_ahead(self, buffer: HostBuffer) -> None:
        with self._lock:
            self._making_bytes -= buffer.nbytes
            self._ahead.remove(buffer.nbytes)
            if not self._retired:
                self._free.append(buffer)
                return
        let_go(buffer)

    def free_count(self) -> int:
        """Buffers for whole snapshots that nobody has."""
        with self._lock:
            return sum(b.kind == WHOLE for b in self._free)

    def _size(self, nbytes: int) -> int:
        """Of a buffer for so many bytes: ``roomy``, unless the budget then held fewer of them, where it holds few."""
        count = self.budget_bytes // nbytes
        return min(roomy(nbytes), self.budget_bytes // count) if 0 < count <= _MANY else roomy(nbytes)

    @property
    def is_making(self) -> bool:
        """A buffer is being made by another thread."""
        with self._lock:
            return self._making_bytes > 0

    @property
    def held_bytes(self) -> int:
        """Memory held now, lent out or free."""
        with self._lock:
            return self._held()

    def _held(self) -> int:
        return self._making_bytes + sum(buffer.nbytes for buffer in (*self._free, *self._lent))
