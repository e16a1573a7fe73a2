"""``ckpt_path=<step or store>`` where DTensors are spread over ranks: those strategies ask no CheckpointIO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import Strategy

from moe_ckpt.callbacks.checkpoint_io import RESUME_KEY
from moe_ckpt.callbacks.lightning_state import check_state
from moe_ckpt.callbacks.named_steps import is_step_path, is_store_path, load_named
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.recovery.handing_back import handing_back
from moe_ckpt.recovery.reader import StoreReader
from moe_ckpt.recovery.resume import load_step, rank_of_state


def load_steps_into_shards(trainer: pl.Trainer, strategy: Strategy) -> None:
    """Such a strategy (ModelParallelStrategy) loads into shards of its own: step in before it. From ``setup``."""
    lightnings_own = strategy.load_checkpoint

    def load_checkpoint(path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        if not (is_step_path(path) or is_store_path(path)):
            return lightnings_own(path, weights_only)
        return load_named(path, load, fitting=trainer.state.fn == "fit")

    def load(reader: StoreReader, manifest: Manifest) -> dict[str, Any]:
        fitting = trainer.state.fn == "fit"
        state = TorchTrainingState(trainer.lightning_module, trainer.optimizers if fitting else ())
        path_of_state = state_path(manifest.directory, rank_of_state(manifest, trainer.global_rank))

        def admits(manifest: Manifest, plain: Mapping[str, Any]) -> None:
            check_state(trainer, plain, path_of_state)

        restored = load_step(reader, manifest, trainer.global_rank, state, admits, model_only=not fitting)
        plain = restored.plain["plain"]
        with handing_back("the model and its optimizers", path_of_state):
            state.load_plain(plain if fitting else {**plain, "optimizers": []})
        checkpoint = dict(restored.plain["checkpoint"])
        checkpoint.update(state_dict={}, optimizer_states=[])
        resumed = {"root": reader.storage.root, "directory": manifest.directory, "rng": restored.plain["rng"]}
        return checkpoint | {RESUME_KEY: resumed}

    strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign, assignment]
