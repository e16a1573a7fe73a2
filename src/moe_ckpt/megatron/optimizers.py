"""The tensors that Megatron's optimizers keep for each model parameter.

``FP32Optimizer`` updates the parameters; ``Float16OptimizerWithFloat16Params`` updates fp32 master weights of fp16 and
bf16 ones; ``DistributedOptimizer`` updates a flat range of either, another on each data-parallel rank. A
``ChainedOptimizer`` holds several of these, under expert parallelism one of the dense and one of the expert parameters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.megatron.compat import OPTIMIZER, changed, megatron_core
from moe_ckpt.modeling.optimizer_state import is_state_name, unnameable

MASTER = "fp32_param"
"""State name of master weights, as in Megatron's own checkpoints."""
STEP = "step"

_DISTINCT_STEP = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""torch's optimizers keep a step count per parameter (Adam) or none (SGD); Apex's and TE's FusedAdam one per group."""


_OTHER_STEPS = (
    ("optimizer_cpu_offload", "divides parameters and their state between CPU and GPU, in HybridDeviceOptimizer"),
    ("optimizer_cuda_graph", "replays optimizer.step() as a CUDA graph, in which no code around a step runs"),
    ("use_precision_aware_optimizer", "keeps scaled states inside FusedAdam, in a form that only FusedAdam can read"),
)
"""Options of Megatron's ``OptimizerConfig`` that cannot be, and why."""


@dataclass(frozen=True, eq=False)
class StateSlot:
    """One parameter in its optimizer on this rank.

    Attributes:
        leaf: The Megatron optimizer.
        updated: The tensor that the inner optimizer updates: the parameter, its master copy, or a flat shard of either;
            None if other ranks update all of it.
        master: ``updated``, if it is not the parameter.
        range: Elements ``[start, stop)`` of the parameter's flat memory that ``updated`` is; None for all of them.
        gathered: (rank, start, stop) of the others that update the rest, in order, whose weights are here too when
            ``step`` returns; empty where they are not, or nobody knows.
    """

    leaf: Any
    updated: torch.Tensor | None
    master: torch.Tensor | None
    range: tuple[int, int] | None
    gathered: tuple[tuple[int, int, int], ...] = ()

    @property
    def state(self) -> dict[str, Any]:
        """Returns the inner optimizer's live state; empty before its first step."""
        states: Mapping[Any, dict[str, Any]] = self.leaf.optimizer.state
        return states.get(self.updated, {})

    @property
    def writes(self) -> bool:
        """Returns False on further instances of the distributed optimizer, which hold copies of the first's state."""
        return not getattr(self.leaf, "distributed_optimizer_instance_id", 0)


def leaves(optimizer: Any) -> tuple[Any, ...]:
    """Returns the Megatron optimizers in ``optimizer`` that update anything on this rank.

    Raises:
        ConfigError: It is none of Megatron's.
        UnsupportedError: The layout of an optimizer's state is not known.
    """
    core = megatron_core()
    kind: type = type(optimizer)
    if not issubclass(kind, core.optimizer):
        what = "None" if optimizer is None else f"of class {kind.__module__}.{kind.__name__}"
        raise ConfigError(
            f"the optimizer is {what}, which is no optimizer of Megatron's. Give the one that megatron.core.optimizer."
            "get_megatron_optimizer(config, model_chunks) returned; the order is model_chunks, optimizer, scheduler"
        )
    is_chain = type(optimizer) is core.chained_optimizer  # subclasses divide parameters in other ways
    updating = []
    for leaf in optimizer.chained_optimizers if is_chain else [optimizer]:
        supported = (core.fp32_optimizer, core.float16_optimizer, core.distributed_optimizer)
        if type(leaf) not in supported:
            raise UnsupportedError(_unknown(type(leaf).__name__, core.version))
        if not getattr(leaf, "is_stub_optimizer", False) and leaf.optimizer is not None:
            _check(leaf, core.version)
            updating.append(leaf)
    return tuple(updating)


def _unknown(name: str, version: str) -> str:
    return (
        f"{name} of megatron-core {version} keeps its state in a way that is not supported. Supported are "
        "FP32Optimizer, Float16OptimizerWithFloat16Params and DistributedOptimizer, chained or not, with Adam, AdamW "
        "or SGD: set optimizer='adam' or 'sgd'."
    )


def _check(leaf: Any, version: str) -> None:
    """Raises ``UnsupportedError`` for settings under which state is kept elsewhere, or a step runs no hooks."""
    for option, why in _OTHER_STEPS:
        if getattr(leaf.config, option, False):
            raise UnsupportedError(f"{option} {why}. Set it to False.")
    inner = type(leaf.optimizer).__name__
    if not (isinstance(leaf.optimizer, _DISTINCT_STEP) or inner in ("FusedAdam", "FusedSGD")):
        raise UnsupportedError(_unknown(f"{type(leaf).__name__} with {inner}", version))
    if getattr(getattr(leaf, "ddp_config", None), "use_megatron_fsdp", False):
        raise UnsupportedError(
            "use_megatron_fsdp keeps parameters in its own buffers. Use the distributed optimizer instead of it, or "
            "FSDP2 with the Lightning callback."
        )


