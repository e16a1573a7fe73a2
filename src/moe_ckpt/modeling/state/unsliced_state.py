"""State that is in no slice: parameters without elements, all of their state, and other state tensors without elements.

Optimizers take what they once put into a parameter's state for granted. So it comes back with the rest, although
nothing of it is in a tensor of the store (``format.contents``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from moe_ckpt.format.contents import described
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.modeling.blocks import block_in, is_dtensor
from moe_ckpt.ports import TensorMeta

Unsliced = tuple[str, torch.Tensor, str, torch.Tensor]
"""(name of the parameter, itself, name of its state, live state)."""


def is_unsliced(parameter: torch.Tensor, value: object) -> bool:
    """Returns whether a value of a parameter's state is a tensor that no slice can hold."""
    return isinstance(value, torch.Tensor) and not (value.numel() and parameter.numel())


def read_parameters(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, dict[str, Any]]:
    """Returns {name: description} of those that still have no elements."""
    return {
        name: described(parameter, f"parameter {name!r}") for name, parameter in parameters if not parameter.numel()
    }


def find(states: Iterable[tuple[str, torch.Tensor, Mapping[str, Any]]]) -> list[Unsliced]:
    """Returns what there is of it among (name, parameter, live state)."""
    return [
        (name, parameter, key, value)
        for name, parameter, state in states
        for key, value in state.items()
        if is_unsliced(parameter, value)
    ]


def read(index: int, entries: Iterable[Unsliced]) -> dict[str, dict[str, Any]]:
    """Returns {parameter: {state name: description}} of what ``find`` found, and what still is so."""
    descriptions: dict[str, dict[str, Any]] = {}
    for name, parameter, key, held in entries:
        if is_unsliced(parameter, held):  # memory may have been put under it
            value = block_in(held) if held.numel() else held
            same = value.device == parameter.device
            entry = described(value, f"state {key!r} of {name} in optimizer {index}", on_param_device=same)
            descriptions.setdefault(name, {})[key] = entry
    return descriptions


def write(optimizer: Optimizer, parameter: torch.Tensor, descriptions: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes that part of one parameter's state which is in no slice exactly what ``read`` returned."""
    if parameter not in optimizer.state and not descriptions:
        return
    state = optimizer.state[parameter]
    for key in [key for key, value in state.items() if is_unsliced(parameter, value) and key not in descriptions]:
        del state[key]
    for key, entry in descriptions.items():
        meta = TensorMeta(entry["dtype"], tuple(entry["shape"]), not entry.get("cpu", False))
        make(optimizer, parameter, key, meta)
        if "value" in entry:
            state[key].copy_(entry["value"])
    if not state:
        del optimizer.state[parameter]


def make(optimizer: Optimizer, parameter: torch.Tensor, key: str, meta: TensorMeta) -> None:
    """Brings one tensor of a parameter's state to ``meta``. A new one is zero; one that fits keeps its memory."""
    state = optimizer.state[parameter]
    device = _state_device(optimizer, parameter, key, meta)
    dtype = TORCH_DTYPES[meta.dtype]
    if not _fits(state.get(key), parameter, meta.global_shape, dtype, device):
        state[key] = _new_state(parameter, meta.global_shape, dtype, device)


def _state_device(optimizer: Optimizer, parameter: torch.Tensor, key: str, meta: TensorMeta) -> torch.device:
    """Where state is to live: as it was saved, but a step count where this run's implementation needs it.

    torch's Adam family counts steps on the CPU, unless fused or capturable kernels read them on the device
    (torch.optim.Optimizer.load_state_dict makes the same exception).
    """
    on_device = meta.on_param_device
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    if key == "step" and not meta.global_shape and ("capturable" in group or "fused" in group):
        on_device = bool(group.get("capturable") or group.get("fused"))
    return parameter.device if on_device else torch.device("cpu")


def _fits(
    old: object, parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> bool:
    return (
        isinstance(old, torch.Tensor)
        and tuple(old.shape) == shape
        and old.dtype == dtype
        and old.device == device
        and (not shape or is_dtensor(old) == is_dtensor(parameter))
    )


def _new_state(
    parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A zeroed tensor, sharded and laid out like the parameter if it has its shape."""
    if shape and tuple(parameter.shape) == shape and device == parameter.device:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
