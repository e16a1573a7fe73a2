"""Megatron's optimizers: the tensors that they have for each parameter, hyperparameters, counts, scales, and steps.

``FP32Optimizer`` updates the parameters; ``Float16OptimizerWithFloat16Params`` updates fp32 master weights of fp16 and
bf16 ones; ``DistributedOptimizer`` updates a flat range of either, another on each data-parallel rank. A
``ChainedOptimizer`` holds several of these, under expert parallelism one of the dense and one of the expert parameters.

Another layout has other param groups (without expert parallelism none of experts), so groups are matched by their
multipliers and flags. A group that matches none gets its values from the scheduler.

State is restored only into an optimizer of the same kind. Megatron uses Transformer Engine's Adam where installed, else
Apex's, else torch's. Their update and state are the same, so a run may change between them.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_ckpt.driver.changes import Change, are_equal, changes_between, plain_values
from moe_ckpt.driver.host import Stateful
from moe_ckpt.driver.states import Moment
from moe_ckpt.errors import ConfigError, UnsupportedError, optimizer_changed
from moe_ckpt.megatron.compat import OPTIMIZER, Wrapped, changed_attributes, megatron_core
from moe_ckpt.modeling.optimizer_state import (
    IMPLEMENTATION_FLAGS,
    STEP,
    class_name,
    fit_stored_value,
    is_state_name,
    make_tensor,
    replaced_state,
    unnameable_error,
)
from moe_ckpt.ports import TensorMeta
from moe_ckpt.run.options import Options
from moe_ckpt.stopwatch import Stopwatch

log = logging.getLogger("moe_ckpt")

MASTER = "fp32_param"
"""State name of master weights, as in Megatron's own checkpoints."""
_Kind = tuple[tuple[str, Any], ...]

SCHEDULER = "scheduler"
"""Name of the scheduler among the stateful objects of a checkpoint."""
EXPERT = "is_expert_parallel"
_EXPERT_FLAGS = {(EXPERT, False), (EXPERT, True)}
_NOT_OURS = IMPLEMENTATION_FLAGS | {"params", STEP}
_SCHEDULED = frozenset({"lr", "weight_decay"})
"""What Megatron's scheduler sets in param groups, from settings of its own."""
_POSITION = frozenset({"num_steps", "step"})

TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)
_DISTINCT_STEP = (*TORCH_ADAM, torch.optim.SGD)
"""torch's optimizers keep a step count per parameter (Adam) or none (SGD); Apex's and TE's FusedAdam one per group."""


_OTHER_STEPS = (
    ("optimizer_cpu_offload", "divides parameters and their state between CPU and GPU, in HybridDeviceOptimizer"),
    ("optimizer_cuda_graph", "replays optimizer.step() as a CUDA graph, in which no code around a step runs"),
    ("use_precision_aware_optimizer", "keeps scaled states inside FusedAdam, in a form that only FusedAdam can read"),
    ("reuse_grad_buf_for_mxfp8_param_ag", "is for weights kept in fp8, on whose scales all ranks have to agree"),
)
"""Options of Megatron's ``OptimizerConfig`` that are refused, and why."""


