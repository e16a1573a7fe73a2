"""For each operator, the snapshot of a gradient log in which it was last saved in full, as far as this life knows.
Pure."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from moe_ckpt.core.tokens import Counts


class AnchorBook:
    """Snapshots are named by their sequence. In a log, each follows the one before it.

    Equal on every rank, as long as all ranks tell it the same in the same order.

    A log may leave operators out (MoEtion): what is neither anchored nor has its gradient in a snapshot has no anchor
    from there on. Its newest version must not be one that only gradients lead to, for these are deleted: it is
    ``owed`` in full.

    Args:
        operators: All that must have an anchor.
    """

    def __init__(self, operators: Collection[str]) -> None:
        self._operators = tuple(operators)
        self._anchors: dict[str, tuple[int, int]] = {}
        self._ends: dict[str, int] = {}
        self._repaid: dict[str, int] = {}

    @property
    def owed(self) -> Collection[str]:
        """Operators whose newest version is reached from an anchor by gradients."""
        return self._ends.keys()

    def without_anchor(self, gradients: Collection[str]) -> frozenset[str]:
        """Returns those of ``gradients`` that have no anchor."""
        return frozenset(operator for operator in gradients if operator not in self._anchors)

    def since(self, sequence: int, anchored: Collection[str], gradients: Collection[str] | None = None) -> int | None:
        """Returns the first snapshot that snapshot ``sequence`` needs. It has ``anchored`` in full, and the gradients
        of ``gradients`` (default: of all others). None if one of these has no anchor."""
        given = frozenset(anchored)
        oldest = sequence
        for operator in self._operators if gradients is None else gradients:
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

    def begun(
        self, sequence: int, step: int, anchored: Collection[str], gradients: Collection[str] | None = None
    ) -> None:
        """A snapshot of ``step`` began, which follows the one before it.

        Args:
            sequence: Of it.
            step: Of its state.
            anchored: What it has in full.
            gradients: Of what it has gradients; None for all others.
        """
        self._anchors.update(dict.fromkeys(anchored, (sequence, step)))
        if gradients is None:
            return
        kept = frozenset(gradients).union(anchored)
        self._anchors = {operator: found for operator, found in self._anchors.items() if operator in kept}
        for operator in self._ends.keys() & frozenset(anchored):
            self._repaid[operator] = sequence
            del self._ends[operator]
        self._ends.update(dict.fromkeys(gradients, sequence))

    def broken(self, sequence: int | None = None) -> None:
        """Snapshot ``sequence`` is lost, so that no chain goes through it. None: a step after the newest is missing."""
        if sequence is None:
            self._anchors.clear()
        else:
            self._anchors = {operator: found for operator, found in self._anchors.items() if found[0] > sequence}
            again = [operator for operator, at in self._repaid.items() if at == sequence]
            self._ends.update(dict.fromkeys(again, sequence))
        for operator in self._ends.keys() & self._repaid.keys():
            del self._repaid[operator]
