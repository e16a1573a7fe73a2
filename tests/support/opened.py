"""Notes which files of a store a process opens to read tensors, whoever does it and however."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def note_shards(store: str, log: str) -> None:
    """From now on each shard below ``store`` that this process opens to read is a line of ``log``."""
    inside = f"{os.path.realpath(store)}/"

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        path, flags = os.path.realpath(os.fsdecode(args[0])), args[2]
        if not path.startswith(inside) or not path.endswith(".safetensors"):
            return
        if not isinstance(flags, int) or flags & os.O_ACCMODE != os.O_WRONLY:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(descriptor, f"{path}\n".encode())
            os.close(descriptor)

    sys.addaudithook(hook)


def shards_opened(log: str) -> list[str]:
    """Names of all that were noted."""
    try:
        return [Path(line).name for line in Path(log).read_text().splitlines()]
    except FileNotFoundError:
        return []
