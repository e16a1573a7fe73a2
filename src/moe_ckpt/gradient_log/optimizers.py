"""Repeats updates of optimizers from anchors and consumed gradients (MoEtion, Algorithm 3).

The same code of the same optimizer class steps whole units, with the hyperparameters of that time. Rows without a
gradient, which are anchored later, are stepped with zeros; their anchors overwrite the result. Results are equal in
every bit to those of training on the same kind of device, on a CPU with the same number of threads.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.optim import Optimizer

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.gradient_log.units import Pieces, Tensors, Unit
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.modeling.blocks import block_in
from moe_ckpt.modeling.optimizer_state import ELEMENTWISE, IMPLEMENTATION_FLAGS, class_name, fit_stored_value
from moe_ckpt.reading.slices import block

OptimizerKind = tuple[str, Sequence[Mapping[str, Any]]]
"""(``modeling.optimizer_state.class_name`` of an optimizer, its param groups without parameters)."""


class Coupling(enum.Enum):
    """The values that an update of one element depends on, apart from hyperparameters."""

    ELEMENTS = "elements"
    """The element's own gradient and state: rows of a parameter may be anchored at different steps."""
    PARAMETERS = "parameters"
    """Gradient and state of the whole parameter: a parameter is anchored as a whole."""


_COUPLINGS: dict[type[Optimizer], Coupling] = {
    **dict.fromkeys(ELEMENTWISE, Coupling.ELEMENTS),
    optim.Adafactor: Coupling.PARAMETERS,
}
if hasattr(optim, "Muon"):  # since torch 2.9
    _COUPLINGS[optim.Muon] = Coupling.PARAMETERS
_REFUSED = {
    "LBFGS": "it keeps one history for all parameters together, and evaluates the model several times per step",
    "SparseAdam": "its gradients are sparse",
    "Shampoo": "blocks of several parameters share preconditioners",
    "DistributedShampoo": "blocks of several parameters share preconditioners",
    "SOAP": "its preconditioners are made by iterations that are not part of the gradients",
}


def coupling_of(optimizer: Optimizer) -> Coupling:
    """Returns what the updates of ``optimizer`` couple.

    Raises:
        UnsupportedError: Its steps cannot be repeated, or nothing is known of its class.
    """
    coupling = _COUPLINGS.get(type(optimizer))
    if coupling is not None:
        return coupling
    name = type(optimizer).__name__
    if name in _REFUSED:
        raise UnsupportedError(
            f"{class_name(optimizer)} cannot be stepped again from gradients, as MoEtion(recompute=True) and "
            f"GradientLog() need it: {_REFUSED[name]}. Use AdamW, SGD or Adafactor, or a policy that saves full state, "
            "such as MoEtion(recompute=False)."
        )
    raise UnsupportedError(
        f"{class_name(optimizer)} may couple parameters, which would make a replay from gradients wrong, as "
        "MoEtion(recompute=True) and GradientLog() need it. If each parameter's update depends on its own gradient and "
        "state alone, say so with moe_ckpt.gradient_log.optimizers.register(); otherwise use a policy that saves full "
        "state, such as MoEtion(recompute=False)."
    )


def register(kind: type[Optimizer], coupling: Coupling) -> None:
    """Declares what an update of an optimizer class depends on. Subclasses do not inherit it.

    Updates of the class must be deterministic: without random numbers and without state outside of ``optimizer.state``
    and ``param_groups``. It must call a closure once, before it reads gradients.

    Args:
        kind: The class.
        coupling: What an update depends on.
    """
    _COUPLINGS[kind] = coupling


def class_named(name: str) -> type[Optimizer]:
    """Returns the registered class of this ``class_name``. Nothing is imported by a name that was stored.

    A class of a script that ran as ``__main__`` is found in the script that was imported by its name. Modules of
    packages, such as ``torch.optim``, are no such scripts, though they may have a class of the same name.

    Raises:
        UnsupportedError: No such class is registered.
    """
    module, _, qualified_name = name.partition(".")
    for kind in _COUPLINGS:
        if class_name(kind) == name or (module == "__main__" and class_name(kind).partition(".")[2] == qualified_name):
            return kind
    raise UnsupportedError(
        f"optimizer class {name} is not registered: call moe_ckpt.gradient_log.optimizers.register() first (moe-ckpt "
        "densify --import MODULE imports a module that does)"
    )


@dataclass(frozen=True)
class Update:
    """One update by one optimizer: everything that it depended on, except state and gradients. Plain data.

    Attributes:
        optimizer: Number of the optimizer.
        groups: Hyperparameters of each param group before the update.
        parameters: Names of the model's tensors that had a gradient; no others were updated.
        grad_scale: Scale by which the optimizer divides the gradients; None if they are not scaled.
        found_inf: Nonzero if the optimizer must skip the update; None if it does not check.
    """

    optimizer: int
    groups: tuple[Mapping[str, Any], ...]
    parameters: Sequence[str]
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


class GradientBlock(NamedTuple):
    """The consumed gradient of a block of one of the model's tensors.

    Attributes:
        optimizer: Number of the optimizer that consumed it.
        parameter: Name of the tensor.
        box: Where the block lies in the whole tensor.
        values: Of the block.
    """

    optimizer: int
    parameter: str
    box: Box
    values: torch.Tensor


