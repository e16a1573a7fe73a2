"""Replays optimizer steps from anchors and consumed gradients (MoEtion, Algorithm 3).

The same code of the same optimizer class steps whole units, with the hyperparameters of that time. Rows that have no
gradient, since they are anchored later, are stepped with zeros; what that makes of them is overwritten by their anchor.
Bits come out as in training on the same kind of device, with as many threads where that is a CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.operators import Span
from moe_ckpt.errors import ConfigError, ReplayDivergedError, UnsupportedError
from moe_ckpt.gradients.coupling import Coupling, coupling_of
from moe_ckpt.gradients.units import Pieces, Tensors, Unit, UnitBlock
from moe_ckpt.gradients.updates import GRADIENT, WEIGHT, TensorBlock, Update
from moe_ckpt.modeling.blocks import block_in
from moe_ckpt.modeling.param_groups import IMPLEMENTATION_FLAGS, fitted


class OptimizerReplay:
    """Optimizers whose units are filled from anchors and stepped with recorded gradients.

    Args:
        optimizers: Live ones of a run, or those of ``detached.detached``.
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

    def forget(self) -> None:
        """Drops all optimizer state, before anchors are loaded into optimizers that were used."""
        for key, tensor in self.tensors.items():
            self.optimizers[key[0]].state.pop(tensor, None)

    def load(self, step: int, blocks: Iterable[TensorBlock]) -> int:
        """Writes an anchor of ``step`` into weights and optimizer state.

        Returns:
            How many elements of weights were written.

        Raises:
            ReplayDivergedError: Rows of a parameter that are anchored already came to another step count.
        """
        written = 0
        with torch.no_grad():
            for block in blocks:
                for unit, piece in self.pieces.of(block.optimizer, block.parameter):
                    if block.box is None:
                        self._load_whole(step, unit, block)
                    elif (part := piece.part(block.box)) is not None:
                        self._write(unit, part, block)
                        written += part.box.volume if block.kind == WEIGHT else 0
        return written

    def _write(self, unit: Unit, part: UnitBlock, block: TensorBlock) -> None:
        tensor = self.tensors[unit.optimizer, unit.name]
        if block.kind != WEIGHT:
            state = self.optimizers[unit.optimizer].state[tensor]
            if block.kind not in state:
                state[block.kind] = torch.zeros_like(tensor.detach(), dtype=block.values.dtype)
            tensor = state[block.kind]
        part.view(block_in(tensor.detach())).copy_(_within(block, part.box))

    def _load_whole(self, step: int, unit: Unit, block: TensorBlock) -> None:
        """State without rows. Of another anchor in the same unit it must have become the very same by now."""
        tensor = self.tensors[unit.optimizer, unit.name]
        state = self.optimizers[unit.optimizer].state[tensor]
        device = block_in(tensor).device if block.on_device else torch.device("cpu")
        values = block.values.to(device, copy=True)
        stepped = state.get(block.kind)
        if stepped is not None and not self.coupled(unit.optimizer) and not torch.equal(stepped, values):
            raise ReplayDivergedError(
                step,
                f"{block.kind} of {unit.name} is {stepped.tolist()} by its gradients and {values.tolist()} there",
                logged=True,
            )
        state[block.kind] = values

    def step(self, update: Update, gradients: Iterable[TensorBlock]) -> int:
        """Replays one update.

        Args:
            update: What was recorded of it.
            gradients: Blocks of the operators that are anchored already. Units of which there is none stay as they are.

        Returns:
            How many elements of gradients there were.

        Raises:
            ConfigError: The optimizer has other param groups.
        """
        optimizer = self.optimizers[update.optimizer]
        written = 0
        try:
            for block in gradients:
                for unit, piece in self.pieces.of(update.optimizer, block.parameter):
                    part = None if block.box is None else piece.part(block.box)
                    if block.kind == GRADIENT and part is not None:
                        gradient = self._gradient(unit)
                        part.view(gradient).copy_(_within(block, part.box))
                        written += part.box.volume
            if written:
                _set(optimizer, update)
                _step_alone(optimizer)
        finally:
            optimizer.zero_grad(set_to_none=True)
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)
        return written

    def _gradient(self, unit: Unit) -> torch.Tensor:
        """Returns the memory of the unit's gradient, which is zero at first; as wide as the unit, as torch demands."""
        tensor = self.tensors[unit.optimizer, unit.name]
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor.detach())
        return block_in(tensor.grad)

    def read(self, spans: Iterable[Span]) -> list[TensorBlock]:
        """Returns weights and state of the operator with ``spans``, as views of live memory."""
        return state_blocks(self.optimizers, self.tensors, self.pieces, spans)


