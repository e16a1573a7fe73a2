"""Slots beyond what a rank usually takes: only while the machine, and the cgroup of the job, have room for them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from moe_ckpt.errors import MemoryFullError
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.preflight import CGROUP, MACHINE, RAISE_LIMIT, lies_in_memory
from moe_ckpt.memory.slot import Slot
from moe_ckpt.tiers import cgroups
from moe_ckpt.tiers.buffers import BufferPool

log = logging.getLogger("moe_ckpt")

_BESIDE_NBYTES = 16 << 20
"""That sealing takes for headers and plain states, roughly."""
_COPIES = 2
"""Of one rank on its holder: the newest that is complete, and the one that comes in."""


class LimitedSlots:
    """Makes slots for copies of other ranks. A tmpfs takes the machine's memory, and counts in a cgroup; where either
    has none left, processes end without an error.

    So a copy is refused unless there is still left what the ranks of this node may take by their budgets, what
    they had at their largest in a step and will have again, and two slots of that size for each of them: they make
    theirs at the same time, and a holder keeps two copies of a rank.

    Args:
        files: Makes the slots.
        pool: Of this rank. The others of the node have taken as much of as large a budget.
        local_ranks: Of the node.
    """

    def __init__(self, files: MemoryFiles, pool: BufferPool, local_ranks: int) -> None:
        self._files, self._pool, self._ranks = files, pool, local_ranks
        self._counts = lies_in_memory(str(files.path))
        self._said = False

    def make(self, nbytes: int) -> Slot:
        """A new slot, on any thread.

        Raises:
            MemoryFullError: There is no room for it, on the file system or under the limit.
            OSError: It cannot be made.
        """

        def require(_: int) -> None:
            """Checks the room for the whole copy, although the arena lacks less."""
            free, limit = _least_free() if self._counts else (None, "")
            if free is not None:
                unused_budget = max(0, self._pool.budget_bytes - self._pool.held_bytes)
                again = _once_more_bytes()
                room = free - self._ranks * (unused_budget + again) - (_COPIES * self._ranks - 1) * nbytes
                if room < nbytes:
                    self._say(nbytes, limit, free, unused_budget, again)
                    raise MemoryFullError(str(self._files.path), nbytes, max(0, room))

        return self._files.make(nbytes, require)

    def _say(self, nbytes: int, limit: str, free: int, unused_budget: int, again: int) -> None:
        if self._said:
            return
        self._said = True
        log.warning(
            "no copy of another rank's snapshot (%s bytes) is kept here: %s leaves %s bytes, and each rank of this "
            "node (%d) may still take %s bytes of its budget (%s) for its own snapshots, and %s bytes as at its "
            "largest. %s, or replicas",
            *(f"{nbytes:,}", limit, f"{free:,}", self._ranks, f"{unused_budget:,}", f"{self._pool.budget_bytes:,}"),
            *(f"{again:,}", _mend(limit)),
        )


def _least_free() -> tuple[int | None, str]:
    """(bytes left, what leaves no more than these); None where nothing says."""
    limits = (cgroups.free_bytes(any_cache=True), CGROUP), (cgroups.available_bytes(), MACHINE)
    return min(((free, name) for free, name in limits if free is not None), default=(None, ""))


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
        """Raises ``MemoryFullError`` if the job's cgroup, or the machine, may have no room for so many bytes."""
        free, limit = _least_free() if counts else (None, "")
        if free is None:
            return
        room = free - (local_ranks - 1) * (nbytes + _once_more_bytes()) - _BESIDE_NBYTES
        if room < nbytes:
            hint = f"That is what {limit} leaves beside {local_ranks - 1} other ranks. {_mend(limit)}"
            raise MemoryFullError(str(path), nbytes, max(0, room), hint)

    return require


def _mend(limit: str) -> str:
    """What to do where ``limit`` leaves too little."""
    return f"{RAISE_LIMIT}, or lower host_memory_bytes" if limit == CGROUP else "Lower host_memory_bytes"


def _once_more_bytes() -> int:
    """Bytes by which this process was larger at its peak: gradients will take them again. 0 if unknown."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS"):
                sizes[name] = int(value.split()[0]) * 1024
    return max(0, sizes.get("VmHWM", 0) - sizes.get("VmRSS", 0))
