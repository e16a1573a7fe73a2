"""Megatron's own saving and loading of optimizer state, put right around it where it goes wrong.

Found in megatron-core 0.16.1, ``core/optimizer/distrib_optimizer.py``. Saving: with several buckets,
state of all but the first is another parameter's. Loading: with torch's Adam and AdamW; Apex's or Transformer Engine's
FusedAdam, which count steps per group, are loaded right.
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
"""Where Megatron says in which form it saved the distributed optimizer; absent for the others."""
_LOADERS = {
    "fully_reshardable": "load_parameter_state_from_fully_reshardable",
    "dp_reshardable": "load_parameter_state_from_dp_reshardable",
}


@contextmanager
def buckets_in_place(optimizer: Any) -> Iterator[None]:
    """While Megatron describes the state as ``fully_reshardable``: let it find each parameter's own.

    It gathers a buffer without the padding at the ends of buckets (``get_parameter_state_dp_zero``), and then looks for
    parameters at their places in the buffer with padding (``sharded_param_state_fully_reshardable``). Where padding
    precedes, as behind the bucket of a shared embedding, it would save values that belong some elements further on,
    and say so only for the last parameter. So the padding is put back in between.
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
    """Give the distributed optimizer the state that it asserts it has, before it ever stepped (``state_dict``, :642).

    Raises:
        UnsupportedError: it is not Adam, whose two moments are all that Megatron's format knows of.
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
    """``optimizer.load_state_dict(loaded)``, with each parameter's step count its own and right."""
    chain = isinstance(optimizer, megatron_core().chained_optimizer)
    each = optimizer.chained_optimizers if chain else [optimizer]
    states = [loaded] if len(each) == 1 else [state for _, state in sorted(loaded.items())]
    steps = {step for state in states if (step := _step_in(state)) is not None}
    if len(steps) > 1:
        raise ConfigError(f"the optimizers in the checkpoint have made {sorted(steps)} steps; Megatron counts one")
    for leaf, state in zip(each, states, strict=True):
        if getattr(leaf, "is_stub_optimizer", False):
            continue
        if type(leaf) is megatron_core().distributed_optimizer:
            _load_distributed(leaf, dict(state))
        else:
            leaf.load_state_dict(state)
    for leaf in leaves(optimizer):
        if isinstance(leaf.optimizer, _TORCH_ADAM):
            for group in leaf.optimizer.param_groups:
                group.pop(STEP, None)  # the count at the time of loading, which nothing advances
    write_step(optimizer, next(iter(steps), None))


def _step_in(state: Mapping[str, Any]) -> int | None:
    """The count in what Megatron saved of one optimizer: FP32, with masters, or distributed."""
    inner = state.get("optimizer", state)
    found = inner.get("state", {}).get("common_step")
    if found is None:
        found = next((group[STEP] for group in inner["param_groups"] if STEP in group), None)
    return None if found is None else int(found)


def _load_distributed(leaf: Any, state: dict[str, Any]) -> None:
    """Hyperparameters first, then tensors while no step counts are about (:936-940 looks for them in the tensors)."""
    tensors, kind = state.pop("param_state", None), state.pop(SHARDING, None)
    if kind not in _LOADERS:
        raise UnsupportedError(
            f"the checkpoint has the distributed optimizer's state in the form {kind!r}, which is not known here. "
            f"Known are {', '.join(_LOADERS)}: save it again with Megatron, or import with weights_only=True."
        )
    leaf.load_state_dict(state)
    with _without_steps(leaf.optimizer):
        getattr(leaf, _LOADERS[kind])(tensors)


@contextmanager
def _without_steps(inner: Any) -> Iterator[None]:
    """Step counts out of the inner optimizer's state for a while. They are one tensor for all parameters (:785-789), on
    which each of them would count every step: ``write_step`` gives each its own."""
    taken = {parameter: state.pop(STEP) for parameter, state in inner.state.items() if STEP in state}
    try:
        yield
    finally:
        for parameter, step in taken.items():
            inner.state[parameter][STEP] = step
