"""A CheckpointIO that also opens step directories, so that ``ckpt_path=<step directory>`` works everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from moe_ckpt.callbacks.stored_optimizer import guarded_states
from moe_ckpt.format.manifest import parse_step_dir
from moe_ckpt.interop.lightning_dict import lightning_checkpoint
from moe_ckpt.recovery.reader import open_step
from moe_ckpt.recovery.resume import rank_of_state

RESUME_KEY = "moe_ckpt"
"""Where the loaded dict carries what MoECheckpoint needs to go on: root, directory, RNG."""


class MoECheckpointIO(CheckpointIO):
    """Loads moe_ckpt step directories; everything else goes to ``inner`` (Lightning's default if None).

    MoECheckpoint installs it by itself. Without the callback (``trainer.test``, another script) give it as
    ``Trainer(plugins=[MoECheckpointIO()])``.
    """

    def __init__(self, inner: CheckpointIO | None = None) -> None:
        self.inner = inner or TorchCheckpointIO()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        """The Lightning checkpoint dict at ``path``.

        Raises:
            NoCheckpointError, DamagedError: the step directory is not there, or its bytes are not intact.
        """
        if not is_step_path(path):
            return self.inner.load_checkpoint(path, map_location, weights_only)
        reader, manifest = open_step(path)
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

    def teardown(self) -> None:
        """Lightning calls this when it ends; an AsyncCheckpointIO inside waits for its writes then."""
        self.inner.teardown()

    def remove_checkpoint(self, path: _PATH) -> None:
        self.inner.remove_checkpoint(path)


def is_step_path(path: _PATH | None) -> bool:
    """True if ``path`` is named like a step directory (or is a link to one)."""
    if path is None:
        return False
    text = os.fspath(path).rstrip("/")
    name = Path(text).resolve().name if "://" not in text else text.rsplit("/", 1)[-1]
    return parse_step_dir(name) is not None
