"""A checkpoint under the names that a model uses at run time, whole and unsharded.

What every exporter and foreign reader starts from: parameters (tied ones under all their names), buffers
and optimizer state, with tensors still on disk until they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_ckpt.errors import DamagedError, NoCheckpointError
from moe_ckpt.format.contents import make_tensor
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.modeling.module_state import joined_name
from moe_ckpt.reading.index import split_key
from moe_ckpt.reading.reader import StoreReader, require_dense


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint as one process would have it. Made by ``open_whole``.

    Attributes:
        rank: Whose plain state is taken.
        parameters: Name in the model's ``state_dict()`` -> tensor key.
        extras: The other entries of ``state_dict()``: buffers, extra state, states of metrics, parameters without
            elements.
        optimizers: Per optimizer: param groups (with names for parameters), and per parameter the state that is no
            tensor.
        optimizer_keys: Per optimizer, parameter -> state name -> tensor key.
        loaded: Tensors that need not be read any more, by key.
    """

    reader: StoreReader
    manifest: Manifest
    rank: int
    state: Mapping[str, Any]
    parameters: Mapping[str, str]
    extras: Mapping[str, Any]
    optimizers: tuple[Mapping[str, Any], ...]
    optimizer_keys: tuple[Mapping[str, Mapping[str, str]], ...] = field(repr=False)
    loaded: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def tensor(self, key: str) -> torch.Tensor:
        """The verified tensor of a key."""
        loaded = self.loaded.get(key)
        return self.reader.tensor(self.manifest, key) if loaded is None else loaded

    def state_dict(self) -> dict[str, Any]:
        """The model's ``state_dict()``. Tied names share one tensor, as they do in the model."""
        loaded = {key: self.tensor(key) for key in dict.fromkeys(self.parameters.values())}
        return {name: loaded[key] for name, key in self.parameters.items()} | dict(self.extras)

    def optimizer_state(self, index: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """(parameter, its optimizer state) of one optimizer: tensors, and what is in memory already beside them."""
        values = self.optimizer_values(index)
        keys = self.optimizer_keys[index]
        for fqn in dict.fromkeys([*keys, *values]):
            tensors = {name: self.tensor(key) for name, key in keys.get(fqn, {}).items()}
            yield fqn, tensors | values.get(fqn, {})

    def optimizer_values(self, index: int) -> dict[str, dict[Any, Any]]:
        """Parameter -> its state in one optimizer that has no tensor key: numbers, tensors that are in no slice."""
        plain = self.optimizers[index]
        values_of = {fqn: dict(values) for fqn, values in plain.get("scalars", {}).items()}
        for fqn, entries in plain.get("unsliced", {}).items():
            values_of.setdefault(fqn, {}).update({name: make_tensor(entry) for name, entry in entries.items()})
        return values_of


def open_whole(reader: StoreReader, manifest: Manifest, rank: int = 0) -> WholeCheckpoint:
    """Open one checkpoint whole.

    Raises:
        CoverageError: parts are missing.
        DamagedError: a header or the state is damaged. (Slices are checked as they are read.)
        UnsupportedError: it is no one state of the run.
    """
    require_dense(manifest)
    reader.prove(manifest)
    index = reader.index(manifest)
    state = reader.state(manifest, rank)
    plain = state.get("plain", {})
    optimizers = list(plain.get("optimizers", ()))
    parameters: dict[str, str] = {}
    keys: list[dict[str, dict[str, str]]] = [{} for _ in optimizers]
    for key in index.tensors:
        parts = split_key(key)
        if parts.optimizer is None or parts.state is None:
            parameters[parts.fqn] = key
            continue
        while parts.optimizer >= len(keys):  # Megatron does not list its groups by parameter
            if state.get("framework") == "lightning":
                path = state_path(manifest.directory, rank)
                raise DamagedError(path, f"lacks optimizer {parts.optimizer}, whose {key} there is", step=manifest.step)
            keys.append({})
            optimizers.append({})
        keys[parts.optimizer].setdefault(parts.fqn, {})[parts.state] = key
    for alias, name in manifest.model.aliases.items():
        if name in parameters:
            parameters[alias] = parameters[name]
    extras = _under_all_names(_extras(plain), manifest, plain)
    if state.get("framework") == "megatron":
        extras = all_buffers(reader, manifest) | extras
    return WholeCheckpoint(
        reader, manifest, rank, state, parameters, extras, optimizers=tuple(optimizers), optimizer_keys=tuple(keys)
    )


def module_buffers(reader: StoreReader, manifest: Manifest) -> dict[str, Any]:
    """The model's persistent buffers, and its parameters without elements, whole, under all of their names.

    Those of rank 0 under Lightning, those of all ranks under Megatron.
    """
    state = reader.state(manifest, 0)
    if state.get("framework") == "megatron":
        return all_buffers(reader, manifest)
    plain = state.get("plain", {})
    return _under_all_names(_tensors(plain), manifest, plain)


def all_buffers(reader: StoreReader, manifest: Manifest) -> dict[str, Any]:
    """Buffers, where ranks hold different layers: those of one name are alike."""
    buffers: dict[str, Any] = {}
    for rank in range(manifest.world_size):
        buffers |= reader.state(manifest, rank)["plain"]["buffers"]
    return buffers


def _under_all_names(values: dict[str, Any], manifest: Manifest, plain: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the second names of what is shared: parameters, buffers and extra state."""
    for alias, name in (*manifest.model.aliases.items(), *plain.get("aliases", {}).items()):
        if name in values:
            values.setdefault(alias, values[name])
    return values


def _tensors(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Buffers and parameters without elements."""
    return {name: make_tensor(entry) for name, entry in plain.get("unsliced", {}).items()} | dict(
        plain.get("buffers", {})
    )


def _extras(plain: Mapping[str, Any]) -> dict[str, Any]:
    extras = _tensors(plain)
    for module, values in plain.get("own_state", {}).items():
        extras.update({joined_name(module, name): value for name, value in values.items()})
    extras.update(
        {joined_name(module, "_extra_state"): value for module, value in plain.get("extra_state", {}).items()}
    )
    return extras


# --- as the dict that Lightning would have saved; only its layout is known here ---

MODEL_MARK = "moe_ckpt: the model's own state_dict"
"""Stands where a hook had put the model's state_dict into the checkpoint; written by the Lightning adapter."""
TOKENS_MARK = "moe_ckpt: the tokens of the manifest"
"""Stands for them in the state of the callback ``MoECheckpoint``."""


def lightning_dict(checkpoint: WholeCheckpoint) -> dict[str, Any]:
    """The checkpoint dict that Lightning would have saved, with whole (unsharded) tensors on the CPU.

    Optimizer state is in torch's own format: integer ids in the order of the param groups. Loops, callbacks and data
    position are those of the checkpoint's rank; Lightning itself saves those of rank 0.

    Raises:
        NoCheckpointError: the checkpoint was not written under Lightning.
        DamagedError: a tensor is damaged.
    """
    _require_lightning(checkpoint)
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
    """Returns what a module or datamodule needs of ``lightning_dict``: weights, hyper-parameters, its own keys.

    Raises:
        NoCheckpointError: The checkpoint was not written under Lightning.
        DamagedError: It cannot be read whole; or ``CoverageError``.
    """
    checkpoint = open_lightning(reader, manifest)
    stored = {key: value for key, value in checkpoint.state["checkpoint"].items() if key not in _OF_TRAINER}
    return unmark({"state_dict": MODEL_MARK, **stored}, checkpoint.state_dict())


def open_lightning(reader: StoreReader, manifest: Manifest, rank: int = 0) -> WholeCheckpoint:
    """Opens a checkpoint that was written under Lightning; reads no tensor.

    Args:
        reader: Of the store.
        manifest: The checkpoint.
        rank: Whose loops, callbacks and data position are taken.

    Raises:
        NoCheckpointError: It was not written under Lightning.
        DamagedError, CoverageError: It cannot be read whole.
    """
    checkpoint = open_whole(reader, manifest, rank)
    _require_lightning(checkpoint)
    return checkpoint


def _require_lightning(checkpoint: WholeCheckpoint) -> None:
    framework = checkpoint.state.get("framework")
    if framework != "lightning":
        raise NoCheckpointError(
            f"checkpoint {checkpoint.manifest.directory} was written under {framework!r}, not under Lightning: it has "
            "no Lightning loops to continue. Export it to safetensors or dcp instead."
        )


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