def state_blocks(
    optimizers: Sequence[Optimizer], tensors: Tensors, pieces: Pieces, spans: Iterable[Span]
) -> list[TensorBlock]:
    """Returns an operator's anchor: its weights and optimizer state, as views of live memory.

    State that is not of the parameter's shape goes with every operator that has rows of it.
    """
    blocks: list[TensorBlock] = []
    seen: set[tuple[int, str, str]] = set()
    for unit, piece in pieces.of_operator(spans):
        tensor = tensors[unit.optimizer, unit.name].detach()
        blocks.append(TensorBlock(unit.optimizer, piece.parameter, WEIGHT, piece.box, piece.view(block_in(tensor))))
        state: Mapping[str, Any] = optimizers[unit.optimizer].state.get(tensors[unit.optimizer, unit.name], {})
        for name, value in state.items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(
                    f"state {name!r} of {unit.name} in {type(optimizers[unit.optimizer]).__name__} is a "
                    f"{type(value).__name__}; only tensors are anchored. Keep it in a tensor, as torch's optimizers do."
                )
            local, box = block_in(value.detach()), None
            if value.shape == tensor.shape and value.ndim:
                unit.require_alike(local, f"state {name!r}")
                local, box = piece.view(local), piece.box
            elif (unit.optimizer, piece.parameter, name) in seen:
                continue
            seen.add((unit.optimizer, piece.parameter, name))
            on_device = local.device == block_in(tensor).device
            blocks.append(TensorBlock(unit.optimizer, piece.parameter, name, box, local, on_device))
    return blocks


def gradient_blocks(
    units: Sequence[Unit], gradients: Sequence[torch.Tensor], spans: Iterable[Span] | None = None
) -> list[TensorBlock]:
    """Returns the blocks of consumed gradients that belong to the operator with ``spans``, as views of them.

    Args:
        units: Of one update.
        gradients: Of each unit, or copies of the same layout.
        spans: Of the operator; None for all gradients.
    """
    of = {id(unit): gradient for unit, gradient in zip(units, gradients, strict=True)}
    if spans is None:
        pieces = [(unit, piece) for unit in units for piece in unit.pieces]
    else:
        pieces = list(Pieces(units).of_operator(spans))
    return [
        TensorBlock(unit.optimizer, piece.parameter, GRADIENT, piece.box, piece.view(of[id(unit)]))
        for unit, piece in pieces
    ]


def _within(block: TensorBlock, box: Box) -> torch.Tensor:
    """Returns the values of a part of a block."""
    values = block.values
    if block.box is not None:
        for axis, (low, first, length) in enumerate(zip(box.offsets, block.box.offsets, box.shape, strict=True)):
            values = values.narrow(axis, low - first, length)
    return values


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
    if len(update.groups) != len(optimizer.param_groups):
        raise ConfigError(
            f"an update of optimizer {update.optimizer} was recorded with {len(update.groups)} param groups, but this "
            f"optimizer has {len(optimizer.param_groups)}; build it with the same groups"
        )
    for group, recorded in zip(optimizer.param_groups, update.groups, strict=True):
        for key, value in recorded.items():
            if key not in IMPLEMENTATION_FLAGS:
                group[key] = fitted(group.get(key), value)
    if update.grad_scale is not None or update.found_inf is not None:
        # As torch.amp.GradScaler.step does for optimizers that unscale by themselves.
        vars(optimizer).update(grad_scale=update.grad_scale, found_inf=update.found_inf)
