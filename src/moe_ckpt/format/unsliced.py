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
    description: dict[str, Any] = {"dtype": dtype_name(tensor.dtype, of), "shape": list(tensor.shape)}
    if tensor.numel():
        description["value"] = tensor
    return description if on_param_device else description | {"cpu": True}


def made(entry: Mapping[str, Any]) -> torch.Tensor:
    """Returns the tensor that ``described`` told of, on the CPU."""
    if "value" in entry:
        values: torch.Tensor = entry["value"]
        return values
    return torch.empty(entry["shape"], dtype=TORCH_DTYPES[entry["dtype"]])


def _agrees(description: Any) -> str:
    """A ``Check`` that a value is there where there are elements, and no memory is asked for otherwise."""
    shape = tuple(description["shape"])
    values = description.get("value")
    if values is None:
        return f".shape is {list(shape)} without a value" if prod(shape) else ""
    same = tuple(values.shape) == shape and values.dtype == TORCH_DTYPES[description["dtype"]]
    return "" if same else ".value is of another type or shape"


UNSLICED = both(
    record(
        {
            "dtype": value(lambda datum: isinstance(datum, str) and datum in TORCH_DTYPES, "an element type"),
            "shape": listing(whole(), most=32),
        },
        {"cpu": flag, "value": value(lambda datum: isinstance(datum, torch.Tensor), "a tensor")},
    ),
    _agrees,
)
"""The check of an entry."""
