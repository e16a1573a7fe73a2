"""Workarounds for bugs in Megatron's own saving and loading of optimizer state.

Those of megatron-core 0.16.1, ``core/optimizer/distrib_optimizer.py``. Saving: with several buckets, all but the first
get another parameter's state. Loading: torch's Adam and AdamW, but not FusedAdam, which counts steps per group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.megatron.compat import megatron_core
from moe_ckpt.megatron.optimizers import STEP, leaves, make_state, slots, write_step

_TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)
SHARDING = "param_state_sharding_type"
"""Megatron's key for the form of a saved distributed optimizer; other optimizers lack it."""
_LOADERS = {
    "fully_reshardable": "load_parameter_state_from_fully_reshardable",
    "dp_reshardable": "load_parameter_state_from_dp_reshardable",
}


@contextmanager
def buckets_in_place(optimizer: Any) -> Iterator[None]:
    """Corrects offsets of parameters while Megatron describes the state as ``fully_reshardable``.

    Megatron gathers a buffer without the padding at the ends of buckets (``get_parameter_state_dp_zero``), but slices
    it at offsets with padding (``sharded_param_state_fully_reshardable``). After a padded bucket, such as that of a
    shared embedding, it would save shifted values, and notice only for the last parameter. So the padding is added in
    between.
    """
    distributed: list[Any] = [leaf for leaf in leaves(optimizer) if type(leaf) is megatron_core().distributed_optimizer]
    for leaf in distributed:
        leaf.get_parameter_state_dp_zero = partial(_gathered_with_padding, leaf, leaf.get_parameter_state_dp_zero)
    try:
        yield
    finally:
        for leaf in distributed:
            del leaf.get_parameter_state_dp_zero  # the method of the class is seen again


def _gathered_with_padding(leaf: Any, gather: Callable[..., Any], *args: Any, **options: Any) -> Any:
    gathered = gather(*args, **options)
    if gathered is not None:
        for number, buffer in enumerate(leaf.buffers):
            for tensors in gathered[number].values():
                flat = {key: value for key, value in tensors.items() if isinstance(value, torch.Tensor)}
                tensors.update({key: _with_padding(value, buffer) for key, value in flat.items()})
    return gathered


def _with_padding(flat: torch.Tensor, buffer: Any) -> torch.Tensor:
    padded = flat.new_zeros(buffer.numel)
    at = 0
    for bucket in buffer.buckets:
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = flat[at : at + bucket.numel_unpadded]
        at += bucket.numel_unpadded
    return padded


def make_loadable(optimizer: Any) -> None:
    """Makes the state that a distributed optimizer must have to be loaded (``state_dict``, :642), if it never stepped.

    Raises:
        UnsupportedError: It is not Adam, the only one whose state Megatron's format has.
    """
    distributed = megatron_core().distributed_optimizer
    for slot in slots(optimizer).values():
        inner = slot.leaf.optimizer
        if type(slot.leaf) is not distributed or slot.updated is None:
            continue
        if isinstance(inner, torch.optim.SGD):
            raise UnsupportedError("Megatron's format has no state of SGD under the distributed optimizer. Use Adam.")
        if isinstance(inner, _TORCH_ADAM) and not slot.state:
            moments = ("exp_avg", "exp_avg_sq")
            make_state(slot, moments, dict.fromkeys(moments, torch.float32))


def load_optimizer(optimizer: Any, loaded: Any) -> None:
    """Calls ``optimizer.load_state_dict(loaded)`` such that each parameter has its own, right step count."""
    chain = isinstance(optimizer, megatron_core().chained_optimizer)
    optimizers = optimizer.chained_optimizers if chain else [optimizer]
    states = [loaded] if len(optimizers) == 1 else [state for _, state in sorted(loaded.items())]
    steps = {step for state in states if (step := _step_in(state)) is not None}
    if len(steps) > 1:
        raise ConfigError(f"the optimizers in the checkpoint have made {sorted(steps)} steps; Megatron counts one")
    for leaf, state in zip(optimizers, states, strict=True):
        if getattr(leaf, "is_stub_optimizer", False):
            continue
        if type(leaf) is megatron_core().distributed_optimizer:
            _load_distributed(leaf, dict(state))
        else:
            leaf.load_state_dict(state)
    for leaf in leaves(optimizer):
        if isinstance(leaf.optimizer, _TORCH_ADAM):
            for group in leaf.optimizer.param_groups:
                group.pop(STEP, None)  # nothing advances this count
    write_step(optimizer, next(iter(steps), None))


def _step_in(state: Mapping[str, Any]) -> int | None:
    """Returns the step count in Megatron's state of one optimizer: FP32, with masters, or distributed."""
    inner = state.get("optimizer", state)
    count = inner.get("state", {}).get("common_step")
    if count is None:
        count = next((group[STEP] for group in inner["param_groups"] if STEP in group), None)
    return None if count is None else int(count)


def _load_distributed(leaf: Any, state: dict[str, Any]) -> None:
    """Loads hyperparameters, then tensors without step counts, which :936-940 would expect among the tensors."""
    tensors, kind = state.pop("param_state", None), state.pop(SHARDING, None)
    if kind not in _LOADERS:
        raise UnsupportedError(
            f"the checkpoint has the distributed optimizer's state in the form {kind!r}, which is not supported. "
            f"Supported are {', '.join(_LOADERS)}: save it again with Megatron, or import with weights_only=True."
        )
    leaf.load_state_dict(state)
    with _without_steps(leaf.optimizer):
        getattr(leaf, _LOADERS[kind])(tensors)


@contextmanager
def _without_steps(inner: Any) -> Iterator[None]:
    """Removes step counts from the inner optimizer's state until the block ends. They are one tensor for all parameters
    (:785-789), which each would advance in every step; ``write_step`` gives each its own."""
    taken = {parameter: state.pop(STEP) for parameter, state in inner.state.items() if STEP in state}
    try:
        yield
    finally:
        for parameter, step in taken.items():
            inner.state[parameter][STEP] = step
