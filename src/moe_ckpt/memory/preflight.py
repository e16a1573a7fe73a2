"""What kind of file system memory slots would lie on."""

from __future__ import annotations

import logging
import os

from moe_ckpt.notices import announce

_IN_MEMORY = ("tmpfs", "ramfs")


def file_system(path: str, mounts: str = "/proc/self/mounts") -> str:
    """Type of the file system that ``path`` lies on; empty where the kernel does not say."""
    real, best, kind = os.path.realpath(path), "", ""
    try:
        with open(mounts) as lines:
            for line in lines:
                _, place, found, *_ = line.split()
                place = place.encode().decode("unicode_escape")  # a blank is written \040
                inside = real == place or real.startswith(f"{place.rstrip('/')}/")
                if inside and len(place) >= len(best):
                    best, kind = place, found
    except (OSError, ValueError):
        return ""
    return kind


def say_file_system(root: str) -> None:
    """Warn, once per process and directory, if slots would not lie in memory."""
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


_said: set[str] = set()
