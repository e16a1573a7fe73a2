"""Checkpoints that the user names by ``ckpt_path``: a step directory, or a store, which means its newest good step."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moe_ckpt.engine.comm import make_communicator
from moe_ckpt.errors import CoverageError, DamagedError, MoECheckpointError, NoCheckpointError
from moe_ckpt.format.manifest import STORE_NAME, Manifest, parse_step_dir
from moe_ckpt.ports import Communicator
from moe_ckpt.recovery.reader import StoreReader, locate, open_step
from moe_ckpt.recovery.replay import dense_checkpoints, require_dense
from moe_ckpt.storage import open_storage

log = logging.getLogger("moe_ckpt")

Loaded = TypeVar("Loaded")
_TIMEOUT_SECS = 600.0
_CANDIDATES = 8
"""Checkpoints of a store that are tried, before all are taken for damaged."""


def is_step_path(path: str | os.PathLike[str] | None) -> bool:
    """True if ``path`` is named like a step directory (or is a link to one)."""
    if path is None:
        return False
    text = os.fspath(path).rstrip("/")
    name = Path(text).resolve().name if "://" not in text else text.rsplit("/", 1)[-1]
    return parse_step_dir(name) is not None


def is_store_path(path: str | os.PathLike[str] | None) -> bool:
    """True if ``path`` is a store of this package. Remote files of others (``.ckpt``) are not looked up."""
    if path is None or os.path.splitext(os.fspath(path))[1] in (".ckpt", ".pt", ".pth"):
        return False
    text = os.fspath(path)
    if text.startswith(("http://", "https://")):
        return False
    if "://" in text:
        return open_storage(text).exists(STORE_NAME)
    return os.path.isdir(text) and bool(
        os.path.exists(os.path.join(text, STORE_NAME)) or any(parse_step_dir(name) for name in os.listdir(text))
    )


def load_named(
    path: str | os.PathLike[str], load: Callable[[StoreReader, Manifest], Loaded], *, fitting: bool
) -> Loaded:
    """Loads what ``path`` names. A collective of all ranks where that is a store, so that they take the same step.

    Args:
        path: For which ``is_step_path`` or ``is_store_path`` holds.
        load: Loads one checkpoint on this rank; called again with an older one of a store if a rank found it damaged.
        fitting: Training goes on from it, so that an older step than the newest would lose some.

    Raises:
        NoCheckpointError: There is no such step, or the store has none that can be used.
        DamagedError: The step that is named is damaged.
        SparseWindowError: The step that is named is no one state of the run; or the newest of the store is not, and
            training was to go on from it.
    """
    if is_step_path(path):
        return load(*open_step(path))
    comm = make_communicator(_TIMEOUT_SECS)
    try:
        return _load_newest(os.fspath(path), load, comm, fitting)
    finally:
        comm.close()


def _load_newest(
    path: str, load: Callable[[StoreReader, Manifest], Loaded], comm: Communicator, fitting: bool
) -> Loaded:
    reader = StoreReader(locate(path)[0])
    problems: list[str] = []
    for directory in _choice(reader, comm, fitting):
        found: list[Loaded] = []
        try:
            found.append(load(reader, reader.manifest(directory)))
        except (DamagedError, CoverageError) as error:
            log.warning("checkpoint %s of %s cannot be used: %s", directory, path, error)
            problems.append(f"{directory}: {error}")
        _, failed = comm.agree(np.zeros(0, dtype=np.int64), np.asarray([not found], dtype=np.int64))
        if not failed[0]:
            return found[0]
    raise NoCheckpointError(f"no checkpoint in {path} can be used: {'; '.join(problems[:4]) or 'see the other ranks'}")


def _choice(reader: StoreReader, comm: Communicator, fitting: bool) -> list[str]:
    """Directories to try, newest first: rank 0 lists them, for the store may be written to meanwhile."""
    error: Exception | None = None
    told: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            told["directories"] = _dense(reader, fitting)
        except (MoECheckpointError, OSError) as found:
            error = found
            told["error"] = f"{type(found).__name__}: {found}"
    told = json.loads(comm.broadcast(json.dumps(told).encode()))
    if error is not None:
        raise error
    if "error" in told:
        raise NoCheckpointError(told["error"])
    return list(told["directories"])


def _dense(reader: StoreReader, fitting: bool) -> list[str]:
    candidates = list(islice(dense_checkpoints(reader), _CANDIDATES))
    newest, windows = candidates[0]
    if windows and fitting:
        require_dense(reader.manifest(windows[0]))
    if windows:
        log.warning(
            "%s is loaded; newer, but a sparse window without one state of all weights: %s",
            newest.directory,
            windows[0],
        )
    return [manifest.directory for manifest, _ in candidates]
