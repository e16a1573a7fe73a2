"""How much memory a container, or a scheduler's job, still leaves this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

_LIMITS = (("memory.max", "memory.current", "inactive_file"), ("memory.limit_in_bytes", "memory.usage_in_bytes", ""))
"""Of cgroup v2 and v1: names of the files with limit and usage, and what of memory.stat the kernel gives back."""
_NO_LIMIT = 1 << 60
"""Version 1 says a number that no machine has."""


def free_bytes(root: str = "/sys/fs/cgroup", left_bytes: int = 0, own: str = "/proc/self/cgroup") -> int | None:
    """Bytes left under the lowest memory limit of this process's cgroups once ``left_bytes`` are freed; None without.

    Of cgroup v2 and v1, and of every level: a scheduler's limit lies on the job's cgroup, above the process's own.
    """
    found = [_left_below(place, left_bytes) for place in _cgroups(root, own)]
    return min((free for free in found if free is not None), default=None)


def _cgroups(root: str, own: str) -> list[Path]:
    """Where the limits of this process may be. In a container its own cgroup is mounted as the root."""
    places = [Path(root), Path(root, "memory")]
    with contextlib.suppress(OSError, ValueError), open(own) as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers in ("", "memory"):
                inside = Path(path.lstrip("/"))
                bases = (Path(root, controllers), Path(root, "unified")) if not controllers else (Path(root, "memory"),)
                places += (base / each for base in bases for each in (inside, *inside.parents))
    return list(dict.fromkeys(places))


def _left_below(place: Path, left_bytes: int) -> int | None:
    """What one cgroup's limit leaves; None if it has none."""
    for limit_name, used_name, reclaimed in _LIMITS:
        try:
            limit, used = ((place / name).read_text().strip() for name in (limit_name, used_name))
            if limit == "max" or int(limit) >= _NO_LIMIT:
                return None
            # What was left may count elsewhere: in the cgroup of the life that died.
            free = int(limit) - max(0, int(used) - _reclaimed(place, reclaimed) - left_bytes)
        except (OSError, ValueError):
            continue
        return max(0, free)
    return None


def _reclaimed(place: Path, name: str) -> int:
    """Page cache that was not used lately counts as used, and makes room when it is needed."""
    try:
        stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        return int(stat[name or "total_inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0