@dataclass(frozen=True, eq=False)
class StateSlot:
    """One parameter in its optimizer on this rank.

    Attributes:
        leaf: The Megatron optimizer.
        updated: The tensor that the inner optimizer updates: the parameter, its master copy, or a flat shard of either;
            None if other ranks update all of it.
        master: ``updated``, if it is not the parameter.
        range: Elements ``[start, stop)`` of the parameter's flat memory that ``updated`` is; None for all of them.
        gathered: (rank, start, stop) of the other ranks that update the rest, in order, if this rank has their weights
            when ``step`` returns; else empty.
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
        """Returns False for further instances of the distributed optimizer, which hold copies of the first's state."""
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


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Returns the optimizers that write to parameters on this rank, in the order that numbers them."""
    return [leaf.optimizer for leaf in leaves(optimizer)]


def _unknown(name: str, version: str) -> str:
    return (
        f"{name} of megatron-core {version} keeps its state in a way that is not supported. Supported are "
        "FP32Optimizer, Float16OptimizerWithFloat16Params and DistributedOptimizer, chained or not, with Adam, AdamW "
        "or SGD: set optimizer='adam' or 'sgd'."
    )


def _check(leaf: Any, version: str) -> None:
    """Raises ``UnsupportedError`` for options under which state is elsewhere, or a step runs no hooks."""
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


class StepWatch:
    """Tells the moments of each ``optimizer.step``.

    If inner optimizers have stepped when it raises (the distributed optimizer gathers weights last), this rank's part
    of the update is completed without other ranks.

    Megatron's optimizers have no hooks, and a ``ChainedOptimizer`` does not call ``step`` of its members, so the method
    of this object is wrapped.

    Args:
        optimizer: Megatron's.
        inner: The optimizers in it that write to parameters.
        before: Called before a step.
        after: Called after a step.
        note: Called with each moment of a step.
        stopwatch: Counts the time of these functions.

    Attributes:
        updated: Whether the newest step changed the weights, by its result; True before the first.
        steps: Steps since ``iteration_ends``.
    """

    def __init__(
        self,
        optimizer: Any,
        inner: Sequence[Any],
        before: Callable[[], None],
        after: Callable[[], None],
        note: Callable[[Moment], None],
        stopwatch: Stopwatch,
    ) -> None:
        self._optimizer, self._stopwatch = optimizer, stopwatch
        self._before, self._after, self._note = before, after, note
        self._ended: dict[int, bool] = {}
        """By ``id`` of each inner optimizer that has begun to write in this step: whether it has ended."""
        self.updated = True
        self.steps = 0
        self._undo = ExitStack()
        self._undo.callback(Wrapped(optimizer, "step", self._stepping).close)
        for one in inner:
            self._undo.callback(one.register_step_pre_hook(stopwatch.around(self._begins)).remove)
            self._undo.callback(one.register_step_post_hook(stopwatch.around(self._ends)).remove)

    def _stepping(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._stopwatch:
            self._before()
            self._note(Moment.REDUCING)
        self._ended.clear()
        try:
            result = step(*args, **kwargs)
        except Exception:
            self._end_alone()
            raise
        self.updated = bool(result[0]) if isinstance(result, tuple) and result else True
        self.steps += 1
        with self._stopwatch:
            self._after()
            self._note(Moment.WRITTEN)
        return result

    def _begins(self, inner: Any, *_: Any) -> None:
        self._ended[id(inner)] = False
        self._note(Moment.WRITING)

    def _ends(self, inner: Any, *_: Any) -> None:
        self._ended[id(inner)] = True

    def _end_alone(self) -> None:
        """Completes a step that raised, unless an inner optimizer was in the middle of its own."""
        if not self._ended or not all(self._ended.values()):
            return
        try:
            finish_update(self._optimizer, self._ended)
        except Exception as error:  # then recovery uses an older checkpoint
            log.warning("the update that failed cannot be completed on this rank alone: %r", error)
            return
        self.updated = True
        self._note(Moment.WRITTEN_ALONE)

    def iteration_ends(self, options: Options) -> None:
        """Raises ``ConfigError`` if an iteration made several updates, since a replay is right for one only."""
        steps, self.steps = self.steps, 0
        if steps > 1 and options.needs.windows:
            raise ConfigError(
                f"{type(options.policy).__name__} needs one optimizer.step() per iteration, and this iteration made "
                f"{steps}. Call after_step() after each of them, or use Dense or MoC"
            )

    def close(self) -> None:
        """Removes the wrapper and all hooks. May be called twice."""
        self._undo.close()


def finish_update(optimizer: Any, ended: Collection[int]) -> None:
    """Completes an update on this rank alone, after its end failed, where weights are gathered from other ranks.

    Gradients are ready once any inner optimizer has stepped, and a rank needs no other rank to update its share.

    Args:
        optimizer: Megatron's.
        ended: ``id`` of the inner optimizers that have stepped.
    """
    distributed = megatron_core().distributed_optimizer
    with torch.no_grad():
        for leaf in leaves(optimizer):
            with changed_attributes(leaf.config, timers=None):  # timers may wait for all ranks
                if id(leaf.optimizer) in ended:
                    getattr(leaf, "_copy_main_params_to_model_params", lambda: None)()
                else:  # the distributed optimizer's own method would gather weights
                    local: Any = super(distributed, leaf) if isinstance(leaf, distributed) else leaf
                    local.step_with_ready_grads()


def exchange_norm_groups(optimizer: Any) -> None:
    """Makes the optimizer learn now what it would ask other ranks in a process's first step. A collective of all ranks.

    Since megatron-core 0.19 that is which groups of parameters have a norm of their own. A pipeline stage that computes
    iterations again alone cannot ask: the upstream log of those iterations has no such message.
    """
    leaves(optimizer)  # raises unless it is known
    for group in getattr(importlib.import_module(OPTIMIZER), "SEPARATE_GRAD_NORM_GROUPS", ()):
        optimizer.has_grad_norm_group(group)


def require_weights_gathered(optimizer: Any) -> None:
    """Raises ``UnsupportedError`` if weights are still gathered from other ranks when ``step`` returns.

    That would overwrite weights that a window loads. (``overlap_param_gather`` alone gathers the loaded weights.)
    """
    if any(getattr(leaf.config, "overlap_param_gather_with_optimizer_step", False) for leaf in leaves(optimizer)):
        raise UnsupportedError(
            "overlap_param_gather_with_optimizer_step gathers weights while a sparse window is loaded into them. "
            "Set it to False (overlap_param_gather may stay), or choose a policy without windows."
        )


def slots(optimizer: Any) -> dict[nn.Parameter, StateSlot]:
    """Returns the slot of each model parameter that any optimizer updates."""
    core = megatron_core()
    by_parameter: dict[nn.Parameter, StateSlot] = {}
    for leaf in leaves(optimizer):
        kind: type = type(leaf)
        if kind is core.distributed_optimizer:
            by_parameter.update(_of_distributed(leaf))
            continue
        unmastered = [group["params"] for group in leaf.optimizer.param_groups]
        if kind is core.float16_optimizer:
            unmastered = leaf.fp32_from_fp32_groups
            for parameter, master in _paired(leaf.float16_groups, leaf.fp32_from_float16_groups):
                by_parameter[parameter] = StateSlot(leaf, master, master, None)
        for parameter in chain.from_iterable(unmastered):
            by_parameter[parameter] = StateSlot(leaf, parameter, None, None)
    return by_parameter


def _paired(groups: Sequence[Any], others: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields pairs of the members of groups of equal sizes."""
    return zip(chain.from_iterable(groups), chain.from_iterable(others), strict=True)