def finish_update(optimizer: Any, ended: Collection[int]) -> bool:
    """Completes on this rank alone an update of which the end failed: that is where weights are gathered.

    Gradients are ready once any inner optimizer has stepped, and what a rank updates needs no other rank.

    Args:
        optimizer: Of Megatron.
        ended: ``id`` of the inner optimizers that have stepped.

    Returns:
        Whether all that this rank updates is that of the next iteration. Not with parameters of 8 bits, whose scales
        the ranks agree on.
    """
    members = leaves(optimizer)
    if any(_quantizes(leaf) for leaf in members):
        return False
    with torch.no_grad():
        for leaf in members:
            with changed(leaf.config, timers=None):  # which may wait for all ranks
                if id(leaf.optimizer) in ended:
                    getattr(leaf, "_copy_main_params_to_model_params", lambda: None)()
                else:
                    _step_alone(leaf)
    return True


def _step_alone(leaf: Any) -> None:
    """``step_with_ready_grads`` without what the distributed optimizer's adds: it gathers weights."""
    kind = megatron_core().distributed_optimizer
    local: Any = super(kind, leaf) if isinstance(leaf, kind) else leaf
    local.step_with_ready_grads()


def _quantizes(leaf: Any) -> bool:
    gathers = getattr(getattr(leaf, "ddp_config", None), "fp8_param_gather", False)
    return bool(gathers or getattr(leaf.config, "reuse_grad_buf_for_mxfp8_param_ag", False))


def ask_ahead(optimizer: Any) -> None:
    """Has the optimizer ask now what it would ask other ranks in a process's first step. A collective of all ranks.

    Since megatron-core 0.19 that is which groups of parameters have a norm of their own. A pipeline stage that computes
    iterations again alone would ask what the upstream log of those iterations does not have.
    """
    leaves(optimizer)  # of Megatron, and known
    for group in getattr(importlib.import_module(OPTIMIZER), "SEPARATE_GRAD_NORM_GROUPS", ()):
        optimizer.has_grad_norm_group(group)


def require_quiet_weights(optimizer: Any) -> None:
    """Raises ``UnsupportedError`` if weights are still gathered from other ranks when ``step`` returns.

    That would overwrite what a window loads into them. (``overlap_param_gather`` alone gathers what was loaded.)
    """
    if any(getattr(leaf.config, "overlap_param_gather_with_optimizer_step", False) for leaf in leaves(optimizer)):
        raise UnsupportedError(
            "overlap_param_gather_with_optimizer_step gathers weights while a sparse window is loaded into them. "
            "Set it to False (overlap_param_gather may stay), or choose a policy without windows."
        )


def slots(optimizer: Any) -> dict[nn.Parameter, StateSlot]:
    """Returns the slot of each model parameter that any optimizer updates."""
    core = megatron_core()
    readers: dict[type, Callable[[Any], Iterator[tuple[nn.Parameter, StateSlot]]]] = {
        core.fp32_optimizer: _of_fp32,
        core.float16_optimizer: _of_float16,
        core.distributed_optimizer: _of_distributed,
    }
    by_parameter: dict[nn.Parameter, StateSlot] = {}
    for leaf in leaves(optimizer):
        by_parameter.update(readers[type(leaf)](leaf))
    return by_parameter


def _of_fp32(leaf: Any) -> Iterator[tuple[nn.Parameter, StateSlot]]:
    for group in leaf.optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, StateSlot(leaf, parameter, None, None)


def _of_float16(leaf: Any) -> Iterator[tuple[nn.Parameter, StateSlot]]:
    for models, masters in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
        for parameter, master in zip(models, masters, strict=True):
            yield parameter, StateSlot(leaf, master, master, None)
    for group in leaf.fp32_from_fp32_groups:
        for parameter in group:
            yield parameter, StateSlot(leaf, parameter, None, None)


def _of_distributed(leaf: Any) -> Iterator[tuple[nn.Parameter, StateSlot]]:
    shards = dict(_shards(leaf))
    for buffer in leaf.buffers:
        for parameter in buffer.params:
            updated, gathered = shards.get(parameter), tuple(_gathered(leaf, buffer, parameter))
            if updated is None:
                yield parameter, StateSlot(leaf, None, None, (0, 0), gathered)
                continue
            shard = leaf._get_model_param_range_map(parameter)["param"]
            master = None if parameter.dtype is torch.float32 else updated
            yield parameter, StateSlot(leaf, updated, master, (shard.start, shard.end), gathered)


