"""Computes the place of a Megatron parameter's memory in the model's tensors, under any parallel layout.

A checkpoint has *whole* tensors under names that do not depend on the layout: one per expert and matrix, in the
orientation of ``SequentialMLP`` and Transformer Engine. A rank may hold a block of rows or columns (tensor
parallelism), two side by side (the halves of a gated unit), several experts one after the other and transposed
(``GroupedMLP``), and of each of these a flat range (the distributed optimizer). In every case a piece of memory is an
array whose axes run along axes of a whole tensor, in segments. Pure arithmetic, without torch and Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AxisSegment:
    """Indices ``[start, stop)`` of an axis in memory; in the whole tensor the segment begins at index ``at``."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Axis:
    """One axis in memory, along axis ``target`` of the whole tensor; ``segments`` tile it."""

    target: int
    segments: tuple[AxisSegment, ...]

    @property
    def size(self) -> int:
        return self.segments[-1].stop


@dataclass(frozen=True)
class BlockPart:
    """A contiguous piece of a live parameter that holds elements of one whole tensor.

    Attributes:
        name: Of the whole tensor.
        global_shape: Of the whole tensor.
        start: First element of the piece in the parameter's flat memory.
        axes: Of the piece in memory, row-major; each axis of the whole tensor is the target of exactly one.
    """

    name: str
    global_shape: Shape
    start: int
    axes: tuple[Axis, ...]

    @property
    def memory_shape(self) -> Shape:
        return tuple(axis.size for axis in self.axes)

    @property
    def stop(self) -> int:
        return self.start + prod(self.memory_shape)


@dataclass(frozen=True)
class Placed:
    """A block of a whole tensor and its place in a flat range of memory.

    Attributes:
        offsets: Of the block in the whole tensor.
        shape: Of the block.
        first: First element of the block in the range.
        stride: Strides of the block, in elements.
    """

    offsets: Shape
    shape: Shape
    first: int
    stride: Shape

    def view(self, flat: Any) -> Any:
        """Returns the view of the block, in the orientation of the whole tensor.

        Args:
            flat: The range of memory, a tensor.
        """
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.first)


def untransposed_axes(shape: Shape) -> tuple[Axis, ...]:
    """Returns the axes of an untransposed block of ``shape`` at the beginning of the whole tensor."""
    return tuple(Axis(dim, (AxisSegment(0, size, 0),)) for dim, size in enumerate(shape))


def placed_blocks(part: BlockPart, start: int, stop: int) -> Iterator[Placed]:
    """Yields the blocks of ``part`` in elements ``[start, stop)`` of the parameter's flat memory.

    At most ``2 * ndim - 1`` per combination of segments. ``Placed.first`` counts from ``start``.
    """
    low, high = max(start, part.start), min(stop, part.stop)
    if low >= high:
        return
    for first, corner, shape in _runs(part.memory_shape, low - part.start, high - part.start):
        yield from _split(part, part.start + first - start, corner, shape)


def _runs(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, Shape, Shape]]:
    """Yields (first element, corner, shape) of row-major blocks that tile a flat range of an array, in order.

    They are a ragged first row, whole rows and a ragged last row. Ragged rows are divided in the same way.
    """
    if not shape:
        yield 0, (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _inner(shape, stop // row, start % row, stop % row)
        return
    if start % row:
        yield from _inner(shape, start // row, start % row, row)
    if first < last:
        yield first * row, (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if stop % row:
        yield from _inner(shape, last, 0, stop % row)


def _inner(shape: Shape, index: int, start: int, stop: int) -> Iterator[tuple[int, Shape, Shape]]:
    """Yields as ``_runs`` for a range within row ``index``."""
    for first, corner, size in _runs(shape[1:], start, stop):
        yield index * prod(shape[1:]) + first, (index, *corner), (1, *size)


def _split(part: BlockPart, first: int, corner: Shape, shape: Shape) -> Iterator[Placed]:
    """Yields the parts of one block of memory, which is cut where segments of its axes end."""
    cuts = [_overlaps(axis, low, low + size) for axis, low, size in zip(part.axes, corner, shape, strict=True)]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    order = sorted(range(len(shape)), key=lambda axis: part.axes[axis].target)
    for chosen in product(*cuts):
        skipped = ((low - begin) * step for (low, _, _), begin, step in zip(chosen, corner, strides, strict=True))
        yield Placed(
            tuple(chosen[axis][2] for axis in order),
            tuple(chosen[axis][1] for axis in order),
            first + sum(skipped),
            tuple(strides[axis] for axis in order),
        )


def _overlaps(axis: Axis, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Returns (start in memory, length, start in the whole tensor) of each segment's share of ``[start, stop)``."""
    overlaps = []
    for segment in axis.segments:
        low, high = max(start, segment.start), min(stop, segment.stop)
        if low < high:
            overlaps.append((low, high - low, segment.at + low - segment.start))
    return overlaps
