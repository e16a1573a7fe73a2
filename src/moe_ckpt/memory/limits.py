"""The memory and the processors that are left to this process: by cgroups, such as those of a container or of a job, on
the machine, and on the file system of slots.

Read when a run opens, for its budget and for a warning, and before memory is made for something other than a rank's own
snapshots.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_ckpt.errors import LARGER_FILE_SYSTEM, MemoryFullError
from moe_ckpt.notices import announce

log = logging.getLogger("moe_ckpt")

_LIMITS = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
"""For cgroup v2 and v1: names of the files with limit and usage, and the prefix of names in memory.stat."""
_NO_LIMIT = 1 << 60
"""Version 1 gives a number beyond any machine's memory where there is no limit."""
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


def cgroup_bytes(
    root: str = "/sys/fs/cgroup", left_bytes: int = 0, membership: str = "/proc/self/cgroup", *, any_cache: bool = False
) -> int | None:
    """Returns the bytes that the memory limits of this process's cgroups leave; None without a limit.

    Versions 2 and 1 count, and every level: a scheduler sets its limit on the job's cgroup, above the process's own.

    Args:
        root: Mount point of the cgroups.
        left_bytes: Bytes in use that will be freed.
        membership: File with the names of the process's cgroups.
        any_cache: Count all page cache as free, and not only pages that were not used lately.
    """
    names = ("inactive_file", "active_file") if any_cache else ("inactive_file",)
    limits = [_left_below(cgroup, left_bytes, names) for cgroup in _cgroups(root, membership, "memory")]
    return min((free for free in limits if free is not None), default=None)


def cores(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int:
    """Returns how many cores this process may keep busy: the cores that it may run on, but at most the quota of its
    cgroups, beyond which threads would only take turns.

    Args:
        root, membership: See ``cgroup_bytes``.
    """
    quotas = [quota for cgroup in _cgroups(root, membership, "cpu") for quota in _quotas(cgroup)]
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def _quotas(cgroup: Path) -> Iterator[float]:
    """Yields the quota of one cgroup in cores, if it has one."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # there is none, or "max"
            quota, period = map(int, " ".join((cgroup / name).read_text() for name in names).split())
            if quota > 0:
                yield quota / period


def _cgroups(root: str, membership: str, controller: str) -> list[Path]:
    """Returns the directories that may have limits of this process. In a container, the root is its own cgroup.

    Args:
        controller: Kind of limits; each kind has a tree of its own in version 1.
    """
    places = [Path(root), Path(root, controller)]
    with contextlib.suppress(OSError, ValueError), open(membership) as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers == "" or controller in controllers.split(","):
                inside = Path(path.lstrip("/"))
                bases = [Path(root, name) for name in ((controllers, controller) if controllers else ("", "unified"))]
                places += (base / folder for base in bases for folder in (inside, *inside.parents))
    return list(dict.fromkeys(places))


def _left_below(cgroup: Path, left_bytes: int, reclaimed: Sequence[str]) -> int | None:
    """Returns the bytes that one cgroup's limit leaves; None without a limit.

    Args:
        reclaimed: Names in memory.stat of page cache that counts as free.
    """
    for limit_name, used_name, prefix in _LIMITS:
        try:
            limit, used = ((cgroup / name).read_text().strip() for name in (limit_name, used_name))
            if limit == "max" or int(limit) >= _NO_LIMIT:
                return None
            # Memory that will be freed may count in another cgroup: that of the life that died.
            free = int(limit) - max(0, int(used) - _reclaimed(cgroup, prefix, reclaimed) - left_bytes)
        except (OSError, ValueError):
            continue
        return max(0, free)
    return None


def _reclaimed(cgroup: Path, prefix: str, names: Sequence[str]) -> int:
    """Returns the bytes of page cache that the kernel reclaims when memory is needed; they count as used."""
    try:
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return sum(int(stat.get(prefix + name, 0)) for name in names)
    except (OSError, ValueError):
        return 0


def available_bytes(meminfo: str = "/proc/meminfo") -> int | None:
    """Returns the bytes of the machine's memory that are available without swapping; None if unknown.

    A tmpfs may be as large as the machine's memory, or larger, so that its own free space is no limit.
    """
    return _sizes_in(meminfo).get("MemAvailable")


def _sizes_in(path: str) -> dict[str, int]:
    """Returns name -> bytes of what the kernel tells in kB; nothing if there is no such file."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError), open(path) as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if value.endswith(" kB\n"):
                sizes[name] = int(value.split()[0]) * 1024
    return sizes


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


def _least_free() -> tuple[int | None, str]:
    """Returns the fewest bytes that a limit leaves, and that limit; None if no limit is known."""
    limits = (cgroup_bytes(any_cache=True), CGROUP), (available_bytes(), MACHINE)
    return min(((free, name) for free, name in limits if free is not None), default=(None, ""))


def requires_room(path: Path, local_ranks: int, unmade: Callable[[], int] | None = None) -> Callable[[int], None]:
    """Returns a function to call before memory is made: the kernel kills processes where a tmpfs exceeds the machine's
    memory or a cgroup's limit.

    All ranks of the node make theirs at about the same time, and each process may grow to its largest size once more.
    For a copy of another rank's snapshot there must also be room for two such copies of each rank, since a holder keeps
    two of a rank, and for the budgets of the node's ranks, which are taken to be alike.

    Args:
        path: Directory of the slots.
        local_ranks: Ranks of the node.
        unmade: Returns the bytes of this rank's budget that are not made yet, if copies are to be made; None for what a
            rank seals when training stops.
    """
    counts, warned = lies_in_memory(str(path)), set[str]()

    def require(nbytes: int) -> None:
        """Raises ``MemoryFullError`` if the job's cgroup, or the machine, may have no room for so many bytes."""
        free, limit = _least_free() if counts else (None, "")
        if free is None:
            return
        again = _once_more_bytes()
        if unmade is None:
            room = free - (local_ranks - 1) * (nbytes + again) - _BESIDE_NBYTES
            hint = f"That is what {limit} leaves beside {local_ranks - 1} other ranks. {_mend(limit)}"
        else:
            unused_nbytes = unmade()
            room = free - local_ranks * (unused_nbytes + again) - (_COPIES * local_ranks - 1) * nbytes
            hint = (
                f"{limit} leaves {free:,} bytes, and each rank of this node ({local_ranks}) may still take "
                f"{unused_nbytes:,} bytes of its budget for its own snapshots, and {again:,} bytes as at its largest. "
                f"{_mend(limit)}, or replicas"
            )
        if room >= nbytes:
            return
        if unmade is not None and not warned:
            warned.add(hint)
            log.warning("no copy of another rank's snapshot (%s bytes) is kept here: %s", f"{nbytes:,}", hint)
        raise MemoryFullError(str(path), nbytes, max(0, room), hint)

    return require


def _mend(limit: str) -> str:
    """Returns what to do if ``limit`` leaves too little, for people."""
    return f"{RAISE_LIMIT}, or lower host_memory_bytes" if limit == CGROUP else "Lower host_memory_bytes"


def _once_more_bytes() -> int:
    """Returns the bytes by which this process was larger at its peak, as it will be again (gradients); 0 if unknown."""
    sizes = _sizes_in("/proc/self/status")
    return max(0, sizes.get("VmHWM", 0) - sizes.get("VmRSS", 0))
