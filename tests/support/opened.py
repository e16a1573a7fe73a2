"""Notes which files of a store each rank opens to read tensors, whoever does it and however."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def note_shards(store: str, log: str, rank: int) -> None:
    """From now on each shard below ``store`` that this process opens to read is a line of ``<log>.<rank>``.

    That there is such a file tells that the process was watched.
    """
    inside = f"{os.path.realpath(store)}/"
    descriptor = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        path, flags = os.path.realpath(os.fsdecode(args[0])), args[2]
        if not path.startswith(inside) or not path.endswith(".safetensors"):
            return
        if not isinstance(flags, int) or flags & os.O_ACCMODE != os.O_WRONLY:
            os.write(descriptor, f"{path}\n".encode())

    sys.addaudithook(hook)


def shards_opened(log: str, ranks: int) -> list[list[str]]:
    """Names of all that were noted, by rank; in all lives of a run.

    Raises:
        FileNotFoundError: Some rank was never watched.
    """
    return [[Path(line).name for line in Path(f"{log}.{rank}").read_text().splitlines()] for rank in range(ranks)]
