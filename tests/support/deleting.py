"""Deletion of directories that threads or processes may still be writing into."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

PATIENCE_SECS = 60.0
"""For a writer that had opened the directory by its old name."""


def delete_tree(path: str | os.PathLike[str]) -> None:
    """Delete a directory at one stroke, as ``shutil.rmtree`` cannot where a file appears in it meanwhile.

    It loses its name first, so that writers find it whole or not at all, and make a new one if they like.

    Raises:
        OSError: it is not there, or something in it cannot be deleted.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.deleted")
    path.rename(aside)
    until = time.monotonic() + PATIENCE_SECS
    while True:
        try:
            shutil.rmtree(aside)
            return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.01)
