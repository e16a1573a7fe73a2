"""The identity of a file: somebody else may delete it, and make another of the same name."""

from __future__ import annotations

import os
from pathlib import Path

Identity = tuple[int, int]
"""Device and inode."""


def identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def identity_at(path: Path) -> Identity | None:
    """Returns the identity of what has this name now; None if nothing has."""
    try:
        return identity(path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return None
