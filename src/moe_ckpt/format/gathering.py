"""Tables that grow, and many small pieces of memory gathered by few calls of numpy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Column:
    """An array that grows at its end. A reader meanwhile sees everything that was there.

    Args:
        dtype: Of its elements.
        width: Shape of a row.
    """

    def __init__(self, dtype: npt.DTypeLike, *width: int) -> None:
        self._storage: npt.NDArray[Any] = np.empty((0, *width), dtype=dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> npt.NDArray[Any]:
        return self._storage[: self._count]

    def add(self, rows: npt.NDArray[Any]) -> None:
        count = self._count + len(rows)
        if count > len(self._storage):
            grown = np.empty((max(count, 2 * len(self._storage)), *self._storage.shape[1:]), dtype=self._storage.dtype)
            grown[: self._count] = self.rows
            self._storage = grown
        self._storage[self._count : count] = rows
        self._count = count


def by_size(sizes: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Yields (a size, places in ``sizes`` where it is), in ascending order."""
    order = np.argsort(sizes, kind="stable")
    ascending_sizes = sizes[order]
    bounds = [0, *(np.flatnonzero(ascending_sizes[1:] != ascending_sizes[:-1]) + 1).tolist(), len(sizes)]
    for at, stop in pairwise(bounds):
        if at < stop:
            yield int(ascending_sizes[at]), order[at:stop]


def ranges(firsts: Numbers, counts: Numbers) -> Numbers:
    """Returns ``counts[i]`` numbers from each ``firsts[i]`` on, one range after the other."""
    ends = np.cumsum(counts)
    numbers: Numbers = np.repeat(firsts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
    return numbers


def ascending(numbers: Numbers, end: int) -> Numbers:
    """Returns each of ``numbers`` once, in order. All are from 0 to below ``end``, which is not much larger."""
    is_numbered = np.zeros(end, dtype=bool)
    is_numbered[numbers] = True
    return np.flatnonzero(is_numbered)


def pieces_of(memory: Bytes, nbytes: int) -> npt.NDArray[np.void]:
    """All pieces of ``nbytes`` that are in ``memory``, one from each byte on."""
    return np.ndarray((len(memory) - nbytes + 1,), f"V{nbytes}", memory, strides=(1,))


def gather(target: Bytes, begins: Numbers, source: Bytes, offsets: Numbers, sizes: Numbers) -> None:
    """Copy ``sizes`` bytes from each of ``offsets`` in ``source`` to each of ``begins`` in ``target``."""
    for nbytes, slices in by_size(sizes):
        if nbytes:
            pieces_of(target, nbytes)[begins[slices]] = pieces_of(source, nbytes)[offsets[slices]]
