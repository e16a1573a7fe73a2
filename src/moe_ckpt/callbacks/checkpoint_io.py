"""Loads checkpoints that the user names, by ``ckpt_path=`` or to ``load_from_checkpoint``.

The name is that of a step directory, or of a store (its newest good step). A CheckpointIO opens them, so ``ckpt_path=``
takes them everywhere.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch.optim import Optimizer

from moe_ckpt.callbacks.compat import PATH
from moe_ckpt.callbacks.lightning_state import check_state
from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.driver.host import loading_state
from moe_ckpt.errors import ConfigError, NoCheckpointError
from moe_ckpt.format.manifest import STORE_NAME, Manifest, parse_step_dir, state_path
from moe_ckpt.interop.whole import WholeCheckpoint, lightning_dict, module_checkpoint, open_lightning
from moe_ckpt.modeling.optimizer_state import require_same_class
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.collective import (
    DAMAGED,
    NotUsableError,
    on_all_ranks,
    on_rank_zero,
    raise_on_all_ranks,
    require_committed,
)
from moe_ckpt.reading.reader import StoreReader, choose_dense, locate, open_step, require_dense, split_step
from moe_ckpt.reading.step_storage import listed_again
from moe_ckpt.recovery.executing import rank_of_state
from moe_ckpt.recovery.resume import Opens, load_step, whole_tensors
from moe_ckpt.storage import open_storage

log = logging.getLogger("moe_ckpt")

Loaded = TypeVar("Loaded")
Module = TypeVar("Module")
_TIMEOUT_SECS = 600.0
_CANDIDATES = 8
"""How many checkpoints of a store are tried at most."""


def is_checkpoint(path: str | os.PathLike[str] | None) -> bool:
    """Returns whether ``path`` names a step directory, or is a store of this package.

    Files of Lightning and torch, by their endings, are not.
    """
    if path is None:
        return False
    text = os.fspath(path)
    if split_step(text)[1] is not None:
        return True
    if os.path.splitext(text)[1] in (".ckpt", ".pt", ".pth") or text.startswith(("http://", "https://")):
        return False
    if "://" in text:
        return open_storage(text).exists(STORE_NAME)
    return os.path.isdir(text) and bool(
        os.path.exists(os.path.join(text, STORE_NAME)) or any(parse_step_dir(name) for name in os.listdir(text))
    )


def load_named(path: str | os.PathLike[str], load: Callable[[StoreReader, Manifest], Loaded]) -> Loaded:
    """Loads the checkpoint at ``path``, not to train on. For a store a collective, so that ranks load the same step.

    Args:
        path: One for which ``is_checkpoint`` holds.
        load: Loads one checkpoint on this rank; called with an older one of a store if any rank found it damaged.

    Raises:
        NoCheckpointError: There is no such step, or the store has none that can be used.
        DamagedError: The named step is damaged.
        StepRemovedError: The named step, or each step of the store in turn, was removed while it was read.
        UnsupportedError: The named step is a sparse window.
        StoreError: Rank 0 could not choose a checkpoint of the store.
    """
    if split_step(path)[1] is not None:
        return load(*open_step(path))
    return load_named_together(path, lambda comm, opens: on_all_ranks(comm, lambda: load(*opens())), fitting=False)


def load_named_together(
    path: str | os.PathLike[str], load: Callable[[Communicator, Opens], Loaded], *, fitting: bool
) -> Loaded:
    """Loads the checkpoint at ``path`` in a collective of all ranks.

    Args:
        path: As of ``load_named``.
        load: Loads the checkpoint that ``Opens`` opens, on all ranks, which may divide the reading. Raises
            ``NotUsableError`` on every rank if it failed on any.
        fitting: Training goes on from it, so no newer sparse window may be skipped.

    Raises:
        UnsupportedError: The named step is a sparse window; or the newest of the store is, and ``fitting``.
        StoreError: Another rank could not load it, with its message; else as ``load_named``.
        PeerLostError: A peer is gone.
    """
    comm, text = make_communicator(_TIMEOUT_SECS), os.fspath(path)
    storage, directory = locate(text)
    reader = StoreReader(storage)

    def newest() -> Loaded:
        directories = on_rank_zero(comm, lambda: _dense(reader, fitting), f"choose a checkpoint of {text}")
        return _load_first(text, reader, directories, load, comm)

    try:
        if directory is None:
            return listed_again(newest)
        try:
            return load(comm, lambda: open_step(text))
        except NotUsableError as error:
            if error.kind == DAMAGED:
                require_committed(comm, reader.storage, directory)
            raise_on_all_ranks(comm, error, text)
    finally:
        comm.close()


def _load_first(
    path: str,
    reader: StoreReader,
    directories: Sequence[str],
    load: Callable[[Communicator, Opens], Loaded],
    comm: Communicator,
) -> Loaded:
    """Loads the first usable one of these steps. Raises ``StepRemovedError``, on every rank, if one was removed."""
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
    candidates, windows = choose_dense(reader, most=_CANDIDATES)
    if windows and fitting:
        require_dense(windows[0])
    if windows:
        log.warning(
            "%s is loaded; newer, but a sparse window without one state of all weights: %s",
            candidates[0].directory,
            windows[0].directory,
        )
    return [manifest.directory for manifest in candidates]


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
    if not is_checkpoint(path):
        raise NoCheckpointError(f"{os.fspath(path)} is {_other(os.fspath(path), module_class.__name__)}")
    file = io.BytesIO()
    torch.save(load_named(path, module_checkpoint), file)
    file.seek(0)
    loaded: Module = module_class.load_from_checkpoint(file, **options)  # type: ignore[attr-defined]
    return loaded


def _shown(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


def _other(path: str, name: str) -> str:
    """Describes what is at a path that is neither a step nor a store, and says what opens it."""
    files = os.listdir(path) if os.path.isdir(path) else [os.path.basename(path)]
    if any(file.endswith(".safetensors") for file in files):
        return (
            "an export (safetensors), which holds weights and no hyper-parameters. Build the model yourself "
            "(from_pretrained opens the export of a transformers model), set weights_from= to train from it, or pass "
            f"the step that it was exported from to load_from_checkpoint({name}, ...)"
        )
    if any(file.endswith((".metadata", ".distcp")) for file in files):
        return (
            "a checkpoint of torch.distributed.checkpoint, such as moe-ckpt export --to dcp writes: open it with that "
            f"library, or pass the step that it was exported from to load_from_checkpoint({name}, ...)"
        )
    return (
        "neither a step directory nor a store of moe_ckpt. Files of Lightning (.ckpt) are read by "
        f"{name}.load_from_checkpoint"
    )


RESUME_KEY = "moe_ckpt"
"""Key of the loaded dict under which ``MoECheckpoint`` finds the store, the step directory and the RNG."""


class MoECheckpointIO(CheckpointIO):
    """Loads step directories and stores (their newest good step); passes everything else to ``inner``.

    ``MoECheckpoint`` installs it. Without that callback (``trainer.test`` in another script) pass it as
    ``Trainer(plugins=[MoECheckpointIO()])``.

    Args:
        inner: Saves, and loads other checkpoints. None: Lightning's default.
    """

    def __init__(self, inner: CheckpointIO | None = None) -> None:
        self.inner = inner or TorchCheckpointIO()
        self.fitting: Callable[[], bool] = lambda: False
        """Returns whether training will go on from the checkpoint. ``MoECheckpoint`` sets it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PATH, storage_options: Any | None = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: PATH, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        """Returns the Lightning checkpoint dict at ``path``. All ranks load a step or store, and divide the reading.

        Raises:
            NoCheckpointError: The step or store is not there, or nothing in it can be used.
            DamagedError: The bytes of the step are not intact.
        """
        if is_checkpoint(path):
            return load_named_together(path, _load, fitting=self.fitting())
        if type(self.inner) is TorchCheckpointIO and os.path.isdir(path):
            raise NoCheckpointError(
                f"{os.fspath(path)} is a directory, but neither a step nor a store of moe_ckpt: there is no "
                f"{STORE_NAME} and no step directory in it. A run that resumes automatically needs no ckpt_path"
            )
        return self.inner.load_checkpoint(path, map_location, weights_only)

    def teardown(self) -> None:
        """Ends ``inner``: an ``AsyncCheckpointIO`` waits for its writes here."""
        self.inner.teardown()

    def remove_checkpoint(self, path: PATH) -> None:
        self.inner.remove_checkpoint(path)