def _gathered(leaf: Any, buffer: Any, parameter: nn.Parameter) -> Iterator[tuple[int, int, int]]:
    """Yields (rank, start, stop) of the parameter's flat memory that each other rank updates.

    As ``DistributedOptimizer._build_model_gbuf_range`` divides a bucket: into as many equal parts as there are ranks.
    """
    if getattr(leaf.ddp_config, "overlap_param_gather", False):  # then they come in the next forward pass
        return
    first, last, number = buffer.param_index_map[parameter]
    bucket, ranks = buffer.buckets[number], dist.get_process_group_ranks(buffer.data_parallel_group)
    part = bucket.grad_data.numel() // len(ranks)
    for index, rank in enumerate(ranks):
        begin = bucket.offset + index * part
        start, stop = max(first, begin) - first, min(last, begin + part) - first
        if start < stop and rank != dist.get_rank():
            yield rank, start, stop


def _shards(leaf: Any) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yields (parameter, its shard here). Not by ``model_param_group_index_map``, as Megatron's own checkpoints do: in
    a group with parameters of 16 and of 32 bits it counts in another order than the inner optimizer."""
    of_type = (
        (leaf.model_float16_groups, leaf.shard_fp32_from_float16_groups),
        (leaf.model_fp32_groups, leaf.shard_fp32_groups),
    )
    for groups, shards in of_type:
        for parameters, updated in zip(groups, shards, strict=True):
            yield from zip(parameters, updated, strict=True)


def state_tensors(slot: StateSlot, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (state name, tensor) of all state but the step count.

    Raises:
        UnsupportedError: State of another shape than the parameter's share on this rank, or under a name that no
            checkpoint can hold.
    """
    for key, value in slot.state.items():
        if key == STEP or value is None:
            continue
        if not is_state_name(key):
            raise unnameable(type(slot.leaf.optimizer).__name__, name, key)
        if not isinstance(value, torch.Tensor) or slot.updated is None or value.numel() != slot.updated.numel():
            raise UnsupportedError(
                f"state {key!r} of {name} in {type(slot.leaf.optimizer).__name__} is not of the parameter's shape, so "
                "it cannot be divided into experts and ranges. Use Adam, AdamW or SGD."
            )
        yield key, value


def make_state(slot: StateSlot, names: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> None:
    """Makes the parameter's state have exactly the tensors ``names``; new ones are zero."""
    if slot.updated is None:
        return
    inner = slot.leaf.optimizer
    if not names:
        inner.state.pop(slot.updated, None)
        return
    state = inner.state[slot.updated]
    for key in [key for key in state if key not in names and key != STEP]:
        del state[key]
    for key in names:
        if not isinstance(state.get(key), torch.Tensor):
            state[key] = torch.zeros_like(slot.updated.detach(), dtype=dtypes[key])
    if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and STEP not in state:
        on_device = any(g.get("capturable") or g.get("fused") for g in inner.param_groups)
        state[STEP] = torch.zeros((), dtype=torch.float32, device=slot.updated.device if on_device else "cpu")


def read_step(optimizer: Any) -> int | None:
    """Returns how often the optimizers have stepped; None if they do not count, or have not stepped.

    It is one number because every parameter has a gradient in every step: Megatron keeps them in buffers.

    Raises:
        ConfigError: Counts differ, as after loading a checkpoint of which a part was lost.
    """
    counts = {count for leaf in leaves(optimizer) for count in _counts(leaf)}
    if len(counts) > 1:
        raise ConfigError(
            f"the optimizers have made {sorted(counts)} steps: some steps did not update all parameters. Give all "
            "parameters of the model to get_megatron_optimizer at the start, and freeze none during training."
        )
    return next(iter(counts), None)


def _counts(leaf: Any) -> Iterator[int]:
    """Yields counts, a parameter's before its group's, for Megatron's loader leaves one that Adam does not advance."""
    for group in leaf.optimizer.param_groups:
        if group["params"] and STEP in (state := leaf.optimizer.state.get(group["params"][0], {})):
            yield int(state[STEP])
        elif STEP in group and group["params"]:
            yield int(group[STEP])


def write_step(optimizer: Any, step: int | None) -> None:
    """Sets the count everywhere. Each parameter gets its own tensor, for Megatron's loader leaves one for all."""
    for leaf in leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            fused = not isinstance(leaf.optimizer, _DISTINCT_STEP)
            if step is None:
                group.pop(STEP, None)  # as before the first step
            elif STEP in group or fused:
                old = group.get(STEP)
                group[STEP] = old.fill_(step) if isinstance(old, torch.Tensor) else step
            for parameter in group["params"]:
                state = leaf.optimizer.state.get(parameter, {})
                if isinstance(state.get(STEP), torch.Tensor):
                    state[STEP] = torch.full_like(state[STEP], step or 0)