def _of_distributed(leaf: Any) -> Iterator[tuple[nn.Parameter, StateSlot]]:
    # Not by ``model_param_group_index_map``, as Megatron's own checkpoints do: in a group with parameters of 16 and of
    # 32 bits it counts in another order than the inner optimizer.
    shards = dict(_paired(leaf.model_float16_groups, leaf.shard_fp32_from_float16_groups))
    shards.update(_paired(leaf.model_fp32_groups, leaf.shard_fp32_groups))
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

    ``DistributedOptimizer._build_model_gbuf_range`` divides a bucket into as many equal parts as there are ranks.
    """
    if getattr(leaf.ddp_config, "overlap_param_gather", False):  # then weights are gathered in the next forward pass
        return
    first, last, number = buffer.param_index_map[parameter]
    bucket, ranks = buffer.buckets[number], dist.get_process_group_ranks(buffer.data_parallel_group)
    part = bucket.grad_data.numel() // len(ranks)
    for index, rank in enumerate(ranks):
        begin = bucket.offset + index * part
        start, stop = max(first, begin) - first, min(last, begin + part) - first
        if start < stop and rank != dist.get_rank():
            yield rank, start, stop


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
            raise unnameable_error(type(slot.leaf.optimizer).__name__, name, key)
        if not isinstance(value, torch.Tensor) or slot.updated is None or value.numel() != slot.updated.numel():
            raise UnsupportedError(
                f"state {key!r} of {name} in {type(slot.leaf.optimizer).__name__} is not of the parameter's shape, so "
                "it cannot be divided into experts and ranges. Use Adam, AdamW or SGD."
            )
        yield key, value


def make_state(slot: StateSlot, dtypes: Mapping[str, str]) -> None:
    """Makes the parameter's state have exactly these tensors (name -> dtype); new ones are zero."""
    if slot.updated is None:
        return
    inner, updated = slot.leaf.optimizer, slot.updated
    with replaced_state(inner, updated, (*dtypes, STEP) if dtypes else (), belongs=lambda value: True) as state:
        for key, dtype in dtypes.items():
            make_tensor(inner, updated, key, TensorMeta(dtype, tuple(updated.shape)))
        if dtypes and isinstance(inner, TORCH_ADAM) and STEP not in state:
            make_tensor(inner, updated, STEP, TensorMeta("F32", (), on_param_device=False))