def _load(comm: Communicator, opens: Opens) -> dict[str, Any]:
    """Returns the Lightning checkpoint dict of the checkpoint that ``opens`` opens, on all ranks."""

    def opened() -> WholeCheckpoint:
        reader, manifest = opens()
        return open_lightning(reader, manifest, rank_of_state(manifest, comm.rank))

    whole = on_all_ranks(comm, opened)
    checkpoint = lightning_dict(replace(whole, loaded=whole_tensors(comm, whole.reader, whole.manifest)))
    stored = zip(checkpoint["optimizer_states"], whole.state["plain"]["optimizers"], strict=True)
    checkpoint["optimizer_states"] = [
        StoredOptimizer(index, described["class"], state) for index, (state, described) in enumerate(stored)
    ]
    return checkpoint | _resumed(whole.reader, whole.manifest, whole.state)


def _resumed(reader: StoreReader, manifest: Manifest, plain: Mapping[str, Any]) -> dict[str, Any]:
    resumed = {"root": reader.storage.root, "directory": manifest.directory, "rng": plain["rng"]}
    return {RESUME_KEY: resumed | {"boost": plain.get("boost", {}), "frozen": plain["plain"]["frozen"]}}


class StoredOptimizer(dict[str, Any]):
    """An optimizer's ``state_dict`` that only an optimizer of the same class can load.

    Lightning does not tell a ``CheckpointIO`` which optimizers the run has. But ``Optimizer.load_state_dict`` calls
    ``copy`` on its argument before it changes anything, so the class is compared there.
    """

    def __init__(self, index: int, stored: str, state_dict: Mapping[str, Any]) -> None:
        super().__init__(state_dict)
        self._index, self._stored = index, stored

    def copy(self) -> dict[str, Any]:
        """Returns a plain copy.

        Raises:
            ConfigError: The caller is an optimizer of another class.
        """
        loading = sys._getframe(1).f_locals.get("self")
        if isinstance(loading, Optimizer):
            require_same_class(f"optimizer {self._index}", loading, self._stored)
        return dict(self)


