"""Checkpoints that the user names, by ``ckpt_path`` or to ``load_from_checkpoint``: a step directory, or a store (its
newest good step)."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.errors import ConfigError, NoCheckpointError
from moe_ckpt.format.manifest import STORE_NAME, Manifest, parse_step_dir
from moe_ckpt.interop.lightning_dict import module_checkpoint
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.newest import dense_checkpoints, require_dense
from moe_ckpt.reading.reader import StoreReader, locate, open_step
from moe_ckpt.reading.step_storage import listed_again
from moe_ckpt.reading.together import (
    DAMAGED,
    NotUsableError,
    by_rank_zero,
    raise_on_all_ranks,
    require_committed,
    together,
)
from moe_ckpt.recovery.named import Opens
from moe_ckpt.storage import open_storage

log = logging.getLogger("moe_ckpt")

Loaded = TypeVar("Loaded")
Module = TypeVar("Module")
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
        StepRemovedError: The named step was removed while it was read, or of a store one after the other.
        UnsupportedError: The named step is a sparse window; or the newest of the store is, and ``fitting``.
        StoreError: Rank 0 could not choose a checkpoint of the store.
    """
    if is_step_path(path):
        return load(*open_step(path))
    return load_named_together(path, lambda comm, opens: together(comm, lambda: load(*opens())), fitting=fitting)


def load_named_together(
    path: str | os.PathLike[str], load: Callable[[Communicator, Opens], Loaded], *, fitting: bool
) -> Loaded:
    """Loads as ``load_named`` does, but in a collective of all ranks for a step, too.

    Args:
        path: As of ``load_named``.
        load: Loads what ``Opens`` opens, on all ranks, which may divide the reading. Raises ``NotUsableError`` on every
            rank, if it failed on any.
        fitting: As of ``load_named``.

    Raises:
        StoreError: Another rank could not load it, with its message; else as ``load_named``.
        PeerLostError: A peer is gone.
    """
    comm = make_communicator(_TIMEOUT_SECS)
    try:
        if is_step_path(path):
            return _load_one(os.fspath(path), load, comm)
        return _load_newest(os.fspath(path), load, comm, fitting)
    finally:
        comm.close()


def _load_one(path: str, load: Callable[[Communicator, Opens], Loaded], comm: Communicator) -> Loaded:
    storage, directory = locate(path)
    try:
        return load(comm, lambda: open_step(path))
    except NotUsableError as error:
        if error.kind == DAMAGED and directory is not None:
            require_committed(comm, StoreReader(storage).storage, directory)
        raise_on_all_ranks(comm, error, path)


def _load_newest(path: str, load: Callable[[Communicator, Opens], Loaded], comm: Communicator, fitting: bool) -> Loaded:
    reader = StoreReader(locate(path)[0])

    def newest() -> Loaded:
        directories = by_rank_zero(comm, lambda: _dense(reader, fitting), f"choose a checkpoint of {path}")
        return _load_first(path, reader, directories, load, comm)

    return listed_again(newest)


def _load_first(
    path: str,
    reader: StoreReader,
    directories: Sequence[str],
    load: Callable[[Communicator, Opens], Loaded],
    comm: Communicator,
) -> Loaded:
    """Loads the first of these steps that can be. Raises ``StepRemovedError``, on every rank, if one was removed."""
    problems: list[str] = []
    for directory in directories:
        try:
            return load(comm, lambda directory=directory: (reader, reader.manifest(directory)))  # type: ignore[misc]
        except NotUsableError as error:
            if error.kind != DAMAGED:
                raise_on_all_ranks(comm, error, f"{path}/{directory}")
            require_committed(comm, reader.storage, directory)
            if error.problem is not None:
                log.warning("checkpoint %s of %s cannot be used: %s", directory, path, error.problem)
                problems.append(f"{directory}: {error.problem}")
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


def load_from_checkpoint(module_class: type[Module], path: str | os.PathLike[str], **options: Any) -> Module:
    """Returns a LightningModule or LightningDataModule made from a checkpoint of this package, for evaluation.

    Like ``module_class.load_from_checkpoint(path)``, which reads single files only. Needs memory for the weights twice.

    Args:
        module_class: The class to make, with the saved hyper-parameters.
        path: A step directory, or a store (its newest good dense step).
        **options: Those of Lightning's ``load_from_checkpoint``: ``map_location``, ``strict``, arguments of the class.

    Raises:
        ConfigError: The arguments are no class and path.
        NoCheckpointError: There is no such step or store; says what is there instead.
        DamagedError: The step's bytes are not intact.
        UnsupportedError: The step is a sparse window.
    """
    if not isinstance(module_class, type) or not isinstance(path, (str, os.PathLike)):
        raise ConfigError(
            f"load_from_checkpoint({_shown(module_class)}, {_shown(path)}): give the class first and the path second: "
            "load_from_checkpoint(LitModel, 'checkpoints/my_run')"
        )
    if not (is_step_path(path) or is_store_path(path)):
        raise NoCheckpointError(f"{os.fspath(path)} is {_other(os.fspath(path), module_class.__name__)}")
    file = io.BytesIO()
    torch.save(load_named(path, module_checkpoint, fitting=False), file)
    file.seek(0)
    loaded: Module = module_class.load_from_checkpoint(file, **options)  # type: ignore[attr-defined]
    return loaded


def _shown(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


def _other(path: str, name: str) -> str:
    """Returns what is at a path that is neither a step nor a store, and what opens that."""
    files = os.listdir(path) if os.path.isdir(path) else [os.path.basename(path)]
    if _any(files, ".safetensors"):
        return (
            "an export (safetensors), which holds weights and no hyper-parameters. Build the model yourself "
            "(from_pretrained opens the export of a transformers model), set weights_from= to train from it, or pass "
            f"the step that it was exported from to load_from_checkpoint({name}, ...)"
        )
    if _any(files, ".metadata", ".distcp"):
        return (
            "a checkpoint of torch.distributed.checkpoint, such as moe-ckpt export --to dcp writes: open it with that "
            f"library, or pass the step that it was exported from to load_from_checkpoint({name}, ...)"
        )
    return (
        "neither a step directory nor a store of moe_ckpt. Files of Lightning (.ckpt) are read by "
        f"{name}.load_from_checkpoint"
    )


def _any(files: Iterable[str], *endings: str) -> bool:
    return any(file.endswith(endings) for file in files)
