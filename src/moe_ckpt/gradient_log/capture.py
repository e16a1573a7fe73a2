"""Captures the gradients that torch optimizers consume, whatever code calls ``step``.

A hook before ``step`` sees final gradients, unless ``step`` gets a closure that computes them (Lightning's automatic
optimization): then the closure is wrapped, and the gradients are captured when it returns. If the loss scaler skips
``step``, nothing runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import update_wrapper, wraps
from itertools import chain
from operator import is_
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.format.sealed import FixedStrings
from moe_ckpt.gradient_log.optimizers import Update, copied_value, coupling_of
from moe_ckpt.gradient_log.units import Unit, whole_unit
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.modeling.blocks import block_in, block_of
from moe_ckpt.modeling.names import parameters_of
from moe_ckpt.slices.copying import write_counts
from moe_ckpt.stopwatch import Stopwatch

Describe = Callable[[int, int, torch.Tensor], Unit]
"""(number of the optimizer, number of the param group, tensor that is updated) -> its unit."""


@dataclass(frozen=True, eq=False)
class ConsumedGradients:
    """Gradients that an optimizer is about to consume, as live tensors: after reduction, unscaling and clipping.

    Attributes:
        update: Everything else that the update depends on. Its tensors are copies.
        units: The units that have a gradient.
        gradients: Gradient of each of ``units``; views of live memory.
        stay: True if the update does not change gradients, so that they may be read until ``GradientConsumer.release``.
            A fused optimizer that is given the loss scale writes the unscaled gradients back.
        apart: True if training does not write to them any more, see ``apart_from_training``.
    """

    update: Update
    units: Sequence[Unit]
    gradients: Sequence[torch.Tensor]
    stay: bool
    apart: bool = False
    _changed_before: tuple[str, ...] = ()
    _versions: npt.NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", write_counts(self.gradients))

    def changed(self) -> tuple[str, ...]:
        """Returns the names of units whose gradients were written to since they were consumed, as far as torch counts.

        Their values are not those that the optimizer consumed, and must not be logged. Writes of foreign kernels, and
        those of a fused optimizer (see ``stay``), are not noticed.
        """
        written = np.flatnonzero(write_counts(self.gradients) != self._versions).tolist()
        return *self._changed_before, *(self.units[at].name for at in written)

    def apart_from_training(self, *, dropped: bool) -> ConsumedGradients:
        """Returns the gradients in memory that training does not write to.

        Copies are made on the same device, and queued there before any later work.

        Args:
            dropped: True if parameters are about to lose their gradients (``set_to_none``). A gradient that shares its
                memory with nothing else is then not copied. Others may be parts of a buffer that is written to again,
                as those of DDP are.
        """
        if self.apart:
            return self
        gradients = [
            gradient if dropped and gradient.untyped_storage().nbytes() == gradient.nbytes else gradient.clone()
            for gradient in self.gradients
        ]
        return replace(self, gradients=gradients, apart=True, _changed_before=self.changed())


class GradientConsumer(Protocol):
    """Gets what optimizers consume. All methods are called on the training thread, and must not wait for a device."""

    def consume(self, gradients: ConsumedGradients) -> None:
        """Called when an optimizer is about to make an update.

        The tensors are no copies. A consumer that keeps them also keeps their memory: at most one set of gradients more
        than training has, if all are read before the next update.
        """

    def release(self, *, dropped: bool = False) -> None:
        """Called before consumed gradients are overwritten or freed: all reading must end, or be queued before that.

        Args:
            dropped: True if parameters only lose their gradients, and nothing is written to these.
        """


class _Preceded:
    """Stands for a method of one object, and calls something else before. A copy of the object has its own method."""

    def __init__(self, owner: Any, method: str, before: Callable[..., None]) -> None:
        self._owner, self._method, self._before = owner, method, before
        self._inner = getattr(owner, method)
        update_wrapper(self, self._inner)

    def preceded(self, *args: Any, **kwargs: Any) -> Any:
        self._before(*args, **kwargs)
        return self._inner(*args, **kwargs)

    __call__ = preceded

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return _method_of, (self._owner, self._method)


def _method_of(owner: Any, method: str) -> Any:
    return getattr(type(owner), method).__get__(owner)


class GradientCapture:
    """Hooks on optimizers, until ``close``.

    Args:
        optimizers: torch optimizers, without wrappers.
        describe: Describes each tensor that they update; called again only if param groups change.
        consumer: Gets the gradients of every update.
        rounded: Type to which wider gradients are rounded before each update; None: they are not rounded.
        stopwatch: Counts the time of hooks.

    Raises:
        UnsupportedError: An optimizer's steps cannot be repeated from gradients.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        describe: Describe,
        consumer: GradientConsumer,
        rounded: torch.dtype | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._stopwatch = stopwatch or Stopwatch()
        for optimizer in optimizers:
            coupling_of(optimizer)
        self._optimizers = tuple(optimizers)
        self._describe = describe
        self._consumer = consumer
        self._rounded = rounded
        self._parameters: dict[int, tuple[list[Unit], FixedStrings]] = {}
        """Per optimizer, the units that had gradients in its last update, and the names of their parameters."""
        self._undo: list[Callable[[], None]] = []
        self._listed: list[list[torch.Tensor]] = []
        """Tensors of each param group of all optimizers when ``_updated`` was made."""
        self._updated: list[list[tuple[Unit, torch.Tensor]]] = []
        """Per optimizer, what it updates."""
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        for number, optimizer in enumerate(self._optimizers):
            self._hook(number, optimizer)

    def _hook(self, number: int, optimizer: Optimizer) -> None:
        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any] | None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                self._consume(number, optimizer)
                return None

            @wraps(closure)
            def wrapped() -> Any:
                loss = closure()
                self._consume(number, optimizer)
                return loss

            if len(args) > 1:
                return (args[0], wrapped, *args[2:]), kwargs
            return args, {**kwargs, "closure": wrapped}

        handle: RemovableHandle = optimizer.register_step_pre_hook(before)
        self._undo.append(handle.remove)

    def _consume(self, number: int, optimizer: Optimizer) -> None:
        with self._stopwatch:
            self._consumer.consume(self._consumed(number, optimizer))

    def _consumed(self, number: int, optimizer: Optimizer) -> ConsumedGradients:
        units: list[Unit] = []
        gradients: list[torch.Tensor] = []
        self.tensors()
        for unit, parameter in self._updated[number]:
            raw = parameter.grad
            if raw is not None:
                gradient = block_in(raw)
                unit.require_alike(gradient, "the gradient")
                units.append(unit)
                gradients.append(gradient.detach() if gradient.requires_grad else gradient)
        if self._rounded is not None:
            _round(gradients, self._rounded)
        grad_scale, found_inf = (copied_value(getattr(optimizer, name, None)) for name in ("grad_scale", "found_inf"))
        groups = tuple(map(_hyperparameters, optimizer.param_groups))
        update = Update(number, groups, self._parameters_of(number, units), grad_scale, found_inf)
        return ConsumedGradients(update, units, gradients, stay=grad_scale is None)

    def _parameters_of(self, number: int, units: list[Unit]) -> FixedStrings:
        """Returns the names of parameters, made once for as long as the same units have gradients."""
        before = self._parameters.get(number)
        if before is None or len(before[0]) != len(units) or not all(map(is_, before[0], units)):
            names = dict.fromkeys(piece.parameter for unit in units for piece in unit.pieces)
            before = self._parameters[number] = units, FixedStrings(names)
        return before[1]

    def units(self) -> tuple[Unit, ...]:
        """Returns all that the optimizers update here, in their order."""
        self.tensors()
        return tuple(unit for updated in self._updated for unit, _ in updated)

    def tensors(self) -> dict[tuple[int, str], torch.Tensor]:
        """Returns (optimizer, name of unit) -> updated tensor. A new object if param groups have changed."""
        groups = [
            (number, at, g["params"])
            for number, o in enumerate(self._optimizers)
            for at, g in enumerate(o.param_groups)
        ]
        lists = [parameters for *_, parameters in groups]
        if not _are_same(lists, self._listed):
            self._listed = list(map(list, lists))
            self._updated = [[] for _ in self._optimizers]
            for number, at, parameters in groups:
                self._updated[number] += [(self._describe(number, at, p), p) for p in parameters]
            self._tensors = {(unit.optimizer, unit.name): p for updated in self._updated for unit, p in updated}
        return self._tensors

    def after_updates(self, call: Callable[[int], None]) -> None:
        """Calls ``call`` with the number of each optimizer that has made an update, before other hooks run."""
        for number, optimizer in enumerate(self._optimizers):

            def after(*_: Any, number: int = number) -> None:
                with self._stopwatch:
                    call(number)

            handle: RemovableHandle = optimizer.register_step_post_hook(after)
            hooks = optimizer._optimizer_step_post_hooks
            if isinstance(hooks, OrderedDict):  # writes of a user's hook are no part of the update
                hooks.move_to_end(handle.id, last=False)
            self._undo.append(handle.remove)

    def release_before(self, owners: Iterable[Any], method: str) -> None:
        """Makes the consumer release gradients before any of ``owners`` runs its method."""
        for owner in owners:
            self._release_before(owner, method)

    def _release_before(self, owner: Any, method: str) -> None:
        overridden = vars(owner).get(method)
        by_torch = overridden is None and getattr(type(owner), method) in (Optimizer.zero_grad, nn.Module.zero_grad)

        def release(*args: Any, **kwargs: Any) -> None:
            set_to_none = by_torch and (args[0] if args else kwargs.get("set_to_none", True))
            with self._stopwatch:
                self._consumer.release(dropped=bool(set_to_none))

        def undo() -> None:
            if overridden is None:
                delattr(owner, method)
            else:
                setattr(owner, method, overridden)

        setattr(owner, method, _Preceded(owner, method, release))
        self._undo.append(undo)

    def close(self) -> None:
        """Removes all hooks. Safe to call twice."""
        while self._undo:
            self._undo.pop()()


