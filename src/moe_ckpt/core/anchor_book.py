"""Which snapshot of a gradient log each operator was last saved in full in, as the life that writes it knows. Pure."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from moe_ckpt.core.tokens import Counts


class AnchorBook:
    """Snapshots are named by their sequence, and of a log each follows on the one before it.

    Equal on every rank, as long as all ranks tell it the same in the same order.

    Args:
        operators: All that must have an anchor.
    """

    def __init__(self, operators: Collection[str]) -> None:
        self._operators = tuple(operators)
        self._anchors: dict[str, tuple[int, int]] = {}

    def since(self, sequence: int, anchored: Collection[str]) -> int | None:
        """Returns the first snapshot that snapshot ``sequence`` needs, if it has ``anchored`` in full, and of all
        others the gradients; None if an operator would have no anchor."""
        given = frozenset(anchored)
        oldest = sequence
        for operator in self._operators:
            if operator not in given:
                found = self._anchors.get(operator)
                if found is None:
                    return None
                oldest = min(oldest, found[0])
        return oldest

    def steps(self) -> Counts:
        """Returns ``[operators]`` the step of each anchor, -1 where there is none (``PolicyContext.anchored_at``)."""
        none = (-1, -1)
        found = (self._anchors.get(operator, none)[1] for operator in self._operators)
        return np.fromiter(found, np.int64, len(self._operators))

    def begun(self, sequence: int, step: int, anchored: Collection[str]) -> None:
        """A snapshot of ``step`` began that follows on the one before: what is not ``anchored`` has gradients in it."""
        self._anchors.update(dict.fromkeys(anchored, (sequence, step)))

    def broken(self, sequence: int | None = None) -> None:
        """Snapshot ``sequence`` is lost, so that no chain goes through it. None: a step after the newest is missing."""
        if sequence is None:
            self._anchors.clear()
        else:
            self._anchors = {operator: found for operator, found in self._anchors.items() if found[0] > sequence}
