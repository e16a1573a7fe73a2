"""Units: the tensors that a rank's optimizers update, and where the blocks of the model's tensors lie in them.

A replay steps whole units, in the shape that training stepped: vectorized kernels round the elements of a vector and
those of the remainder differently, so that the rows of one expert, taken alone, may come out with other bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from moe_ckpt.core.operators import Span
from moe_ckpt.errors import UnsupportedError
from moe_ckpt.ledger.coverage import Box


@dataclass(frozen=True)
class UnitBlock:
    """A block of one of the model's tensors, in the memory of a unit.

    Attributes:
        parameter: Name of the tensor.
        box: The block in the whole tensor.
        stride: Of the block's view, in elements.
        start: First element, counted from the unit's first.
    """

    parameter: str
    box: Box
    stride: tuple[int, ...]
    start: int

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the block as a view of ``tensor``, which is the unit or is laid out like it."""
        return tensor.as_strided(self.box.shape, self.stride, tensor.storage_offset() + self.start)

    def part(self, box: Box) -> UnitBlock | None:
        """Returns what of the piece lies in ``box`` of the whole tensor; None if nothing does."""
        common = self.box.overlap(box)
        if common is None or not common.volume:
            return None
        steps = zip(common.offsets, self.box.offsets, self.stride, strict=True)
        return replace(self, box=common, start=self.start + sum((low - first) * step for low, first, step in steps))

    def rows(self, span: Span) -> UnitBlock | None:
        """Returns what of the piece lies in the rows of ``span``."""
        if span.start is None or span.stop is None:
            return self
        offsets, shape = self.box.offsets, self.box.shape
        return self.part(Box((span.start, *offsets[1:]), (span.stop - span.start, *shape[1:])))


@dataclass(frozen=True)
class Unit:
    """One tensor that an optimizer updates on this rank: a parameter, its master weights, or a flat range of either.

    Attributes:
        name: Unlike that of any other unit of the optimizer.
        optimizer: Number of the optimizer.
        group: Number of its param group.
        dtype: Of the tensor, as torch names it without ``torch.``.
        shape: Of the tensor.
        stride: Of the tensor, in elements.
        pieces: The blocks in it.
        stored: Name of the optimizer state that checkpoints have it as (master weights); empty for the weights.
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
        """Raises ``UnsupportedError`` unless ``tensor``, which is called ``what``, is laid out like the unit."""
        strided = tensor.layout is torch.strided
        if strided and tensor.stride() == self.stride and tensor.shape == self.shape:
            return  # asked of every gradient at every update
        if not strided:
            raise UnsupportedError(
                f"{what} of {self.name} is {tensor.layout}: updates with it cannot be repeated from a log. "
                "Use dense gradients (Embedding(sparse=False))."
            )
        if tuple(tensor.shape) != self.shape or not same_strides(self.shape, tensor.stride(), self.stride):
            raise UnsupportedError(
                f"{what} of {self.name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, but the "
                f"parameter {self.shape} and {self.stride}: kernels may round it differently. Give them the same shape "
                "and strides."
            )


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Returns whether two strides mean the same for ``shape``; those of axes with one element do not count."""
    return all(size <= 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


def whole_unit(name: str, optimizer: int, group: int, tensor: torch.Tensor, box: Box | None = None) -> Unit:
    """Returns the unit of a tensor that holds one block of ``name``.

    Args:
        name: Of the model's tensor, and of the unit.
        optimizer: Number of the optimizer.
        group: Number of its param group.
        tensor: What is updated here.
        box: Which block that is; None for the whole.

    Raises:
        UnsupportedError: Elements of the tensor overlap, or leave gaps, in memory.
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
    """Returns whether elements lie one after the other, whatever the order of axes."""
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
        self._optimizers: set[int] = set()
        for unit in units:
            self._optimizers.add(unit.optimizer)
            for piece in unit.pieces:
                self._pieces.setdefault((unit.optimizer, piece.parameter), []).append((unit, piece))

    def of(self, optimizer: int, parameter: str) -> Sequence[tuple[Unit, UnitBlock]]:
        """Returns the pieces of a parameter in the units of an optimizer."""
        return self._pieces.get((optimizer, parameter), ())

    def of_operator(self, spans: Iterable[Span], optimizer: int | None = None) -> Iterator[tuple[Unit, UnitBlock]]:
        """Yields what of each piece belongs to the operator with ``spans``.

        Args:
            optimizer: None for all.
        """
        optimizers = sorted(self._optimizers) if optimizer is None else (optimizer,)
        for span in spans:
            for number in optimizers:
                for unit, piece in self.of(number, span.parameter):
                    part = piece.rows(span)
                    if part is not None:
                        yield unit, part


Tensors = Mapping[tuple[int, str], torch.Tensor]
"""(optimizer, name of a unit) -> the tensor that is updated."""
