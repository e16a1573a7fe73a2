"""Host memory for snapshots: reused buffers under a budget in bytes.

Buffers are reused because fresh memory costs more than the copy itself (page faults made a clone 3.5
times as slow as a warm copy where it was measured), and bounded because a growing queue of snapshots
would take the host down.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import torch

from moe_ckpt.errors import HostMemoryError

_SHARE_OF_FREE_MEMORY = 0.5
_OVERSIZE = 4


@dataclass(eq=False)
class HostBuffer:
    """One buffer lent out by the pool. Its memory is the pool's again after ``HostBufferPool.give_back``."""

    memory: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class HostBufferPool:
    """Lends byte buffers; never holds more than ``budget_bytes``. Safe to use from several threads."""

    def __init__(self, budget_bytes: int, *, pinned: bool = False) -> None:
        self.budget_bytes = budget_bytes
        self._pinned = pinned
        self._free: list[HostBuffer] = []
        self._held_bytes = 0
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> HostBuffer | None:
        """A buffer of at least ``nbytes``, or None if the budget is used up by buffers still lent out.

        Raises:
            HostMemoryError: ``nbytes`` can never fit into the budget.
        """
        if nbytes > self.budget_bytes:
            raise HostMemoryError(nbytes, self.budget_bytes)
        with self._lock:
            fitting = [b for b in self._free if nbytes <= b.nbytes <= max(_OVERSIZE * nbytes, 1 << 20)]
            if fitting:
                best = min(fitting, key=lambda b: b.nbytes)
                self._free.remove(best)
                return best
            # Free buffers of the wrong size go before the budget is called exhausted.
            while self._free and self._held_bytes + nbytes > self.budget_bytes:
                self._held_bytes -= self._free.pop(0).nbytes
            if self._held_bytes + nbytes > self.budget_bytes:
                return None
            self._held_bytes += nbytes
        try:
            return HostBuffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned))
        except RuntimeError:
            with self._lock:
                self._held_bytes -= nbytes
            raise

    def give_back(self, buffer: HostBuffer) -> None:
        with self._lock:
            self._free.append(buffer)

    def fits(self, nbytes: int) -> bool:
        """True if a buffer of ``nbytes`` could be lent out now."""
        with self._lock:
            free = sum(buffer.nbytes for buffer in self._free)
            return self._held_bytes - free + nbytes <= self.budget_bytes

    @property
    def held_bytes(self) -> int:
        """Memory held now, lent out or free."""
        return self._held_bytes


def default_budget_bytes(local_ranks: int) -> int:
    """Half of the memory that is free now, within the cgroup's limit, shared by the ranks of this host."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_free_bytes()
    usable = free if limit is None else min(free, limit)
    return int(usable * _SHARE_OF_FREE_MEMORY) // max(1, local_ranks)


def _cgroup_free_bytes(root: str = "/sys/fs/cgroup") -> int | None:
    """Bytes left under the cgroup v2 memory limit, or None without one."""
    try:
        with open(f"{root}/memory.max") as limit_file, open(f"{root}/memory.current") as used_file:
            limit = limit_file.read().strip()
            return None if limit == "max" else max(0, int(limit) - int(used_file.read()))
    except (OSError, ValueError):
        return None
