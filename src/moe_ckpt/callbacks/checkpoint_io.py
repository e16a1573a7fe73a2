"""A CheckpointIO that also opens step directories and stores, so that ``ckpt_path=`` takes them everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from moe_ckpt.callbacks.named_steps import is_step_path, is_store_path, load_named
from moe_ckpt.callbacks.stored_optimizer import guarded_states
from moe_ckpt.errors import NoCheckpointError
from moe_ckpt.format.manifest import STORE_NAME, Manifest
from moe_ckpt.interop.lightning_dict import lightning_checkpoint
from moe_ckpt.recovery.reader import StoreReader
from moe_ckpt.recovery.resume import rank_of_state

RESUME_KEY = "moe_ckpt"
"""Where the loaded dict carries what MoECheckpoint needs to go on: root, directory, RNG."""


class MoECheckpointIO(CheckpointIO):
    """Loads step directories and stores of moe_ckpt; everything else goes to ``inner`` (Lightning's default if None).

    ``MoECheckpoint`` installs it by itself. Where that is not among the callbacks (``trainer.test`` in another script)
    give it as ``Trainer(plugins=[MoECheckpointIO()])``. A store means its newest good step.
    """

    def __init__(self, inner: CheckpointIO | None = None) -> None:
        self.inner = inner or TorchCheckpointIO()
        self.fitting: Callable[[], bool] = lambda: False
        """Whether training goes on from what is loaded, as far as anybody knows."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        """Returns the Lightning checkpoint dict at ``path``. For a store all ranks must call it.

        Raises:
            NoCheckpointError: The step or store is not there, or nothing in it can be used.
            DamagedError: The bytes of the step are not intact.
        """
        if is_step_path(path) or is_store_path(path):
            return load_named(path, _load, fitting=self.fitting())
        if type(self.inner) is TorchCheckpointIO and os.path.isdir(path):
            raise NoCheckpointError(
                f"{os.fspath(path)} is a directory, but neither a step nor a store of moe_ckpt: there is no "
                f"{STORE_NAME} and no step directory in it. A run that goes on by itself needs no ckpt_path"
            )
        return self.inner.load_checkpoint(path, map_location, weights_only)

    def teardown(self) -> None:
        """Lightning calls this when it ends; an AsyncCheckpointIO inside waits for its writes then."""
        self.inner.teardown()

    def remove_checkpoint(self, path: _PATH) -> None:
        self.inner.remove_checkpoint(path)


def _load(reader: StoreReader, manifest: Manifest) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    taken = rank_of_state(manifest, rank)
    checkpoint = lightning_checkpoint(reader, manifest, taken)
    plain = reader.state(manifest, taken)
    checkpoint["optimizer_states"] = guarded_states(checkpoint["optimizer_states"], plain["plain"]["optimizers"])
    checkpoint[RESUME_KEY] = {
        "root": reader.storage.root,
        "directory": manifest.directory,
        "rng": plain["rng"],
    }
    return checkpoint
