"""Counts, per layer and expert, the token assignments of the training forward passes.

A count is one (token, chosen expert) pair, so a token with top-k routing counts k times. Entries outside ``[0, E)``
(padding, dropped tokens, zero-computation experts) are not counted. Counting adds a few small kernels per layer, or
none where the number of rows that an expert is given tells. Nothing here waits for the device.

On request the gate's weights are added up, too (soft counts), if a module has them beside the indices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.blocks import own_rows
from moe_ckpt.modeling.discover import FoundLayer, RoutingSource
from moe_ckpt.modeling.registry import Assignments
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.stopwatch import Stopwatch


class TrainingPasses:
    """Tells forward passes of training from others. Those of modules in training mode are training's.

    A model may be trained in eval mode, which switches off dropout and little else: ``from_pretrained`` of transformers
    returns it so, and Lightning does not change that. In eval mode a pass is training's if it is part of a batch and
    gradients are recorded.

    Attributes:
        in_batch: A batch of training is computed now, not a validation or a hook.
    """

    in_batch = False

    def include(self, module: nn.Module) -> bool:
        """Returns whether the forward pass of ``module`` that runs now is training's."""
        return module.training or (self.in_batch and torch.is_grad_enabled())


_INDICES = (torch.int64, torch.int32)
"""Types of tensors by which others are indexed; one of bytes would be a mask."""
SOFT_UNIT = 1 << 16
"""Fixed-point scale of gate weights: soft counts are whole numbers, this many to one token."""


def is_recomputed() -> bool:
    """Returns whether this is inside backward, where activation checkpointing runs the forward pass again."""
    return bool(torch._C._current_graph_task_id() != -1)


@functools.cache
def _one() -> torch.Tensor:
    """Returns 1, in host memory."""
    return torch.ones((), dtype=torch.int64, device="cpu")


def _entries(experts: torch.Tensor, entries: int) -> torch.Tensor:
    """Returns indices of a table's ``entries``, flat; the last entry stands for dropped tokens."""
    return experts.reshape(-1).to(torch.int64).clamp(-1, entries - 1).remainder_(entries)


def _operator(function: Callable[..., None]) -> Callable[..., None]:
    """Returns ``function``, which becomes a custom operator where torch.compile traces it.

    So the compiled model keeps its graph, and the check for backward is made at run time. Eager calls do not use the
    dispatcher, which costs more than counting.
    """
    operator = torch.library.custom_op(f"moe_ckpt::{function.__name__}", function, mutates_args={"counts"})
    operator.register_fake(lambda *args: None)

    @functools.wraps(function)
    def call(*args: Any) -> None:
        (operator if torch.compiler.is_compiling() else function)(*args)

    return call


@_operator
def count_assignments(counts: torch.Tensor, experts: torch.Tensor) -> None:
    """Counts the indices ``experts`` (any shape) in ``counts`` [E + 1], whose last entry is of dropped tokens."""
    if is_recomputed():
        return
    if counts.is_cpu and experts.dtype in _INDICES:
        # Only two calls, for the CPU. -1 is the last entry. On a GPU this would sort the indices.
        counts.index_put_((experts.clamp(-1, counts.shape[0] - 1),), _one(), accumulate=True)
        return
    flat = _entries(experts, counts.shape[0])
    counts.scatter_add_(0, flat, torch.ones_like(flat))


