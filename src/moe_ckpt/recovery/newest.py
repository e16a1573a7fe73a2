"""What a directory holds, asked before anything is opened or built."""

from __future__ import annotations

import logging
import os

from moe_ckpt.errors import DamagedError, NoCheckpointError, StoreError
from moe_ckpt.format.manifest import parse_step_dir
from moe_ckpt.recovery.reader import StoreReader
from moe_ckpt.storage import open_storage

log = logging.getLogger("moe_ckpt")


def newest_step(dirpath: str | os.PathLike[str]) -> int | None:
    """Returns the newest step that a store has a checkpoint of, or None if it has none.

    Reads names and one manifest (the next older one where that is damaged), no tensors; creates, locks and changes
    nothing. For a launcher that must decide, before model and processes exist, whether there is anything to go on from.

    Args:
        dirpath: A store, or a directory or fsspec URL that may become one; it need not exist.

    Returns:
        The step, counted as training counts (iterations in Megatron). A sparse window counts as its last step, though
        training goes on at its first one, and computes the others again.

    Raises:
        NoCheckpointError: There are checkpoints, but no manifest of them can be read: a run would not start either.
        StoreError: The directory cannot be read, or belongs to something else.
    """
    reader = StoreReader(open_storage(os.fspath(dirpath)))
    problems = []
    try:
        names = [name for name in reader.storage.list() if parse_step_dir(name) is not None]
        for directory in reader.directories() if names else ():
            try:
                return reader.manifest(directory).step
            except DamagedError as error:
                log.warning("checkpoint %s is passed over: %s", directory, error)
                problems.append(f"{directory} ({error})")
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"the store {reader.storage.root} cannot be read: {error}") from error
    if problems:
        raise NoCheckpointError(
            f"no manifest in {reader.storage.root} can be read: {'; '.join(problems[:4])}. To start over, move the "
            "directory away or choose another dirpath."
        )
    return None
