"""Units: the tensors that a rank's optimizers update, and the blocks of the model's tensors in them.

The plain state of each logged step describes them, so that a log can be replayed from its slots alone, without a model
or a rank of the run.

A replay steps whole units, in the shape that training stepped: vectorized kernels round the elements of a vector and
those of the remainder differently, so that the rows of one expert, stepped alone, may get other bits.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from moe_ckpt.errors import DamagedError, UnsupportedError
from moe_ckpt.format.sealed import FixedStrings
from moe_ckpt.ledger.coverage import Box


@dataclass(frozen=True)
class UnitBlock:
    """A block of one of the model's tensors, in the memory of a unit.

    Attributes:
        parameter: Name of the tensor.
        box: The block in the whole tensor.
        stride: Strides of the block's view, in elements.
        start: First element of the block, counted from the unit's first.
    """

    parameter: str
    box: Box
    stride: tuple[int, ...]
    start: int

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the block as a view of ``tensor``, which is the unit, or has the unit's shape and strides."""
        return tensor.as_strided(self.box.shape, self.stride, tensor.storage_offset() + self.start)

    def part(self, box: Box) -> UnitBlock | None:
        """Returns the part of the block in ``box`` of the whole tensor; None if there is none."""
        common = self.box.overlap(box)
        if common is None or not common.volume:
            return None
        steps = zip(common.offsets, self.box.offsets, self.stride, strict=True)
        return replace(self, box=common, start=self.start + sum((low - first) * step for low, first, step in steps))


@dataclass(frozen=True)
class Unit:
    """One tensor that an optimizer updates on this rank: a parameter, its master weights, or a flat range of either.

    Attributes:
        name: Unique name among the units of the optimizer.
        optimizer: Number of the optimizer.
        group: Number of its param group.
        dtype: Type of the tensor, as torch names it without ``torch.``.
        shape: Shape of the tensor.
        stride: Strides of the tensor, in elements.
        pieces: The blocks in the tensor.
        stored: Name of the optimizer state that the tensor is in checkpoints (master weights); empty for weights.
    """

    name: str
    optimizer: int
    group: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: tuple[UnitBlock, ...]
    stored: str = ""

    def require_alike(self, tensor: torch.Tensor, what: str) -> None:
        """Raises ``UnsupportedError`` unless ``tensor``, called ``what``, has the unit's shape and strides."""
        strided = tensor.layout is torch.strided
        if strided and tensor.stride() == self.stride and tensor.shape == self.shape:
            return  # fast, since it is checked for every gradient at every update
        if not strided:
            raise UnsupportedError(
                f"{what} of {self.name} is {tensor.layout}: updates with it cannot be repeated from a log. "
                "Use dense gradients (Embedding(sparse=False))."
            )
        axes = zip(self.shape, tensor.stride(), self.stride, strict=False)
        if tuple(tensor.shape) != self.shape or any(size > 1 and one != other for size, one, other in axes):
            raise UnsupportedError(
                f"{what} of {self.name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, but the "
                f"parameter {self.shape} and {self.stride}: kernels may round it differently. Give them the same shape "
                "and strides."
            )


def whole_unit(name: str, optimizer: int, group: int, tensor: torch.Tensor, box: Box | None = None) -> Unit:
    """Returns the unit of a tensor that holds one block of ``name``.

    Args:
        name: Name of the model's tensor, and of the unit.
        optimizer: Number of the optimizer.
        group: Number of its param group.
        tensor: The tensor that is updated on this rank.
        box: The block that it is; None for the whole tensor.

    Raises:
        UnsupportedError: Elements of the tensor overlap in memory, or have gaps between them.
    """
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not _is_dense(shape, stride):
        raise UnsupportedError(
            f"parameter {name} of shape {shape} with strides {stride} does not fill its memory densely, so its updates "
            "cannot be repeated from a log. Make it contiguous."
        )
    piece = UnitBlock(name, box or Box((0,) * len(shape), shape), stride, 0)
    return Unit(name, optimizer, group, str(tensor.dtype).removeprefix("torch."), shape, stride, pieces=(piece,))


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Returns whether elements follow one another in memory without gaps, in any order of axes."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected and 0 not in shape:
            return False
        expected *= size
    return True


