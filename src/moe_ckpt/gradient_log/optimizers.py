"""Optimizers that can be stepped again: which classes, and how, from anchors and consumed gradients (MoEtion,
Algorithm 3).

The same code of the same optimizer class steps whole units, with the hyperparameters of that time. Rows that have no
gradient, since they are anchored later, are stepped with zeros; what that makes of them is overwritten by their anchor.
Bits come out as in training on the same kind of device, with as many threads where that is a CPU.
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
from moe_ckpt.modeling.optimizer_state import ELEMENTWISE, IMPLEMENTATION_FLAGS, class_name, fitted
from moe_ckpt.reading.slices import block

OptimizerKind = tuple[str, Sequence[Mapping[str, Any]]]
"""(``modeling.optimizer_state.class_name`` of an optimizer, its param groups without parameters)."""


class Coupling(enum.Enum):
    """The state that an update of one element depends on, beside hyperparameters."""

    ELEMENTS = "elements"
    """Its own gradient and state: rows of a parameter may be anchored at different steps."""
    PARAMETERS = "parameters"
    """Those of its whole parameter: a parameter is anchored as a whole."""


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
    """Declares what the updates of a class couple. Subclasses do not inherit it.

    The class must also do the same whenever it is given the same: no random numbers, no state outside of
    ``optimizer.state`` and ``param_groups``, and it must call a closure once, before it reads gradients.

    Args:
        kind: The class.
        coupling: What an update depends on.
    """
    _COUPLINGS[kind] = coupling


def class_named(name: str) -> type[Optimizer]:
    """Returns the class that ``class_name`` gave ``name``, if it is one of those known here.

    Nothing is imported by a name that was stored.

    Raises:
        UnsupportedError: It is not known.
    """
    for kind in _COUPLINGS:
        if class_name(kind) == name:
            return kind
    raise UnsupportedError(
        f"optimizer class {name} is not registered: call moe_ckpt.gradient_log.optimizers.register() first (moe-ckpt "
        "densify --import MODULE imports a module that does)"
    )


@dataclass(frozen=True)
class Update:
    """One update by one optimizer: all that it depended on, beside state and gradients. Plain data.

    Attributes:
        optimizer: Number of the optimizer.
        groups: Hyperparameters of each param group, as they were before the update.
        parameters: Names of the model's tensors that had a gradient; others stayed as they were.
        grad_scale: By which the optimizer divides the gradients; None if they are not scaled.
        found_inf: Nonzero if the optimizer is to leave the update out; None if it need not look.
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
    """Optimizers whose units are filled from anchors and stepped with recorded gradients.

    Args:
        optimizers: Live ones of a run, or those of ``detached``.
        units: All that they update.
        tensors: What is updated, of each unit.

    Attributes:
        optimizers: As given.
        tensors: What is updated, of each unit.
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
        """Replays one update. Returns (optimizer, name) of the units that it changed.

        Args:
            update: What was recorded of it.
            gradients: Blocks of the operators that are anchored already. Units of which there is none stay as they are.
        """
        optimizer = self.optimizers[update.optimizer]
        stepped: set[tuple[int, str]] = set()
        try:
            for gradient in gradients:
                for unit, piece in self.pieces.of(update.optimizer, gradient.parameter):
                    part = piece.part(gradient.box)
                    if part is not None:
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
        """Returns the memory of the unit's gradient, which is zero at first; as wide as the unit, as torch demands."""
        tensor = self.tensors[unit.optimizer, unit.name]
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor.detach())
        return block_in(tensor.grad)


def detached(
    kinds: Sequence[OptimizerKind], units: Sequence[Unit], device: torch.device | str = "cpu"
) -> OptimizerReplay:
    """Returns optimizers without a model, whose units hold NaN until anchors are loaded.

    Args:
        kinds: Of all optimizers, by number.
        units: Those to replay; all of a rank, or some.
        device: Should be of the kind that trained: on another one the last bits may differ.

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
            # Each update writes its hyperparameters into what is a tensor, and what was recorded must stay.
            groups.append({**{key: copied_value(value) for key, value in group.items()}, "params": members})
        make: Any = class_named(name)
        optimizers.append(make(groups))
    return OptimizerReplay(optimizers, units, tensors)


def _step_alone(optimizer: Optimizer) -> None:
    """Makes an update, without hooks and wrappers of the run's: what was logged has passed through them already.

    They would change gradients a second time, and count updates that no training makes. torch wraps ``step`` of each
    class in what calls hooks, of the optimizer and of the process.
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    step(optimizer)


def _set(optimizer: Optimizer, update: Update) -> None:
    """Gives the optimizer the hyperparameters of that time, and the loss scale if it was given one."""
    for group, recorded in zip(optimizer.param_groups, update.groups, strict=True):
        for key, value in recorded.items():
            if key not in IMPLEMENTATION_FLAGS:
                group[key] = fitted(group.get(key), value)
    if update.grad_scale is not None or update.found_inf is not None:
        # As torch.amp.GradScaler.step does for optimizers that unscale by themselves.
        vars(optimizer).update(grad_scale=update.grad_scale, found_inf=update.found_inf)


def copied_value(value: Any) -> Any:
    """Returns a copy of a hyperparameter that may change in place; any other as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