@_operator
def count_weights(counts: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
    """Adds ``weights``, one for each of ``experts``, to ``counts`` [E + 1], which is float64."""
    if is_recomputed():
        return
    flat = _entries(experts, counts.shape[0])
    counts.scatter_add_(0, flat, weights.reshape(-1).to(counts.dtype))


@_operator
def count_tokens(counts: torch.Tensor, tokens: torch.Tensor) -> None:
    """Adds tokens per expert, ``tokens`` [E], to ``counts`` [E + 1]."""
    if not is_recomputed():
        counts[:-1] += tokens.reshape(-1)


@_operator
def count_rows(counts: torch.Tensor, rows: torch.Tensor, expert: int) -> None:
    """Adds the number of rows of ``rows`` [..., hidden] to one entry of ``counts`` [E + 1]."""
    if not is_recomputed() and rows.numel():
        counts[expert] += rows.numel() // rows.shape[-1]


def clear(tables: list[torch.Tensor]) -> None:
    """Sets all tables to zero, by one kernel for those of the same device and type."""
    if tables:
        torch._foreach_zero_(tables)


def counts_on_host(tables: Mapping[int, torch.Tensor], shape: tuple[int, int]) -> Deferred[NDArray[Any]]:
    """Returns tables [E + 1] as the rows of one array [L, E], 0 where there is none. Only ``result()`` waits.

    Each device joins its tables and copies them once, in the order of its work, so the tables may be changed at once.
    torch does not reuse the pinned host memory before the copy is done.

    Args:
        tables: By layer; all of one type.
        shape: L, and E of the layer that has the most experts.
    """
    by_device: dict[torch.device, list[int]] = {}
    for at, table in tables.items():
        by_device.setdefault(table.device, []).append(at)
    sizes = {at: table.shape[0] for at, table in tables.items()}
    joined, events = [], []
    for device, layers in by_device.items():
        stacked = torch.cat([tables[at] for at in layers])  # with the last entries: cutting views takes longer
        if stacked.is_cuda:
            here = torch.empty(stacked.shape, dtype=stacked.dtype, device="cpu", pin_memory=True)
            here.copy_(stacked, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        else:
            here = stacked.cpu()
        joined.append((layers, here))

    def rows() -> NDArray[Any]:
        arrays = [(layers, here.numpy()) for layers, here in joined]
        total = np.zeros(shape, dtype=arrays[0][1].dtype if arrays else np.int64)
        for layers, flat in arrays:
            for at in layers:
                total[at, : sizes[at] - 1], flat = flat[: sizes[at] - 1], flat[sizes[at] :]
        return total

    return Deferred(rows, events)


def soft_on_host(tables: Mapping[int, torch.Tensor], shape: tuple[int, int]) -> Deferred[Counts]:
    """Returns tables of gate weights in units of 2**-16: the sum of whole numbers over ranks depends on no order."""
    return counts_on_host(tables, shape).then(lambda weights: np.rint(weights * SOFT_UNIT).astype(np.int64))


Mask = NDArray[np.bool_]
"""``[L, E]``, one entry for each expert."""


def step_tokens(routed: Counts, soft: Counts | None, assigned: Counts | None, frozen: Mask | None) -> StepTokens:
    """Returns the tokens of a step, all ``[L, E]``. Tokens of frozen experts are assigned, but not applied.

    Args:
        routed: Those that the experts processed.
        soft: Sums of the gate's weights.
        assigned: Those that the router chose an expert for; None: ``routed``.
        frozen: Experts that no update changes.
    """
    if frozen is None:
        return StepTokens(routed, soft, assigned)
    return StepTokens(np.where(frozen, 0, routed), soft, routed if assigned is None else assigned)


class LiveHook:
    """A hook of the model that is trained.

    A copy of a module, such as the average of weights that a teacher computes with, and a module that was pickled have
    a hook that does nothing.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _idle_hook, ()


class _CountingHook(LiveHook):
    """A hook that is called in training's forward passes, and timed by the stopwatch unless compiled."""

    def __init__(self, hook: Callable[..., None], passes: TrainingPasses, stopwatch: Stopwatch) -> None:
        super().__init__(hook)
        self._passes, self._stopwatch = passes, stopwatch

    def __call__(self, module: nn.Module, *args: Any) -> None:
        with nullcontext() if torch.compiler.is_compiling() else self._stopwatch:
            if self._passes.include(module):
                self._hook(module, *args)


def _idle_hook() -> Callable[..., None]:
    return _count_nothing


def _count_nothing(*_: Any) -> None:
    """Is the hook of a copy."""


class RoutingCounter:
    """Hooks on the MoE layers of one model; see the module's docstring for what is counted.

    Counts of several micro-batches add up until ``take``. Used on the training thread only. With torch.compile,
    construct the counter before the first compiled forward pass.

    Args:
        soft: Add up the gate's weights, too: a floating-point tensor of the same shape as the indices, among the
            arguments or results of the same module.
        frozen: Returns the experts that no update changes (``module_state.FrozenExperts``), the same array as long as
            they are the same. None: there are none.
        passes: Tells which forward passes are training's. None: those of modules in training mode.
        stopwatch: Counts the time that hooks take, except compiled ones, whose kernels are the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[FoundLayer],
        *,
        soft: bool = False,
        frozen: Callable[[], Mask | None] | None = None,
        passes: TrainingPasses | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._stopwatch = stopwatch or Stopwatch()
        first = next(model.parameters(), None)
        device = first.device if first is not None else torch.device("cpu")
        self._passes = passes or TrainingPasses()
        self._width = max((layer.info.experts for layer in layers), default=0)
        self._counts = [torch.zeros(layer.info.experts + 1, dtype=torch.int64, device=device) for layer in layers]
        self._rows = [[0] * layer.info.experts for layer in layers]
        self._soft = [c.to(torch.float64) for c in self._counts] if soft else []
        self._handles = [handle for at, layer in enumerate(layers) for handle in self._attach(at, layer)]
        self._frozen, self._updated = frozen or (lambda: None), False
        self._left_out: Mask | None = None

    def update_begins(self) -> None:
        """Notes which experts are frozen at the update, since hooks may thaw and freeze before ``take``."""
        now = self._frozen()
        if not self._updated:
            self._left_out = now
        elif now is not self._left_out:  # of several updates, an expert may have been in one
            self._left_out = None if now is None or self._left_out is None else now & self._left_out
        self._updated = True

    def take(self) -> Deferred[StepTokens]:
        """Returns the counts ``[L, E]`` since the last ``take`` or ``discard``, and resets them. Nothing waits yet.

        Soft counts are 0 for layers in which no module has the weights beside the indices.
        """
        rows = [(at, list(of_layer)) for at, of_layer in enumerate(self._rows) if any(of_layer)]
        shape = len(self._rows), self._width
        counts = counts_on_host(dict(enumerate(self._counts)), shape)
        soft = soft_on_host(dict(enumerate(self._soft)), shape) if self._soft else None
        left_out = self._left_out if self._updated else self._frozen()

        def tokens() -> StepTokens:
            total = counts.result()
            for at, of_layer in rows:
                total[at, : len(of_layer)] += of_layer
            return step_tokens(total, None if soft is None else soft.result(), None, left_out)

        self.discard()
        return Deferred(tokens)

    def discard(self) -> None:
        """Resets the counts, which led to no optimizer step."""
        self._updated, self._left_out = False, None
        clear([*self._counts, *self._soft])
        self._rows = [[0] * len(rows) if any(rows) else rows for rows in self._rows]

    def close(self) -> None:
        """Removes all hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _attach(self, at: int, layer: FoundLayer) -> Iterator[torch.utils.hooks.RemovableHandle]:
        source = layer.source
        if source.kind == "rows":
            for expert, module in enumerate(source.modules):
                hook = _CountingHook(self._row_hook(at, expert), self._passes, self._stopwatch)
                yield module.register_forward_pre_hook(hook, with_kwargs=True)
        elif source.argument is not None:
            hook = _CountingHook(self._argument_hook(at, layer, source, source.argument), self._passes, self._stopwatch)
            yield source.modules[0].register_forward_pre_hook(hook, with_kwargs=True)
        else:
            read = source.assignments or _integer_output(layer)
            hook = _CountingHook(self._output_hook(at, read), self._passes, self._stopwatch)
            yield source.modules[0].register_forward_hook(hook, with_kwargs=True)

    def _table(self, at: int, device: torch.device) -> torch.Tensor:
        """Returns the layer's counts, on the device of its routing, to which the model may have moved since."""
        if self._counts[at].device != device:
            self._counts[at] = self._counts[at].to(device)
        return self._counts[at]

    def _argument_hook(
        self, at: int, layer: FoundLayer, source: RoutingSource, argument: tuple[int, str]
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        position, name = argument
        counts_given = source.kind == "counts"

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[position] if len(args) > position else kwargs[name]
            if counts_given:
                tokens = torch.as_tensor(value)
                count_tokens(self._table(at, tokens.device), tokens.detach())
            else:
                if not (isinstance(value, torch.Tensor) and _is_integer(value)):
                    raise ConfigError(
                        f"MoE layer {layer.info.name!r}: its forward argument {name!r} was taken for expert indices "
                        "but is no integer tensor. Register the layer's class with moe_ckpt.register_moe(..., "
                        "assignments=...)"
                    )
                count_assignments(self._table(at, value.device), own_rows(value.detach()))
                if self._soft:
                    self._weigh(at, value, (*args, *kwargs.values()))

        return hook

    def _row_hook(self, at: int, expert: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """Returns a hook for one expert. The host knows the number of rows, so no kernel adds them up."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows = args[0] if args else None
            if not isinstance(rows, torch.Tensor):
                rows = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            if torch.compiler.is_compiling():
                count_rows(self._table(at, rows.device), rows.detach(), expert)
            elif not is_recomputed() and rows.numel():
                self._rows[at][expert] += rows.numel() // rows.size(-1)

        return hook

    def _output_hook(
        self, at: int, read: Assignments
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # Else a topk in ``read`` is taken for the layer's own by the boost (``boost.ports.TopKPort``).
            with nullcontext() if torch.compiler.is_compiling() else torch._C.DisableTorchFunction():
                experts = read(module, args, kwargs, output)
            count_assignments(self._table(at, experts.device), own_rows(experts.detach()))
            if self._soft:
                shown = output.values() if isinstance(output, Mapping) else output
                self._weigh(at, experts, shown if isinstance(shown, (tuple, list)) else (shown,))

        return hook

    def _weigh(self, at: int, experts: torch.Tensor, shown: Iterable[Any]) -> None:
        """Adds the gate's weights, if they are among ``shown``."""
        for value in shown:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == experts.shape:
                if self._soft[at].device != value.device:
                    self._soft[at] = self._soft[at].to(value.device)
                count_weights(self._soft[at], own_rows(experts.detach()), own_rows(value.detach()))
                return


def _integer_output(layer: FoundLayer) -> Assignments:
    """Returns a function that takes the one integer tensor from what a router returns."""

    def read(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> torch.Tensor:
        parts = output.values() if isinstance(output, Mapping) else output
        parts = [parts] if isinstance(parts, torch.Tensor) else list(parts)
        integers = [part for part in parts if isinstance(part, torch.Tensor) and _is_integer(part)]
        if len(integers) != 1:
            raise ConfigError(
                f"MoE layer {layer.info.name!r}: its router {type(module).__name__} returns {len(integers)} integer "
                "tensors, so the chosen experts cannot be determined. Register the layer's class with "
                "moe_ckpt.register_moe(..., assignments=...); if not the router but the layer chooses them, with "
                "on='layer' as well"
            )
        return integers[0]

    return read


def _is_integer(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
