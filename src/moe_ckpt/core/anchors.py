"""The anchors of a gradient log, a part of ``ledger.ledger``. Pure.

An operator's anchor is the newest snapshot that saved it in full. The snapshots since then log its gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import Counts

NONE = -1
"""Stands for the step and the sequence of an operator without an anchor."""
MOST_SLOTS = 16
"""Most slots that hold the gradients of one step."""


@dataclass(frozen=True, eq=False)
class GradientGroups:
    """The operators whose gradients a step logs, grouped by the snapshot that anchored them.

    If the policy keeps to its rounds, operators that were anchored together are anchored together again, and then none
    of their older gradients is needed. So each group has its own memory slot for gradients.

    Attributes:
        groups: For each slot, the numbers of its groups, in the order in which they were anchored.
        slot_of: ``[operators]`` slot of each operator; ``NONE`` for operators whose gradients are not logged.
    """

    groups: tuple[tuple[int, ...], ...]
    slot_of: Counts


class Anchors:
    """The anchor of each operator. Snapshots are named by their sequence, and each logged one follows the one before.

    All ranks have equal anchors if they report the same events in the same order. The data are arrays over all
    operators, so that no call runs Python code for each operator.

    A log may leave operators out (MoEtion): an operator that a snapshot neither anchors nor has the gradient of loses
    its anchor with that snapshot. The gradients that lead to its newest version are then deleted, so the operator is
    owed: it must be saved in full.

    Args:
        catalog: Of the model.

    Attributes:
        steps: ``[operators]`` step of each anchor, ``NONE`` without one (``MemoryFacts.anchored_at``). A new array
            whenever an anchor changes.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.steps: Counts = np.full(len(catalog.operators), NONE, dtype=np.int64)
        self._sequences = self.steps
        self._groups = self.steps
        self._next_group = 0
        self._is_owed = np.zeros(len(catalog.operators), dtype=bool)
        self._repaid = np.full(len(catalog.operators), NONE, dtype=np.int64)
        """``[operators]`` the snapshot that saved an owed operator in full again."""

    @property
    def log_operators(self) -> Collection[str]:
        """Operators whose newest version follows from gradients."""
        return self._catalog.ids_of(self._is_owed) if self._is_owed.any() else ()

    def without_anchor(self, gradients: tuple[str, ...]) -> frozenset[str]:
        """Returns the operators among ``gradients`` that have no anchor."""
        places = self._catalog.places_of(gradients)
        lacking = places[self._sequences[places] == NONE].tolist()
        return frozenset(map(self._catalog.everything.__getitem__, lacking))

    def since(self, sequence: int, anchored: tuple[str, ...], gradients: tuple[str, ...] | None = None) -> int | None:
        """Returns the first snapshot that a snapshot needs; None if an operator whose gradient it has lacks an anchor.

        Args:
            sequence: Of the snapshot.
            anchored: Operators that it has in full.
            gradients: Operators whose gradients it has, unless it has them in full; None for all others.
        """
        places_of = self._catalog.places_of
        needed: npt.NDArray[np.bool_] = np.full(len(self.steps), gradients is None)
        if gradients is not None:
            needed[places_of(gradients)] = True
        needed[places_of(anchored)] = False
        oldest = int(self._sequences[needed].min(initial=sequence))
        return None if oldest == NONE else oldest

    def grouped(self, gradients: tuple[str, ...]) -> GradientGroups:
        """Returns operators, grouped by the snapshots that anchored them.

        Args:
            gradients: Operators whose gradients the next snapshot has; each has an anchor.
        """
        places = self._catalog.places_of(gradients)
        numbers, group_at = np.unique(self._groups[places], return_inverse=True)
        slots = np.arange(len(numbers)) * min(MOST_SLOTS, len(numbers)) // max(1, len(numbers))
        slot_of = np.full(len(self.steps), NONE, dtype=np.int64)
        slot_of[places] = slots[group_at]
        groups = tuple(tuple(numbers[slots == at].tolist()) for at in range(int(slots.max(initial=-1)) + 1))
        return GradientGroups(groups, slot_of)

    def begun(
        self,
        sequence: int,
        step: int,
        anchored: tuple[str, ...],
        gradients: tuple[str, ...] | None = None,
        together: Sequence[tuple[str, ...]] = (),
    ) -> None:
        """Notes that a snapshot began which follows the one before.

        Args:
            sequence: Of the snapshot.
            step: The step whose state it has.
            anchored: Operators that it has in full.
            gradients: Operators whose gradients it has; None for all others.
            together: Groups of ``anchored`` that will be anchored together next; the rest is one group.
        """
        full = self._catalog.places_of(anchored)
        group = np.full(len(self.steps), self._next_group, dtype=np.int64)
        for number, group_members in enumerate(together, self._next_group + 1):
            group[self._catalog.places_of(group_members)] = number
        self._groups = self._groups.copy()
        self._groups[full] = group[full]
        self._next_group += 1 + len(together)
        logged = None if gradients is None else self._catalog.places_of(gradients)
        self.steps = anchored_after(self.steps, step, full, logged)
        self._sequences = anchored_after(self._sequences, sequence, full, logged)
        if logged is not None:
            self._repaid[full[self._is_owed[full]]] = sequence
            self._is_owed[full] = False
            self._is_owed[logged] = True

    def broken(self, sequence: int | None = None) -> None:
        """Notes that snapshot ``sequence`` is lost, which ends all chains through it; None: a step was not saved."""
        cut = np.ones(len(self.steps), dtype=bool) if sequence is None else self._sequences <= sequence
        self.steps, self._sequences = np.where(cut, NONE, self.steps), np.where(cut, NONE, self._sequences)
        if sequence is not None:
            self._is_owed |= self._repaid == sequence


def anchored_after(anchored_at: Counts, step: int, anchored: Counts, gradients: Counts | None) -> Counts:
    """Returns ``MemoryFacts.anchored_at`` as it is after ``step`` is saved.

    Args:
        anchored_at: ``[operators]`` before the step.
        step: The step that is saved.
        anchored: ``[n]`` places in the catalog of the operators that are saved in full.
        gradients: ``[m]`` places of the operators whose consumed gradients alone are saved; None for all others.
    """
    if gradients is None:
        resulting = anchored_at.copy()
    else:
        resulting = np.full_like(anchored_at, NONE)
        resulting[gradients] = anchored_at[gradients]
    resulting[anchored] = step
    return resulting