def module_units(module: Any) -> Describe:
    """Returns what describes the parameters of a torch module, by the names of ``modeling.names.parameters_of``.

    The unit of a DTensor is its local block. The result raises ``UnsupportedError`` for a tensor that is not the
    module's.
    """
    names: dict[int, tuple[torch.Tensor, str]] = {}  # it keeps tensors alive, so that their ids are unique

    def describe(number: int, group: int, parameter: torch.Tensor) -> Unit:
        if id(parameter) not in names:
            names.clear()
            names.update({id(tensor): (tensor, name) for name, tensor in parameters_of(module)})
        _, name = names.get(id(parameter), (parameter, None))
        if name is None:
            raise UnsupportedError(
                f"optimizer {number} updates a parameter of shape {tuple(parameter.shape)} that is not among the "
                "model's named_parameters(): make its owner an attribute of the module."
            )
        block = block_of(parameter, name)
        return whole_unit(name, number, group, block.local, Box(block.offsets, tuple(block.local.shape)))

    return describe


def _round(gradients: Iterable[torch.Tensor], to: torch.dtype) -> None:
    """Rounds gradients in place, so that the optimizer consumes what is logged."""
    with torch.no_grad():
        for gradient in gradients:
            if gradient.is_floating_point() and gradient.element_size() > to.itemsize:
                gradient.copy_(gradient.to(to))


def _are_same(now: Sequence[Sequence[torch.Tensor]], before: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Returns whether param groups have the same tensor objects in the same order."""
    return list(map(len, now)) == list(map(len, before)) and all(
        map(is_, chain.from_iterable(now), chain.from_iterable(before))
    )


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of a param group; copies of those that may change in place."""
    return {key: copied_value(value) for key, value in group.items() if key != "params"}
