"""Slots that come on top of what a rank usually takes: only while the memory limit of the job's cgroup has room."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from moe_ckpt.engine import cgroups
from moe_ckpt.engine.buffers import HostBufferPool
from moe_ckpt.errors import MemoryFullError
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.preflight import lies_in_memory
from moe_ckpt.memory.slot import Slot

log = logging.getLogger("moe_ckpt")

_LIMIT = (
    "Raise the limit (Docker: --memory; Kubernetes: resources.limits.memory; SLURM: --mem), or lower "
    "Memory(budget_bytes=...)"
)
_BESIDE_NBYTES = 16 << 20
"""That sealing takes for headers and plain states, roughly."""
_COPIES = 2
"""Of one rank on its holder: the newest that is complete, and the one that comes in."""


class LimitedSlots:
    """Makes slots for copies of other ranks. A tmpfs counts in a cgroup, whose limit ends processes without an error.

    So a copy is refused unless the limit then still leaves what the ranks of this node may take by their budgets, what
    they had at their largest in a step and will have again, and two slots of that size for each of them: they make
    theirs at the same time, and a holder keeps two copies of a rank.

    Args:
        files: Makes the slots.
        pool: Of this rank. The others of the node have taken as much of as large a budget.
        local_ranks: Of the node.
    """

    def __init__(self, files: MemoryFiles, pool: HostBufferPool, local_ranks: int) -> None:
        self._files, self._pool, self._ranks = files, pool, local_ranks
        self._counts = lies_in_memory(str(files.path))
        self._said = False

    def make(self, nbytes: int) -> Slot:
        """A new slot, on any thread.

        Raises:
            MemoryFullError: There is no room for it, on the file system or under the limit.
            OSError: It cannot be made.
        """
        free = cgroups.free_bytes(any_cache=True) if self._counts else None
        if free is not None:
            own = max(0, self._pool.budget_bytes - self._pool.held_bytes)
            again = _once_more_bytes()
            left = free - self._ranks * (own + again) - (_COPIES * self._ranks - 1) * nbytes
            if left < nbytes:
                self._say(nbytes, free, own, again)
                raise MemoryFullError(str(self._files.path), nbytes, max(0, left))
        return self._files.make(nbytes)

    def _say(self, nbytes: int, free: int, own: int, again: int) -> None:
        if self._said:
            return
        self._said = True
        log.warning(
            "no copy of another rank's snapshot (%s bytes) is kept here: the memory limit of this job's cgroup leaves "
            "%s bytes, and each rank of this node (%d) may still take %s bytes of its budget (%s) for its own "
            "snapshots, and %s bytes as at its largest. %s",
            *(f"{nbytes:,}", f"{free:,}", self._ranks, f"{own:,}", f"{self._pool.budget_bytes:,}", f"{again:,}"),
            _LIMIT,
        )


def requires_room(path: Path, local_ranks: int) -> Callable[[int], None]:
    """Returns what to call before a slot is made for what a rank seals when training stops at a failure.

    All ranks of the node make theirs at the same time, one after the other, and those that do not know of the failure
    yet may take as much as at their largest.

    Args:
        path: Where slots are made.
        local_ranks: Of the node.
    """
    counts = lies_in_memory(str(path))

    def require(nbytes: int) -> None:
        """Raises ``MemoryFullError`` if the memory limit of the job's cgroup may have no room for so many bytes."""
        free = cgroups.free_bytes(any_cache=True) if counts else None
        if free is None:
            return
        left = free - (local_ranks - 1) * (nbytes + _once_more_bytes()) - _BESIDE_NBYTES
        if left < nbytes:
            beside = f"That is what the memory limit of this job's cgroup leaves beside {local_ranks - 1} other ranks. "
            raise MemoryFullError(str(path), nbytes, max(0, left), beside + _LIMIT)

    return require


def _once_more_bytes() -> int:
    """How much larger this process once was than it is now: a step's gradients come again. 0 where nobody tells."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS"):
                found[name] = int(value.split()[0]) * 1024
    return max(0, found.get("VmHWM", 0) - found.get("VmRSS", 0))
