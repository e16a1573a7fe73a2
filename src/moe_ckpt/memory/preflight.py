"""Checks the file system on which memory slots would lie, and whether it has room for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from moe_ckpt.errors import LARGER_FILE_SYSTEM
from moe_ckpt.notices import announce

CGROUP, MACHINE = "the memory limit of this job's cgroup", "the memory of this machine"
"""What can leave less room than a tmpfs has."""
RAISE_LIMIT = "Raise the limit (Docker: --memory; Kubernetes: resources.limits.memory; SLURM: --mem)"
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class RoomNeeded:
    """The room that the slots of a node's ranks need.

    Attributes:
        share_bytes: Of one rank's share of a complete checkpoint.
        snapshots: That a rank holds at once.
        budget_bytes: The most that a rank's own may take.
        copies: Of how many ranks of other nodes the node's ranks hold copies, all of them together.
        ranks: Of the node.
        is_estimated: Optimizer state that is not there yet is in ``share_bytes``.
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
        """Says what the number is made of."""
        text = f"{self.snapshots} snapshots of {self.share_bytes:,} bytes on each rank"
        if self.is_estimated:
            text += ", which counts two moments per weight that the optimizer has yet to make"
        if self.budget_bytes < self.snapshots * self.share_bytes:
            text += f", within a budget of {self.budget_bytes:,}"
        if self.copies:
            text += f", and as many of each rank whose copies lie on this node ({self.copies})"
        return text


def say_room(root: str, needed: RoomNeeded, free: int, limits: Mapping[str, int | None]) -> None:
    """Warn, once per process and directory, if slots would find no room.

    Args:
        root: The memory directory.
        needed: By all slots of this node.
        free: Bytes of its file system, with those that earlier lives of the run left and this one takes over.
        limits: Likewise what ``CGROUP`` and ``MACHINE`` leave this process, where a tmpfs counts; None where nothing
            limits it.
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
    """Type of the file system that ``path`` lies on; empty where the kernel does not say."""
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
    """Returns whether files below ``path`` take memory, which then counts in cgroups."""
    return file_system(path) in _IN_MEMORY


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


_said: set[str | tuple[str, str]] = set()