class OptimizerReplay:
    """Optimizers that are stepped with recorded gradients.

    Args:
        optimizers: The optimizers of a run, or those of ``detached_optimizers``.
        units: All units that they update.
        tensors: The tensor that is updated, of each unit.

    Attributes:
        optimizers: The optimizers.
        tensors: The tensor that is updated, of each unit.
        pieces: The blocks in the units.

    Raises:
        UnsupportedError: An optimizer's steps cannot be repeated from gradients.
    """

    def __init__(self, optimizers: Sequence[Optimizer], units: Iterable[Unit], tensors: Tensors) -> None:
        self.optimizers = tuple(optimizers)
        self._couplings = tuple(map(coupling_of, optimizers))
        self._units = {(unit.optimizer, unit.name): unit for unit in units}
        self.tensors = tensors
        self.pieces = Pieces(self._units.values())
        for key, unit in self._units.items():
            unit.require_alike(block_in(tensors[key]), "the replayed tensor")

    @property
    def units(self) -> Collection[Unit]:
        """The units that the optimizers update."""
        return self._units.values()

    def coupled(self, optimizer: int) -> bool:
        """Returns whether parameters of an optimizer must be anchored as a whole."""
        return self._couplings[optimizer] is Coupling.PARAMETERS

    def state_of(self, optimizer: int, unit: str) -> dict[str, Any]:
        """Returns the live state of a unit."""
        state: dict[str, Any] = self.optimizers[optimizer].state[self.tensors[optimizer, unit]]
        return state

    def step(self, update: Update, gradients: Iterable[GradientBlock]) -> set[tuple[int, str]]:
        """Repeats one update. Returns (optimizer, name) of the units that it changed.

        Args:
            update: The recorded update.
            gradients: Gradients of the operators that are anchored already. Units without any are not changed.
        """
        optimizer = self.optimizers[update.optimizer]
        stepped: set[tuple[int, str]] = set()
        try:
            for gradient in gradients:
                for unit, part in self.pieces.within(update.optimizer, gradient.parameter, gradient.box):
                    part.view(self._gradient(unit)).copy_(block(gradient.values, gradient.box.offsets, part.box))
                    stepped.add((unit.optimizer, unit.name))
            if stepped:
                _set(optimizer, update)
                _step_alone(optimizer)
        finally:
            optimizer.zero_grad(set_to_none=True)
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)
        return stepped

    def _gradient(self, unit: Unit) -> torch.Tensor:
        """Returns the unit's gradient, at first zeros. It has the unit's type, as torch demands."""
        tensor = self.tensors[unit.optimizer, unit.name]
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor.detach())
        return block_in(tensor.grad)


def detached_optimizers(
    kinds: Sequence[OptimizerKind], units: Sequence[Unit], device: torch.device | str = "cpu"
) -> OptimizerReplay:
    """Returns optimizers without a model, whose units hold NaN until anchors are loaded.

    Args:
        kinds: Class and param groups of all optimizers, by number.
        units: The units to step; all of a rank, or some.
        device: Device to step on. If it is of another kind than the one that trained, the last bits may differ.

    Raises:
        UnsupportedError: A class is not known here.
    """
    tensors: dict[tuple[int, str], nn.Parameter] = {}
    for unit in units:
        empty = torch.empty_strided(unit.shape, unit.stride, dtype=getattr(torch, unit.dtype), device=device)
        tensors[unit.optimizer, unit.name] = nn.Parameter(empty.fill_(torch.nan))
    optimizers = []
    for number, (name, settings) in enumerate(kinds):
        groups = []
        for at, group in enumerate(settings):
            members = [tensors[number, unit.name] for unit in units if (unit.optimizer, unit.group) == (number, at)]
            # Copies: updates write into hyperparameters that are tensors, and the recorded ones must stay.
            groups.append({**{key: copied_value(value) for key, value in group.items()}, "params": members})
        make: Any = class_named(name)
        optimizers.append(make(groups))
    return OptimizerReplay(optimizers, units, tensors)


def _step_alone(optimizer: Optimizer) -> None:
    """Makes an update without the run's hooks and wrappers, which logged gradients have passed through already.

    They would change gradients a second time, and count updates that training does not make. torch wraps ``step`` of
    each class in a function that calls hooks of the optimizer and of the process.
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    step(optimizer)


def _set(optimizer: Optimizer, update: Update) -> None:
    """Gives the optimizer the hyperparameters and the loss scale of an update."""
    for group, recorded in zip(optimizer.param_groups, update.groups, strict=True):
        for key, value in recorded.items():
            if key not in IMPLEMENTATION_FLAGS:
                group[key] = fit_stored_value(group.get(key), value)
    if update.grad_scale is not None or update.found_inf is not None:
        # As torch.amp.GradScaler.step does for optimizers that unscale by themselves.
        vars(optimizer).update(grad_scale=update.grad_scale, found_inf=update.found_inf)


def copied_value(value: Any) -> Any:
    """Returns a hyperparameter; a copy if it may change in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