def load_steps_into_shards(trainer: pl.Trainer) -> None:
    """Replaces ``load_checkpoint`` of ``ModelParallelStrategy``, which asks no ``CheckpointIO``. In ``setup``."""
    lightnings_own = trainer.strategy.load_checkpoint

    def load_checkpoint(path: PATH, weights_only: bool | None = None) -> dict[str, Any]:
        if not is_checkpoint(path):
            return lightnings_own(path, weights_only)
        return load_named_together(path, load, fitting=trainer.state.fn == "fit")

    def load(comm: Communicator, opens: Opens) -> dict[str, Any]:
        fitting = trainer.state.fn == "fit"
        state = TorchTrainingState(trainer.lightning_module, trainer.optimizers if fitting else ())

        def admits(manifest: Manifest, plain: Mapping[str, Any]) -> None:
            check_state(trainer, plain, state_path(manifest.directory, rank_of_state(manifest, comm.rank)))

        reader, restored = load_step(comm, opens, state, admits, model_only=not fitting)
        plain = restored.plain["plain"]
        with loading_state("the model and its optimizers", restored.path):
            state.load_plain(plain if fitting else {**plain, "optimizers": []})
        checkpoint = dict(restored.plain["checkpoint"])
        checkpoint.update(state_dict={}, optimizer_states=[])
        return checkpoint | _resumed(reader, restored.manifest, restored.plain)

    trainer.strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign, assignment]
