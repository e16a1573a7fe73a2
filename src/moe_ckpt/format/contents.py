"""Schemas of a rank's plain state: the fields of a state file, and the decoded tree for trainers.

A state file is checked when it is read, so that its readers (verification, exports, a resume before it changes the live
state) can rely on the types. Values for a trainer, a callback or a user's own object are not checked. The module also
describes tensors that are in no slice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from moe_ckpt.format.manifest import MOST_RANKS, RANK
from moe_ckpt.format.schema import (
    Check,
    Schema,
    anything,
    both,
    fault_in,
    flag,
    listing,
    mapping,
    maybe,
    text,
    value,
    whole,
)
from moe_ckpt.format.shard import TORCH_DTYPES, dtype_name

STATE_FILE: Schema = {
    "run_id": text,
    "step": whole(),
    "generation": whole(),
    "rank": RANK,
    "world_size": whole(1, MOST_RANKS),
    "state": {},
}
"""The body of a state file, its state not yet decoded."""


_tensor = value(lambda datum: isinstance(datum, torch.Tensor), "a tensor")
_integer = value(lambda datum: type(datum) is int and abs(datum) < 1 << 63, "a whole number")
_NUMBERS = (int, float, np.number, np.ndarray, torch.Tensor)
"""Types of hyperparameters, as schedules in numpy give them."""
_amount = value(lambda datum: isinstance(datum, _NUMBERS) and not isinstance(datum, bool), "a number")
_amounts = value(
    lambda datum: isinstance(datum, (list, tuple)) and all(amount is None or not _amount(amount) for amount in datum),
    "numbers",
)
_generator_state = value(
    lambda datum: isinstance(datum, torch.Tensor) and datum.dtype == torch.uint8 and datum.dim() == 1,
    "the state of a generator",
)

# --- tensors of which a store has no slice ---
#
# Tensors without elements, and the state of parameters without elements, belong to no operator. Plain state has their
# type and shape, and the value of those with elements.


def describe_tensor(tensor: torch.Tensor, of: str, *, on_param_device: bool = True) -> dict[str, Any]:
    """Returns the description of a tensor in plain state; a value in it is the live tensor.

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


def make_tensor(entry: Mapping[str, Any]) -> torch.Tensor:
    """Returns the tensor of a description of ``describe_tensor``, on the CPU."""
    if "value" in entry:
        values: torch.Tensor = entry["value"]
        return values
    return torch.empty(entry["shape"], dtype=TORCH_DTYPES[entry["dtype"]], device="cpu")


def _agrees(description: Any) -> str:
    """Checks that a description with elements has their values, so that no memory is allocated for others."""
    shape = tuple(description["shape"])
    values = description.get("value")
    if values is None:
        return f".shape is {list(shape)} without a value" if prod(shape) else ""
    same = tuple(values.shape) == shape and values.dtype == TORCH_DTYPES[description["dtype"]]
    return "" if same else ".value is of another type or shape"


UNSLICED = both(
    {
        "dtype": value(lambda datum: isinstance(datum, str) and datum in TORCH_DTYPES, "an element type"),
        "shape": listing(whole(), most=32),
        "cpu?": flag,
        "value?": _tensor,
    },
    _agrees,
)
"""The check of an entry."""

# --- random numbers ---


def _accepted_by(load: Callable[[Any], Any]) -> Check:
    """Returns a check that a new generator of the same kind accepts the state."""

    def check(state: Any) -> str:
        try:
            load(state)
        except Exception as error:  # whatever such a generator raises
            return f" is no state of a generator ({type(error).__name__}: {error})"
        return ""

    return check


def _numpy(datum: Any) -> str:
    if isinstance(datum, dict) and datum.get("bit_generator") not in (None, "MT19937"):
        return ""  # numpy's global generator was replaced by another kind, which alone can check it
    return _accepted_by(lambda state: np.random.RandomState().set_state(state))(datum)


_RNG: Schema = {
    "python": _accepted_by(lambda state: random.Random().setstate(state)),
    "numpy": _numpy,
    "torch": both(_generator_state, _accepted_by(lambda state: torch.Generator().set_state(state))),
    "cuda?": _generator_state,
    "tracker?": mapping(_generator_state),
}

# --- model and optimizers ---

