"""The record of a finished run: written by rank 0 when training ended well, read by all when it is started again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from moe_ckpt.engine.documents import read_commit, read_sealed
from moe_ckpt.errors import DamagedError, FormatVersionError, StoreError
from moe_ckpt.format.finished import FINISHED_NAME, Finished
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.ports import Communicator
from moe_ckpt.storage.base import Storage

log = logging.getLogger("moe_ckpt")


def write_finished(
    storage: Storage, newest: str, reason: str, limits: Mapping[str, int], callbacks: Mapping[str, Any]
) -> None:
    """Note the end of the run. Called on rank 0, after the last checkpoint was committed.

    What cannot be written is warned of and costs little: the end of the last epoch is then done again.

    Args:
        storage: Of the run.
        newest: Directory of the last checkpoint.
        reason: See ``Finished``, as for the other arguments.
        limits: Likewise.
        callbacks: Likewise.
    """
    try:
        last = read_commit(storage, newest)
        finished = Finished(last.run_id, last.step, last.generation, reason, limits, callbacks)
        storage.delete(FINISHED_NAME)
        storage.write(FINISHED_NAME, [finished.encode()])
    except (OSError, StoreError) as error:
        log.warning(
            "cannot record in %s that this run is finished: %s. Its checkpoints are complete; if started again, it "
            "will repeat the end of its last epoch",
            storage.root,
            error,
        )


def read_finished(storage: Storage, comm: Communicator, manifest: Manifest) -> Finished | None:
    """Returns the end of the run whose newest checkpoint is ``manifest``; None if nothing says that it ended there.

    A collective, called by all ranks before training.
    """
    raw = comm.broadcast(_read(storage) if comm.rank == 0 else b"")
    if not raw:
        return None
    finished = Finished.decode(raw, FINISHED_NAME)
    end = (finished.run_id, finished.step, finished.generation)
    return finished if end == (manifest.run_id, manifest.step, manifest.generation) else None


def _read(storage: Storage) -> bytes:
    """The document, if there is one that can be used."""
    try:
        raw = bytes(read_sealed(storage, FINISHED_NAME))
        Finished.decode(raw, FINISHED_NAME)
        return raw
    except FileNotFoundError:
        return b""
    except (OSError, DamagedError, FormatVersionError) as error:
        log.warning("%s of %s cannot be used: %s. The run is treated as unfinished", FINISHED_NAME, storage.root, error)
        return b""
