"""A checkpoint as the dict that Lightning would have saved, for a CheckpointIO and for ``.ckpt`` files.

Needs no Lightning: only its dict's layout is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_ckpt.errors import NoCheckpointError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.interop.whole import WholeCheckpoint, whole
from moe_ckpt.reading.reader import StoreReader

MODEL_MARK = "moe_ckpt: the model's own state_dict"
"""Stands where a hook had put the model's state_dict into the checkpoint; written by the Lightning adapter."""
TOKENS_MARK = "moe_ckpt: the tokens of the manifest"
"""Stands for them in the state of the callback ``MoECheckpoint``."""


def lightning_checkpoint(reader: StoreReader, manifest: Manifest, rank: int = 0) -> dict[str, Any]:
    """The checkpoint dict of ``manifest``, with whole (unsharded) tensors on the CPU.

    Optimizer state is in torch's own format: integer ids in the order of the param groups.

    Args:
        rank: Whose loops, callbacks and data position are taken; Lightning itself saves those of rank 0.

    Raises:
        NoCheckpointError: the checkpoint was not written under Lightning.
        DamagedError, CoverageError: it cannot be read whole.
    """
    return lightning_dict(of_lightning(reader, manifest, rank))


def lightning_dict(checkpoint: WholeCheckpoint) -> dict[str, Any]:
    """The same of a checkpoint that ``of_lightning`` has opened."""
    manifest = checkpoint.manifest
    result = unmark({"state_dict": MODEL_MARK, **checkpoint.state["checkpoint"]}, checkpoint.state_dict())
    result["callbacks"] = {name: _with_tokens(state, manifest) for name, state in result.get("callbacks", {}).items()}
    result["optimizer_states"] = [optimizer_state_dict(checkpoint, i) for i in range(len(checkpoint.optimizers))]
    return result


def _with_tokens(state: Any, manifest: Manifest) -> Any:
    marked = isinstance(state, dict) and isinstance(state.get("tokens"), str) and state["tokens"] == TOKENS_MARK
    return state | {"tokens": dict(manifest.tokens)} if marked else state


_OF_TRAINER = ("loops", "callbacks", "lr_schedulers")


def module_checkpoint(reader: StoreReader, manifest: Manifest) -> dict[str, Any]:
    """Returns what a module or datamodule needs of ``lightning_checkpoint``: weights, hyper-parameters, its own keys.

    Raises:
        NoCheckpointError: The checkpoint was not written under Lightning.
        DamagedError: It cannot be read whole; or ``CoverageError``.
    """
    checkpoint = of_lightning(reader, manifest, 0)
    stored = {key: value for key, value in checkpoint.state["checkpoint"].items() if key not in _OF_TRAINER}
    return unmark({"state_dict": MODEL_MARK, **stored}, checkpoint.state_dict())


def of_lightning(reader: StoreReader, manifest: Manifest, rank: int) -> WholeCheckpoint:
    """Opens a checkpoint that was written under Lightning; reads no tensor. Raises as ``lightning_checkpoint``."""
    checkpoint = whole(reader, manifest, rank)
    if checkpoint.state.get("framework") != "lightning":
        raise NoCheckpointError(
            f"checkpoint {manifest.directory} was written under {checkpoint.state.get('framework')!r}, not under "
            "Lightning: it has no Lightning loops to continue. Export it to safetensors or dcp instead."
        )
    return checkpoint


def unmark(stored: Mapping[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Put the model's state_dict back wherever the stored checkpoint dict had it, and numbers where scalers had them.

    ``state_dict`` itself may be something else there: averaging callbacks put the averages under that
    name and the model under another.
    """
    marked = {key for key, value in stored.items() if isinstance(value, str) and value == MODEL_MARK}
    return {key: state_dict if key in marked else _with_numbers(value) for key, value in stored.items()}


def _with_numbers(value: Any) -> Any:
    """The state of a gradient scaler as it gives it itself: what left a device as tensors are numbers again."""
    if isinstance(value, dict) and isinstance(value.get("scale"), torch.Tensor) and "_growth_tracker" in value:
        return value | {name: value[name].item() for name in ("scale", "_growth_tracker")}
    return value


def optimizer_state_dict(checkpoint: WholeCheckpoint, index: int) -> dict[str, Any]:
    """Returns ``optimizer.state_dict()`` of optimizer ``index`` as of the checkpoint."""
    ids: dict[str, int] = {}
    groups = []
    for group in checkpoint.optimizers[index]["param_groups"]:
        names = group["params"]
        groups.append({**group, "params": [ids.setdefault(name, len(ids)) for name in names]})
    state = {ids[fqn]: values for fqn, values in checkpoint.optimizer_state(index) if fqn in ids}
    return {"state": dict(sorted(state.items())), "param_groups": groups}