class Pieces:
    """The pieces of many units, by optimizer and parameter."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._pieces: dict[tuple[int, str], list[tuple[Unit, UnitBlock]]] = {}
        for unit in units:
            for piece in unit.pieces:
                self._pieces.setdefault((unit.optimizer, piece.parameter), []).append((unit, piece))

    def of(self, optimizer: int, parameter: str) -> Sequence[tuple[Unit, UnitBlock]]:
        """Returns the pieces of a parameter in the units of an optimizer."""
        return self._pieces.get((optimizer, parameter), ())

    def within(self, optimizer: int, parameter: str, box: Box) -> Iterator[tuple[Unit, UnitBlock]]:
        """Yields the parts of these pieces in ``box`` of the parameter."""
        for unit, piece in self.of(optimizer, parameter):
            part = piece.part(box)
            if part is not None:
                yield unit, part


Tensors = Mapping[tuple[int, str], torch.Tensor]
"""(optimizer, name of a unit) -> the tensor that is updated."""


@dataclass(frozen=True)
class Device:
    """The device that a rank computes its updates on.

    Attributes:
        type: Type as torch names it: "cpu", "cuda".
        name: Name of the GPU model; of a CPU the architecture, and the vector instructions that torch uses.
        threads: Number of torch's threads, which divide an update on a CPU.
    """

    type: str
    name: str
    threads: int

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Returns the description of a device."""
        if device.type == "cuda":
            return cls("cuda", torch.cuda.get_device_name(device), torch.get_num_threads())
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else ""
        return cls(device.type, name, torch.get_num_threads())

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.type == "cpu" else ""
        return f"{self.type} ({self.name}{threads})"


@dataclass(frozen=True)
class UpdateLayout:
    """A rank's optimizers and what they update.

    Attributes:
        classes: Name of the class of each optimizer (``modeling.optimizer_state.class_name``).
        keys: Per optimizer, the number in the keys of its state (``optim/<number>/...``).
        units: All units that they update.
        device: Device on which they step.
    """

    classes: tuple[str, ...]
    keys: tuple[int, ...]
    units: tuple[Unit, ...]
    device: Device

    def encoded(self) -> dict[str, Any]:
        """Returns the layout as plain data. Its units, of which there may be thousands, are encoded once."""
        return {
            "classes": list(self.classes),
            "keys": list(self.keys),
            "units": FixedStrings(json.dumps(row, separators=(",", ":")) for row in map(astuple, self.units)),
            "device": vars(self.device),
        }

    @classmethod
    def decoded(cls, body: Mapping[str, Any], path: str) -> UpdateLayout:
        """Inverse of ``encoded``.

        Args:
            body: Plain data.
            path: Of the file, for messages.

        Raises:
            DamagedError: ``body`` is no layout.
        """
        try:
            device = Device(str(body["device"]["type"]), str(body["device"]["name"]), int(body["device"]["threads"]))
            units = tuple(_unit(json.loads(row)) for row in body["units"])
            return cls(tuple(map(str, body["classes"])), tuple(map(int, body["keys"])), units, device)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(path, f"its layout of updates is none of this format ({error!r})") from error


def _unit(row: Sequence[Any]) -> Unit:
    name, optimizer, group, dtype, shape, stride, pieces, stored = row
    # A name that was read may only stand for a tensor type.
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"{dtype} is not a tensor type")
    blocks = tuple(map(_piece, pieces))
    return Unit(
        str(name), int(optimizer), int(group), dtype, _dims(shape), _dims(stride), pieces=blocks, stored=str(stored)
    )


def _piece(row: Sequence[Any]) -> UnitBlock:
    parameter, (offsets, shape), stride, start = row
    return UnitBlock(str(parameter), Box(_dims(offsets), _dims(shape)), _dims(stride), int(start))


def _dims(numbers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, numbers))