_HYPERPARAMETERS: dict[str, Schema] = {
    **dict.fromkeys(("lr?", "initial_lr?", "weight_decay?", "momentum?", "dampening?"), maybe(_amount)),
    "betas?": maybe(_amounts),
}
_PLAIN: Schema = {
    "buffers": mapping(_tensor),
    "frozen": [text],
    "optimizers?": [
        {
            "class": text,
            "param_groups": [{"params": [text], **_HYPERPARAMETERS}],
            "scalars?": mapping({"step?": _amount}),
            "unsliced?": mapping(mapping(UNSLICED)),
            "zeroed?": [text],
        }
    ],
    "optimizer_classes?": [{"class": text, "kind": text}],
    "pretrained?": [{"prefix": text, "class": text, "config": {}, "generation_config": maybe({})}],
    "extra_state?": mapping(anything),
    "own_state?": mapping(mapping(anything)),
    "resting?": [text],
    "varying_buffers?": [text],
    "aliases?": mapping(text),
    "unsliced?": mapping(UNSLICED),
    "optimizer?": {"step": maybe(whole()), "groups": [_HYPERPARAMETERS], "scalers": [maybe({})]},
}

# --- gradient logs ---


def _as_many(count: Any) -> str:
    of_each = count["values"].dim() == 1 and len(count["values"]) == len(count["units"])
    return "" if of_each else f".values are not one for each of {len(count['units'])} units"


_GRADIENT_LOG: Schema = {
    "updates": [
        {
            "optimizer": whole(),
            "groups": [_HYPERPARAMETERS],
            "parameters": [text],
            "grad_scale": maybe(_amount),
            "found_inf": maybe(_amount),
        }
    ],
    "counts": [both({"optimizer": whole(), "state": text, "units": [text], "values": _tensor}, _as_many)],
}

# --- trainers ---

_SETTINGS = mapping(anything)
_LIGHTNING: Schema = {
    "checkpoint": {
        "global_step": whole(),
        "loops": {"fit_loop": mapping(anything)},
        "lr_schedulers": [mapping(anything, anything)],
        "epoch?": whole(),
        "callbacks?": mapping(anything),
        "hyper_parameters?": mapping(anything),
        "datamodule_hyper_parameters?": mapping(anything),
        "moe_ckpt_data_position?": [maybe(mapping(_integer))],
        "moe_ckpt_loader_generators?": [maybe(_tensor)],
        "moe_ckpt_loader_batches?": [_SETTINGS],
        "moe_ckpt_fetched_ahead?": {"rng?": _RNG, "consumed?": [anything]},
    },
    "plain": both(_PLAIN, {"optimizers": anything}),
    "rng": _RNG,
    "configured": {"optimizers": [[_SETTINGS]], "schedulers": [_SETTINGS], "training": _SETTINGS, "frozen": text},
}
_LOOP: Schema = {
    "step": whole(),
    "stepped?": whole(),
    "counters": mapping(anything, anything),
    "stateful": mapping(anything, anything),
    "plain": both(_PLAIN, {"optimizers": anything}),
    "rng": _RNG,
    "loader_generators": mapping(_generator_state, anything),
    "buckets": maybe(text),
    "configured": {
        "optimizers": [[_SETTINGS]],
        "schedules": mapping([text], anything),
        "batches": mapping(_SETTINGS, anything),
        "frozen?": text,
    },
}
_MEGATRON: Schema = {
    "iteration": whole(),
    "consumed_samples": whole(),
    "layout": mapping(whole()),
    "architecture?": mapping(anything),
    "stateful": mapping(anything, anything),
    "plain": both(_PLAIN, dict.fromkeys(("optimizer", "optimizer_classes", "resting"), anything)),
    "rng": both(_RNG, {"tracker": anything}),
    "counters": mapping(anything, anything),
    "configured": {"groups": [_SETTINGS], "scheduler": _SETTINGS, "resting": [text]},
}
_ANY: Schema = {"framework?": text, "gradient_log?": _GRADIENT_LOG}
_FRAMEWORKS: dict[Any, Schema] = {"lightning": _LIGHTNING, "torch": _LOOP, "megatron": _MEGATRON}


def state_contents(datum: Any) -> str:
    """Checks a decoded state (a ``Check``), by the schema of the trainer that wrote it if there is one."""
    return fault_in(_ANY, datum) or fault_in(_FRAMEWORKS.get(datum.get("framework"), anything), datum)
