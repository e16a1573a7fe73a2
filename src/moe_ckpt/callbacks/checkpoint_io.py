"""A CheckpointIO that also opens step directories and stores, so that ``ckpt_path=`` takes them everywhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from moe_ckpt.callbacks.compat import PATH
from moe_ckpt.callbacks.lightning_state import check_state
from moe_ckpt.callbacks.named_steps import is_step_path, is_store_path, load_named, load_named_together
from moe_ckpt.driver.host import loading_state
from moe_ckpt.errors import NoCheckpointError
from moe_ckpt.format.manifest import STORE_NAME, Manifest, state_path
from moe_ckpt.interop.lightning_dict import lightning_dict, of_lightning
from moe_ckpt.interop.whole import WholeCheckpoint
from moe_ckpt.modeling.state.optimizer_class import require_same_class
from moe_ckpt.modeling.state.training_state import TorchTrainingState
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.together import together
from moe_ckpt.recovery.executing import rank_of_state
from moe_ckpt.recovery.named import Opens, load_step, whole_tensors

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
        """Returns whether training will go on from what is loaded; set by ``MoECheckpoint``."""
        self.of_all_ranks = False
        """Whether all ranks load together, and divide the reading of a step, too; set by ``MoECheckpoint``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PATH, storage_options: Any | None = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: PATH, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        """Returns the Lightning checkpoint dict at ``path``. For a store, and under ``MoECheckpoint``, by all ranks.

        Raises:
            NoCheckpointError: The step or store is not there, or nothing in it can be used.
            DamagedError: The bytes of the step are not intact.
        """
        if is_step_path(path) or is_store_path(path):
            if self.of_all_ranks:
                return load_named_together(path, _load_together, fitting=self.fitting())
            return load_named(path, _load, fitting=self.fitting())
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


def _load(reader: StoreReader, manifest: Manifest) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return _as_lightning_loads(of_lightning(reader, manifest, rank_of_state(manifest, rank)))


def _load_together(comm: Communicator, opens: Opens) -> dict[str, Any]:
    """The same on all ranks, each of which reads its part of the tensors."""

    def opened() -> WholeCheckpoint:
        reader, manifest = opens()
        return of_lightning(reader, manifest, rank_of_state(manifest, comm.rank))

    whole = together(comm, opened)
    return _as_lightning_loads(replace(whole, loaded=whole_tensors(comm, whole.reader, whole.manifest)))


def _as_lightning_loads(whole: WholeCheckpoint) -> dict[str, Any]:
    checkpoint = lightning_dict(whole)
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


def load_steps_into_shards(trainer: pl.Trainer, strategy: Strategy) -> None:
    """Replaces ``load_checkpoint`` of ``ModelParallelStrategy``, which asks no ``CheckpointIO``. In ``setup``."""
    lightnings_own = strategy.load_checkpoint

    def load_checkpoint(path: PATH, weights_only: bool | None = None) -> dict[str, Any]:
        if not (is_step_path(path) or is_store_path(path)):
            return lightnings_own(path, weights_only)
        return load_named_together(path, load, fitting=trainer.state.fn == "fit")

    def load(comm: Communicator, opens: Opens) -> dict[str, Any]:
        fitting = trainer.state.fn == "fit"
        state = TorchTrainingState(trainer.lightning_module, trainer.optimizers if fitting else ())

        def admits(manifest: Manifest, plain: Mapping[str, Any]) -> None:
            check_state(trainer, plain, state_path(manifest.directory, rank_of_state(manifest, comm.rank)))

        reader, manifest, restored = load_step(comm, opens, state, admits, model_only=not fitting)
        plain = restored.plain["plain"]
        with loading_state("the model and its optimizers", restored.path):
            state.load_plain(plain if fitting else {**plain, "optimizers": []})
        checkpoint = dict(restored.plain["checkpoint"])
        checkpoint.update(state_dict={}, optimizer_states=[])
        return checkpoint | _resumed(reader, manifest, restored.plain)

    strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign, assignment]
