"""Explains why a path cannot be written, for error messages."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NO_PLACE = (errno.ENOTDIR, errno.EEXIST, errno.ENOENT)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def why_unwritable(path: str | os.PathLike[str], error: OSError) -> str:
    """Returns the end of a sentence: what keeps ``path`` from being written, and what to do.

    Args:
        path: Of what was to be written.
        error: What the attempt raised.
    """
    if error.errno in _NO_PLACE:
        above = [parent for parent in Path(path).absolute().parents if not parent.is_dir()]
        if above:
            highest = above[-1]
            obstacle = (
                f"{highest} is a file, not a directory" if highest.exists() else f"there is no directory {highest}"
            )
            return f"{obstacle}; name another place"
    advice = ""
    if error.errno in _FULL:
        advice = "; make room, or name another place"
    elif error.errno in _CLOSED:
        advice = "; name another place"
    return f"{error.strerror or error}{advice}"
