"""Tables that grow, and ranges of numbers, by few calls of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


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
