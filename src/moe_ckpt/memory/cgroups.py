"""The limits that cgroups set to this process, such as those of a container or of a job: memory, and processors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_LIMITS = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
"""For cgroup v2 and v1: names of the files with limit and usage, and the prefix of names in memory.stat."""
_NO_LIMIT = 1 << 60
"""Version 1 gives a number beyond any machine's memory where there is no limit."""


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
