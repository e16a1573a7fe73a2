"""The memory that is left: on the file system, below the limit of a container or job, and on the machine.

Read when a run opens, for its budget and for a warning, and before a slot is made for something other than a rank's own
snapshots.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_ckpt.errors import LARGER_FILE_SYSTEM, MemoryFullError
from moe_ckpt.memory.cgroups import cgroup_bytes
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.slot import Slot
from moe_ckpt.notices import announce
from moe_ckpt.tiers.buffers import BufferPool

log = logging.getLogger("moe_ckpt")

_SHARE_OF_FREE_MEMORY = 0.5
CGROUP, MACHINE = "the memory limit of this job's cgroup", "the memory of this machine"
"""Limits that may leave less memory than a tmpfs has."""
RAISE_LIMIT = "Raise the limit (Docker: --memory; Kubernetes: resources.limits.memory; SLURM: --mem)"
_IN_MEMORY = ("tmpfs", "ramfs")
_said: set[str | tuple[str, str]] = set()
"""Directories for which this process has logged a warning."""
_BESIDE_NBYTES = 16 << 20
"""Bytes that headers and plain states take, roughly."""
_COPIES = 2
"""Copies of one rank that a holder has at once: the newest complete one, and the one that arrives."""


def available_bytes(meminfo: str = "/proc/meminfo") -> int | None:
    """Returns the bytes of the machine's memory that are available without swapping; None if unknown.

    A tmpfs may be as large as the machine's memory, or larger, so that its own free space is no limit.
    """
    with contextlib.suppress(OSError, ValueError), open(meminfo) as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return None


def default_budget_bytes(local_ranks: int, left_bytes: int = 0) -> int:
    """Returns one rank's share of half of the memory that is available on this host, within the cgroup's limit.

    Page cache counts as free, since the kernel frees it when memory is needed: a data set that was read must not make
    the budget smaller.

    Args:
        local_ranks: Ranks of this host.
        left_bytes: Bytes of snapshots of earlier lives on this host, whose place the new buffers take.
    """
    free = available_bytes()
    if free is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_bytes(left_bytes=left_bytes)
    usable = free + left_bytes if limit is None else min(free + left_bytes, limit)
    return int(usable * _SHARE_OF_FREE_MEMORY) // max(1, local_ranks)


@dataclass(frozen=True)
class RoomNeeded:
    """The memory that the slots of a node's ranks need.

    Attributes:
        share_bytes: One rank's share of a complete checkpoint.
        snapshots: Snapshots that a rank holds at once.
        budget_bytes: The most bytes of one rank's own snapshots.
        copies: Copies of ranks of other nodes that the node holds.
        ranks: Ranks of the node.
        is_estimated: ``share_bytes`` counts optimizer state that does not exist yet.
    """

    share_bytes: int
    snapshots: int
    budget_bytes: int
    copies: int
    ranks: int
    is_estimated: bool = False

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the node."""
        return min(self.snapshots * self.share_bytes, self.budget_bytes) * (self.ranks + self.copies)

    def explained(self) -> str:
        """Returns how ``nbytes`` comes about, for people."""
        text = f"{self.snapshots} snapshots of {self.share_bytes:,} bytes on each rank"
        if self.is_estimated:
            text += ", which counts two moments per weight that the optimizer has yet to make"
        if self.budget_bytes < self.snapshots * self.share_bytes:
            text += f", within a budget of {self.budget_bytes:,}"
        if self.copies:
            text += f", and as many of each rank whose copies lie on this node ({self.copies})"
        return text


def say_room(root: str, needed: RoomNeeded, free: int, limits: Mapping[str, int | None]) -> None:
    """Warns, once per process and directory, if there is not enough memory for slots.

    Args:
        root: The memory directory.
        needed: By all slots of this node.
        free: Bytes of the file system, with those of slots that this life takes over.
        limits: The same for ``CGROUP`` and ``MACHINE``, which limit a tmpfs; None without a limit.
    """
    bounds = [(nbytes, name) for name, nbytes in limits.items() if nbytes is not None] if lies_in_memory(root) else []
    short, name = min([(free, ""), *bounds])
    if needed.nbytes <= short or (root, "room") in _said:
        return
    _said.add((root, "room"))
    where, mend = f"has {free:,} bytes free", LARGER_FILE_SYSTEM
    if name:
        where, mend = f"{where}, but {name} leaves {short:,}", RAISE_LIMIT if name == CGROUP else "Use more nodes"
    budget = short // (needed.ranks + needed.copies)
    announce(
        "Memory(directory=%r) %s, and the slots of this node's ranks (%d) will need about %s: %s. Snapshots that find "
        "no room there lie in private memory, and do not survive their process. %s%s",
        root,
        where,
        needed.ranks,
        f"{needed.nbytes:,}",
        needed.explained(),
        mend,
        f", or set host_memory_bytes to {budget}" if budget >= needed.share_bytes else "",
        level=logging.WARNING,
    )


