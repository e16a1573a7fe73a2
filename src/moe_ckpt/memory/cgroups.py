"""The limits that cgroups set to this process, such as those of a container or of a job: memory, and processors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_LIMITS = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
"""Of cgroup v2 and v1: names of the files with limit and usage, and what names in memory.stat begin with."""
_NO_LIMIT = 1 << 60
"""Version 1 says a number that no machine has."""


def cgroup_bytes(
    root: str = "/sys/fs/cgroup", left_bytes: int = 0, membership: str = "/proc/self/cgroup", *, any_cache: bool = False
) -> int | None:
    """Bytes left under the lowest memory limit of this process's cgroups once ``left_bytes`` are freed; None without.

    Of cgroup v2 and v1, and of every level: a scheduler's limit lies on the job's cgroup, above the process's own.

    Args:
        root: Where cgroups are mounted.
        left_bytes: That will be freed.
        membership: Names the process's cgroups.
        any_cache: Page cache in use makes room, too, and not only what nobody has used lately.
    """
    names = ("inactive_file", "active_file") if any_cache else ("inactive_file",)
    limits = [_left_below(cgroup, left_bytes, names) for cgroup in _cgroups(root, membership, "memory")]
    return min((free for free in limits if free is not None), default=None)


def cores(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int:
    """Returns how many cores this process may keep busy: those that it may run on, and no more than the quota of any of
    its cgroups, below which threads would only take turns.

    Args:
        root: As of ``cgroup_bytes``, and so is ``membership``.
    """
    quotas = [quota for cgroup in _cgroups(root, membership, "cpu") for quota in _quotas(cgroup)]
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def _quotas(cgroup: Path) -> Iterator[float]:
    """Yields the cores of one cgroup's quota, if it has one: of version 2 or 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # there is none, or "max"
            quota, period = map(int, " ".join((cgroup / name).read_text() for name in names).split())
            if quota > 0:
                yield quota / period


def _cgroups(root: str, membership: str, controller: str) -> list[Path]:
    """Where the limits of this process may be. In a container its own cgroup is mounted as the root.

    Args:
        controller: Whose limits, where each has a tree of its own (version 1).
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
    """What one cgroup's limit leaves; None if it has none. reclaimed: page cache of memory.stat that makes room."""
    for limit_name, used_name, prefix in _LIMITS:
        try:
            limit, used = ((cgroup / name).read_text().strip() for name in (limit_name, used_name))
            if limit == "max" or int(limit) >= _NO_LIMIT:
                return None
            # What was left may count elsewhere: in the cgroup of the life that died.
            free = int(limit) - max(0, int(used) - _reclaimed(cgroup, prefix, reclaimed) - left_bytes)
        except (OSError, ValueError):
            continue
        return max(0, free)
    return None


def _reclaimed(cgroup: Path, prefix: str, names: Sequence[str]) -> int:
    """Page cache counts as used, and is reclaimed when memory is needed."""
    try:
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return sum(int(stat.get(prefix + name, 0)) for name in names)
    except (OSError, ValueError):
        return 0