def read_step(optimizer: Any) -> int | None:
    """Returns how often the optimizers have stepped; None if they do not count, or have not stepped.

    It is one number because every parameter has a gradient in every step: Megatron has buffers for all.

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
    """Yields each group's count. A parameter's comes first: after Megatron's loader the group's own goes stale."""
    for group in leaf.optimizer.param_groups:
        if group["params"] and STEP in (state := leaf.optimizer.state.get(group["params"][0], {})):
            yield int(state[STEP])
        elif STEP in group and group["params"]:
            yield int(group[STEP])


def write_step(optimizer: Any, step: int | None) -> None:
    """Sets all counts. Each parameter gets its own tensor, since after Megatron's loader all of them share one."""
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


def read_plain(optimizer: Any) -> dict[str, Any]:
    """Returns {"step": int or None, "groups": [...], "scalers": [state or None of each leaf]}."""
    scalers = [None if scaler is None else scaler.state_dict() for scaler in _scalers(optimizer)]
    return {"step": read_step(optimizer), "groups": settings(optimizer), "scalers": scalers}


def settings(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the entries of the param groups, without parameters, step counts and implementation flags."""
    return [{key: value for key, value in group.items() if key not in _NOT_OURS} for group in _groups(optimizer)]


def write_plain(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """Writes what ``read_plain`` returned, after the optimizers' tensors were made."""
    write_settings(optimizer, stored["groups"])
    write_step(optimizer, stored["step"])
    scales = [state for state in stored["scalers"] if state]  # a constant scale has no state
    for number, scaler in enumerate(_scalers(optimizer)):
        if scaler is not None and scales:  # by position, since each has its own overflows
            scaler.load_state_dict(scales[min(number, len(scales) - 1)])


def write_settings(optimizer: Any, stored: Sequence[Mapping[str, Any]]) -> None:
    """Writes the result of ``settings`` into the param groups."""
    for group, entry in matching_groups(list(_groups(optimizer)), stored):
        for key in entry.keys() - {EXPERT}:
            group[key] = fit_stored_value(group.get(key), entry[key])


def _scalers(optimizer: Any) -> list[Any]:
    return [getattr(leaf, "grad_scaler", None) for leaf in leaves(optimizer)]


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    for leaf in leaves(optimizer):
        yield from leaf.optimizer.param_groups


def matching_groups(
    here: Sequence[dict[str, Any]], stored: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Yields each group with the stored one of its kind: by position, if the kinds are equal throughout.

    Several of one kind (``decoupled_lr`` makes two) have the same order on every layout. Experts have groups of their
    own under expert parallelism, and are in the dense ones without it.
    """
    if [_kind(group) for group in here] == [_kind(entry) for entry in stored]:
        yield from zip(here, stored, strict=True)
        return
    used: Counter[_Kind] = Counter()
    for group in here:
        kind = _kind(group)
        candidates = [entry for entry in stored if _kind(entry) == kind]
        candidates = candidates or [entry for entry in stored if {*_kind(entry)} ^ {*kind} <= _EXPERT_FLAGS]
        if candidates:
            yield group, candidates[min(used[kind], len(candidates) - 1)]
            used[kind] += 1
        else:
            log.info("no param group of kind %s in the checkpoint; the scheduler sets its rates", kind)


def _kind(group: Mapping[str, Any]) -> _Kind:
    """Returns what distinguishes Megatron's groups (``wd_mult``, ``lr_mult``, ``is_expert_parallel``, ...)."""
    return tuple(sorted((key, v) for key, v in group.items() if key.endswith("_mult") or key.startswith("is_")))


def configured_hyperparameters(optimizer: Any, stateful: Mapping[str, Stateful]) -> dict[str, Any]:
    """Returns the present hyperparameters of optimizer and scheduler that the user chooses, as plain data."""
    return plain_settings(settings(optimizer), stateful[SCHEDULER].state_dict() if SCHEDULER in stateful else {})


def plain_settings(groups: Sequence[Mapping[str, Any]], scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of param groups and scheduler state that the user chooses."""
    scheduler = plain_values(scheduler)
    computed = _SCHEDULED if "max_lr" in scheduler else frozenset()
    return {
        "groups": [
            {key: value for key, value in plain_values(group).items() if key not in computed | _POSITION}
            for group in groups
        ],
        "scheduler": {key: value for key, value in scheduler.items() if key not in _POSITION},
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any], used: Mapping[str, Any]) -> list[Change]:
    """Returns the differences, each once, even if several param groups and the scheduler have it.

    Args:
        before: Result of ``configured_hyperparameters`` when the run began.
        now: The result when this process began.
        used: The result after the checkpoint was loaded, which tells whose value is used.
    """
    differences: dict[tuple[str, str, str], Change] = {}
    places = {id(group): number for number, group in enumerate(now["groups"])}
    pairs = [
        ("optimizer ", old, new, used["groups"][places[id(new)]])
        for new, old in matching_groups(now["groups"], before["groups"])
    ]
    for name, old, new, in_force in [*pairs, ("scheduler ", before["scheduler"], now["scheduler"], used["scheduler"])]:
        for change in changes_between(name, old, new, from_checkpoint=True):
            key = change.where.removeprefix(name)
            if key != EXPERT:  # a flag of the layout
                retained = are_equal(old.get(key), in_force.get(key))
                differences.setdefault((key, change.before, change.now), replace(change, from_checkpoint=retained))
    return list(differences.values())


def read_classes(optimizer: Any) -> list[dict[str, str]]:
    """Returns ``{"class": ..., "kind": ...}`` of the rank's inner optimizers, each once; kinds: Adam, AdamW, SGD."""
    kinds = {(class_name(leaf.optimizer), _kind_of(leaf.optimizer)) for leaf in leaves(optimizer)}
    return [{"class": name, "kind": kind} for name, kind in sorted(kinds)]


def require_same_kind(optimizer: Any, plain: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` unless stored state is of the running optimizer's kind. Changes nothing.

    Args:
        optimizer: Megatron's.
        plain: ``MegatronTrainingState.plain()`` of the checkpoint.
    """
    running, stored = read_classes(optimizer), plain["optimizer_classes"]
    here, before = ({entry["kind"] for entry in entries} for entries in (running, stored))
    if before and here and not before & here:  # a rank whose parameters are all frozen has no optimizer
        names = (", ".join(entry["class"] for entry in entries) for entries in (stored, running))
        raise optimizer_changed("the optimizer", *names)


def _kind_of(inner: Any) -> str:
    name = type(inner).__name__.removeprefix("Fused")
    return "AdamW" if name == "Adam" and type(inner).__name__ != name and getattr(inner, "adam_w_mode", True) else name