def file_system(path: str, mounts: str = "/proc/self/mounts") -> str:
    """Returns the type of the file system of ``path``; empty where the kernel does not tell."""
    real, best, kind = os.path.realpath(path), "", ""
    try:
        with open(mounts) as lines:
            for line in lines:
                _, mount_point, fs_type, *_ = line.split()
                mount_point = mount_point.encode().decode("unicode_escape")  # a blank is written \040
                inside = real == mount_point or real.startswith(f"{mount_point.rstrip('/')}/")
                if inside and len(mount_point) >= len(best):
                    best, kind = mount_point, fs_type
    except (OSError, ValueError):
        return ""
    return kind


def lies_in_memory(path: str) -> bool:
    """Returns whether files below ``path`` are in memory, which counts in cgroups."""
    return file_system(path) in _IN_MEMORY


def say_file_system(root: str) -> None:
    """Warns, once per process and directory, if the directory of slots is not in memory."""
    kind = file_system(root)
    if kind and kind not in _IN_MEMORY and root not in _said:
        _said.add(root)
        announce(
            "Memory(directory=%r) lies on %s, not on a tmpfs: snapshots are copied at the speed of that file system. "
            "They survive the process, but perhaps not a crash of the machine, because they are not synced",
            root,
            kind,
            level=logging.WARNING,
        )


class LimitedSlots:
    """Makes slots for copies of other ranks, unless too little memory would be left: the kernel kills processes where a
    tmpfs exceeds the machine's memory or a cgroup's limit.

    A copy is refused unless the memory has room for the unused budgets of all ranks of the node, for what each process
    had in addition at its largest, as it will have again, and for two such copies of each rank: all ranks make theirs
    at the same time, and a holder keeps two copies of a rank.

    Args:
        files: Makes the slots.
        pool: Of this rank; the other ranks of the node are taken to have the same budget, and as much of it unused.
        local_ranks: Ranks of the node.
    """

    def __init__(self, files: MemoryFiles, pool: BufferPool, local_ranks: int) -> None:
        self._files, self._pool, self._ranks = files, pool, local_ranks
        self._counts = lies_in_memory(str(files.path))
        self._said = False

    def make(self, nbytes: int) -> Slot:
        """Makes a slot. On any thread.

        Raises:
            MemoryFullError: There is no room on the file system, or below a limit.
            OSError: The slot cannot be made.
        """

        def require(_: int) -> None:
            """Checks the room for the whole copy, although the arena lacks less."""
            free, limit = _least_free() if self._counts else (None, "")
            if free is not None:
                unused_budget = max(0, self._pool.budget_bytes - self._pool.held_bytes)
                again = _once_more_bytes()
                room = free - self._ranks * (unused_budget + again) - (_COPIES * self._ranks - 1) * nbytes
                if room < nbytes and not self._said:
                    self._said = True
                    log.warning(
                        "no copy of another rank's snapshot (%s bytes) is kept here: %s leaves %s bytes, and each rank "
                        "of this node (%d) may still take %s bytes of its budget (%s) for its own snapshots, and %s "
                        "bytes as at its largest. %s, or replicas",
                        *(f"{nbytes:,}", limit, f"{free:,}", self._ranks, f"{unused_budget:,}"),
                        *(f"{self._pool.budget_bytes:,}", f"{again:,}", _mend(limit)),
                    )
                if room < nbytes:
                    raise MemoryFullError(str(self._files.path), nbytes, max(0, room))

        return self._files.make(nbytes, require)


def _least_free() -> tuple[int | None, str]:
    """Returns the fewest bytes that a limit leaves, and that limit; None if no limit is known."""
    limits = (cgroup_bytes(any_cache=True), CGROUP), (available_bytes(), MACHINE)
    return min(((free, name) for free, name in limits if free is not None), default=(None, ""))


def requires_room(path: Path, local_ranks: int) -> Callable[[int], None]:
    """Returns a function to call before memory is made for a snapshot that a rank seals when training stops.

    All ranks of the node make theirs at about the same time, and those that do not know of the failure yet may still
    grow to their largest size.

    Args:
        path: Directory of the slots.
        local_ranks: Ranks of the node.
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
    """Returns what to do if ``limit`` leaves too little, for people."""
    return f"{RAISE_LIMIT}, or lower host_memory_bytes" if limit == CGROUP else "Lower host_memory_bytes"


def _once_more_bytes() -> int:
    """Returns the bytes by which this process was larger at its peak, as it will be again (gradients); 0 if unknown."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS"):
                sizes[name] = int(value.split()[0]) * 1024
    return max(0, sizes.get("VmHWM", 0) - sizes.get("VmRSS", 0))
