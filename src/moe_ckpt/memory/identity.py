"""Which file a name stands for: somebody else may delete it, and make another of the same name."""

from __future__ import annotations

import os
from pathlib import Path

Identity = tuple[int, int]
"""Device and inode."""


def identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def identity_at(path: Path) -> Identity | None:
    """Of what has this name now; None if nothing has."""
    try:
        return identity(path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return None
