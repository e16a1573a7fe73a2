"""The newest version of every operator that a tier has: the only place that computes it. Pure.

Versions have numbers, and the newest is the greatest. A run numbers them by their step (``ledger.ledger``); the thread
that commits, which must know in which files they lie, by the part that it wrote them with (``commit.commit``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import Counts

NEVER = -1
"""Number of an operator that a tier does not have."""


class Versions:
    """Number of each operator's newest version in one tier. Not safe for several threads.

    Args:
        catalog: Of the model.

    Attributes:
        numbers: ``[operators + 1]``, ``NEVER`` where there is none. The last stands for the place -1, of an expert that
            a layer does not have.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.numbers: Counts = np.full(len(catalog.operators) + 1, NEVER, dtype=np.int64)

    def copy(self) -> Versions:
        """Returns a copy that shares only the catalog."""
        copied = Versions(self.catalog)
        copied.numbers = self.numbers.copy()
        return copied

    def record(self, places: Counts, number: int) -> None:
        """The tier has version ``number`` of the operators at ``places`` of the catalog, and nothing newer.

        Raises:
            ValueError: It is known to have a newer one of some; nothing is recorded.
        """
        newer = places[self.numbers[places] > number]
        if len(newer):
            name, recorded = self.catalog.everything[newer[0]], self.numbers[newer[0]]
            raise ValueError(f"{name} is recorded at step {recorded}, cannot go back to step {number}")
        self.numbers[places] = number

    def add(self, places: Counts, number: int) -> None:
        """The tier has version ``number`` of these, beside what it had: the newer one counts."""
        self.numbers[places] = np.maximum(self.numbers[places], number)

    def replace(self, places: Counts, numbers: Sequence[int]) -> None:
        """The tier has these versions, whatever was known of these operators."""
        self.numbers[places] = numbers

    def move(self, steps: int) -> None:
        """All versions become so many steps newer."""
        self.numbers = np.where(self.numbers == NEVER, NEVER, self.numbers + steps)

    def lacks(self, places: Counts) -> list[str]:
        """Returns those of the operators at ``places`` that the tier does not have."""
        return [self.catalog.everything[at] for at in places[self.numbers[places] == NEVER].tolist()]

    def places_of(self, number: int) -> Counts:
        """Returns the places of the operators whose newest version is ``number``."""
        return np.flatnonzero(self.numbers[:-1] == number)

    def live(self, among: npt.NDArray[np.bool_] | None = None) -> frozenset[int]:
        """Returns the versions that are the newest of some operator.

        Args:
            among: ``[operators]`` which are asked about; None for all.
        """
        numbers = self.numbers[:-1] if among is None else self.numbers[:-1][among]
        if not len(numbers):
            return frozenset()
        least = int(numbers.min())
        counts = np.bincount(numbers - least)  # a tenth of what np.unique takes
        return frozenset((np.flatnonzero(counts) + least).tolist()) - {NEVER}
