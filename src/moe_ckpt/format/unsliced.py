"""Tensors of which a store has no slice: those without elements, and the state of parameters without elements.

They belong to no operator. Plain state tells their type and shape, and the value of those that have elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from moe_ckpt.format.dtypes import TORCH_DTYPES, dtype_name
from moe_ckpt.format.schema import both, flag, listing, record, value, whole


def described(tensor: torch.Tensor, of: str, *, on_param_device: bool = True) -> dict[str, Any]:
    """Returns what plain state tells of a tensor; a value in it is live.

    Args:
        tensor: Of this rank; of a sharded one without elements any part.
        of: What it is, for the message.
        on_param_device: False for state on the CPU of a parameter elsewhere.

    Raises:
        UnsupportedError: It is of a type that cannot be stored.
    """
    found: dict[str, Any] = {"dtype": dtype_name(tensor.dtype, of), "shape": list(tensor.shape)}
    if tensor.numel():
        found["value"] = tensor
    return found if on_param_device else found | {"cpu": True}


def made(entry: Mapping[str, Any]) -> torch.Tensor:
    """Returns the tensor that ``described`` told of, on the CPU."""
    if "value" in entry:
        found: torch.Tensor = entry["value"]
        return found
    return torch.empty(entry["shape"], dtype=TORCH_DTYPES[entry["dtype"]])


def _agrees(found: Any) -> str:
    """A ``Check`` that a value is there where there are elements, and no memory is asked for otherwise."""
    shape = tuple(found["shape"])
    there = found.get("value")
    if there is None:
        return f".shape is {list(shape)} without a value" if prod(shape) else ""
    same = tuple(there.shape) == shape and there.dtype == TORCH_DTYPES[found["dtype"]]
    return "" if same else ".value is of another type or shape"


UNSLICED = both(
    record(
        {
            "dtype": value(lambda found: isinstance(found, str) and found in TORCH_DTYPES, "an element type"),
            "shape": listing(whole(), most=32),
        },
        {"cpu": flag, "value": value(lambda found: isinstance(found, torch.Tensor), "a tensor")},
    ),
    _agrees,
)
"""The check of an entry."""
