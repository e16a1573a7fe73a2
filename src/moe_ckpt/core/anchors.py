"""Which snapshot of a gradient log each operator was last saved in full in: a part of ``ledger.ledger``. Pure.

An operator's anchor is that snapshot. From there on its gradients are logged, up to the newest snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import Counts

NONE = -1
"""Step and sequence of an operator that has no anchor."""
MOST_SLOTS = 16
"""Slots that the gradients of one step lie in, at most."""


@dataclass(frozen=True, eq=False)
class GradientGroups:
    """Operators whose gradients a step logs, by what they were anchored with.

    Operators that were anchored together are anchored together again, if the policy keeps to its rounds: from then on
    none of their older gradients is needed. So the gradients of each group lie in a slot of their own.

    Attributes:
        groups: For each slot, the numbers of its groups; those that were anchored first come first.
        slot_of: ``[operators]`` the slot of each operator, ``NONE`` of those whose gradients are not logged.
    """

    groups: tuple[tuple[int, ...], ...]
    slot_of: Counts


class Anchors:
    """Snapshots are named by their sequence, and of a log each follows on the one before it.

    Equal on every rank, as long as all ranks tell it the same in the same order. Arrays over all operators: what is
    told and asked at every step costs no Python for each of them.

    A log may leave operators out (MoEtion): what is neither anchored nor has its gradient in a snapshot has no anchor
    from there on. Its newest version must not be one that only gradients lead to, for these are let go of: it is
    ``owed`` in full.

    Args:
        catalog: Of the model, whose operators must all have an anchor.

    Attributes:
        steps: ``[operators]`` the step of each anchor, ``NONE`` where there is none (``MemoryFacts.anchored_at``).
            Another array whenever that changes.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.steps: Counts = np.full(len(catalog.operators), NONE, dtype=np.int64)
        self._sequences = self.steps
        self._groups = self.steps
        self._next_group = 0
        self._is_owed = np.zeros(len(catalog.operators), dtype=bool)
        self._repaid = np.full(len(catalog.operators), NONE, dtype=np.int64)
        """Snapshot that saved again in full what was owed."""

    @property
    def log_operators(self) -> Collection[str]:
        """Operators whose newest version is one that gradients lead to."""
        return self._catalog.ids_of(self._is_owed) if self._is_owed.any() else ()

    def without_anchor(self, gradients: tuple[str, ...]) -> frozenset[str]:
        """Returns those of ``gradients`` that have none."""
        places = self._catalog.places_of(gradients)
        lacking = places[self._sequences[places] == NONE].tolist()
        return frozenset(map(self._catalog.everything.__getitem__, lacking))

    def since(self, sequence: int, anchored: tuple[str, ...], gradients: tuple[str, ...] | None = None) -> int | None:
        """Returns the first snapshot that a snapshot needs; None if an operator of which it has the gradient has no
        anchor.

        Args:
            sequence: Of the snapshot.
            anchored: What it has in full.
            gradients: Of what it has gradients, unless it has that in full; None for all others.
        """
        places_of = self._catalog.places_of
        needed: npt.NDArray[np.bool_] = np.full(len(self.steps), gradients is None)
        if gradients is not None:
            needed[places_of(gradients)] = True
        needed[places_of(anchored)] = False
        oldest = int(self._sequences[needed].min(initial=sequence))
        return None if oldest == NONE else oldest

    def grouped(self, gradients: tuple[str, ...]) -> GradientGroups:
        """Returns operators by the groups that they were anchored in.

        Args:
            gradients: Those whose gradients the next snapshot has; each has an anchor.
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
        """A snapshot of ``step`` began that follows on the one before.

        Args:
            sequence: Of it.
            step: Of its state.
            anchored: What it has in full.
            gradients: Of what it has gradients; None for all others.
            together: Of ``anchored``, those that will be anchored together next; the rest is one group.
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
        """Snapshot ``sequence`` is lost, so that no chain goes through it. None: a step after the newest is missing."""
        cut = np.ones(len(self.steps), dtype=bool) if sequence is None else self._sequences <= sequence
        self.steps, self._sequences = np.where(cut, NONE, self.steps), np.where(cut, NONE, self._sequences)
        if sequence is not None:
            self._is_owed |= self._repaid == sequence


def anchored_after(anchored_at: Counts, step: int, anchored: Counts, gradients: Counts | None) -> Counts:
    """Returns what ``MemoryFacts.anchored_at`` becomes when ``step`` is saved.

    Args:
        anchored_at: ``[operators]`` before it.
        step: Of the update.
        anchored: ``[n]`` places in the catalog of what is saved in full.
        gradients: ``[m]`` those of what only the consumed gradient is saved of; None for all others.
    """
    if gradients is None:
        resulting = anchored_at.copy()
    else:
        resulting = np.full_like(anchored_at, NONE)
        resulting[gradients] = anchored_at[gradients]
    resulting[anchored] = step
    return resulting
