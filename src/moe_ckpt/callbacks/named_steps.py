"""Checkpoints that the user names by ``ckpt_path``: a step directory, or a store (its newest good step)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TypeVar

from moe_ckpt.comm.communicator import largest, make_communicator
from moe_ckpt.errors import CoverageError, DamagedError, NoCheckpointError
from moe_ckpt.format.manifest import STORE_NAME, Manifest, parse_step_dir
from moe_ckpt.ports import Communicator
from moe_ckpt.recovery.newest import dense_checkpoints, require_dense
from moe_ckpt.recovery.reader import StoreReader, locate, open_step
from moe_ckpt.recovery.together import by_rank_zero
from moe_ckpt.storage import open_storage

log = logging.getLogger("moe_ckpt")

Loaded = TypeVar("Loaded")
_TIMEOUT_SECS = 600.0
_CANDIDATES = 8
"""Most checkpoints of a store that are tried."""


def is_step_path(path: str | os.PathLike[str] | None) -> bool:
    """Returns whether ``path`` is named like a step directory, or is a link to one."""
    if path is None:
        return False
    text = os.fspath(path).rstrip("/")
    name = Path(text).resolve().name if "://" not in text else text.rsplit("/", 1)[-1]
    return parse_step_dir(name) is not None


def is_store_path(path: str | os.PathLike[str] | None) -> bool:
    """Returns whether ``path`` is a store of this package. Looks up no remote file of others (``.ckpt``)."""
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
    """Loads what ``path`` names. For a store a collective of all ranks, so that they take the same step.

    Args:
        path: For which ``is_step_path`` or ``is_store_path`` holds.
        load: Loads one checkpoint on this rank; called with an older one of a store if any rank found it damaged.
        fitting: Training goes on from it, so that no sparse window that is newer may be skipped.

    Raises:
        NoCheckpointError: There is no such step, or the store has none that can be used.
        DamagedError: The named step is damaged.
        SparseWindowError: The named step is a sparse window; or the newest of the store is, and ``fitting``.
        StoreError: Rank 0 could not choose a checkpoint of the store.
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
    for directory in by_rank_zero(comm, lambda: _dense(reader, fitting), f"choose a checkpoint of {path}"):
        found: list[Loaded] = []
        try:
            found.append(load(reader, reader.manifest(directory)))
        except (DamagedError, CoverageError) as error:
            log.warning("checkpoint %s of %s cannot be used: %s", directory, path, error)
            problems.append(f"{directory}: {error}")
        [failed] = largest(comm, [not found])
        if not failed:
            return found[0]
    raise NoCheckpointError(f"no checkpoint in {path} can be used: {'; '.join(problems[:4]) or 'see the other ranks'}")


def _dense(reader: StoreReader, fitting: bool) -> list[str]:
    """Returns the directories to try, newest first."""
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
