"""Names of the files of upstream logs, which lie beside the slots of a rank: messages, and a header written last."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

MESSAGES_SUFFIX, SEALED_SUFFIX = ".messages", ".sealed"
_NAME = re.compile(r"upstream_\d{8,}")


def log_path(directory: Path, step: int) -> Path:
    """Returns where the log of a step lies, without a suffix."""
    return directory / f"upstream_{step:08d}"


def is_log(name: str, siblings: Collection[str]) -> bool:
    """Returns whether a file is of a sealed log.

    Args:
        siblings: Names of all files of its directory.
    """
    path = Path(name)
    is_named = _NAME.fullmatch(path.stem) is not None and path.suffix in (MESSAGES_SUFFIX, SEALED_SUFFIX)
    return is_named and all(path.stem + suffix in siblings for suffix in (MESSAGES_SUFFIX, SEALED_SUFFIX))
