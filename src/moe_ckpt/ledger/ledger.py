"""Books which version of every operator exists in which tier, and which one a gradient log builds upon (its anchor).
Nothing else does.

For trainer and simulator, this module computes what is missing, stale, unsaved, lost or oldest, and where a log of
gradients begins, from what was recorded when checkpoints were committed. Pure: arrays over the operators
of one model, no I/O. The ledger is what a run knows while it lives; after a failure, ``recovery.recovery_plan`` decides
by the versions that sources still have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog, grid_of
from moe_ckpt.core.step import GradientGroups, Tier
from moe_ckpt.core.tokens import AtRisk, Counts, TokenBook

NEVER = -1
"""Stands for the number or step of a version, or of an anchor, that an operator does not have."""


class Versions:
    """The number of each operator's newest version in one tier. Not safe for several threads.

    Args:
        catalog: Of the model.

    Attributes:
        numbers: ``[operators + 1]``, ``NEVER`` for an operator without a version. The last one stands for the place -1,
            of an expert that a layer does not have.
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
        """Records that the tier has version ``number`` of the operators at ``places`` of the catalog.

        Raises:
            ValueError: A newer version of some is recorded; nothing changes.
        """
        newer = places[self.numbers[places] > number]
        if len(newer):
            name, recorded = self.catalog.everything[newer[0]], self.numbers[newer[0]]
            raise ValueError(f"{name} is recorded at step {recorded}, cannot go back to step {number}")
        self.numbers[places] = number

    def add(self, places: Counts, number: int) -> None:
        """Records version ``number`` of the operators at ``places``, except where a newer one is recorded."""
        self.numbers[places] = np.maximum(self.numbers[places], number)

    def replace(self, places: Counts, numbers: Sequence[int]) -> None:
        """Records these versions of the operators at ``places``, whatever was recorded before."""
        self.numbers[places] = numbers

    def lacks(self, places: Counts) -> list[str]:
        """Returns those of the operators at ``places`` that the tier does not have."""
        return [self.catalog.everything[at] for at in places[self.numbers[places] == NEVER].tolist()]

    def places_of(self, number: int) -> Counts:
        """Returns the places of the operators whose newest version is ``number``."""
        return np.flatnonzero(self.numbers[:-1] == number)

    def live(self, among: npt.NDArray[np.bool_] | None = None) -> frozenset[int]:
        """Returns the versions that are the newest of some operator.

        Args:
            among: ``[operators]`` of which operators; None for all.
        """
        numbers = self.numbers[:-1] if among is None else self.numbers[:-1][among]
        if not len(numbers):
            return frozenset()
        least = int(numbers.min())
        counts = np.bincount(numbers - least)  # a tenth of what np.unique takes
        return frozenset((np.flatnonzero(counts) + least).tolist()) - {NEVER}


class Ledger:
    """The newest version of every operator in each tier, the tokens that its experts have seen, and what must be saved.

    Attributes:
        catalog: Of the model.
        tokens: The tokens that were routed, and those that the newest copy of each expert has seen, by tier.
        at_risk: The tokens that a return to the newest committed checkpoint would lose.
        anchors: For a gradient log: from which snapshot on the gradients of each operator are logged.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.tokens = TokenBook(*grid_of(catalog.layers))
        self.at_risk = AtRisk(self.tokens.unsaved(), self.tokens.applied.copy())
        self.anchors = Anchors(catalog)
        self._stored = Versions(catalog)
        self._in_memory: dict[Tier, Versions] = {}
        self._built_upon = np.zeros(len(catalog.operators), dtype=bool)
        self._mandatory: dict[str, int] = {}

    # --- what is recorded ---

    def record(
        self,
        step: int,
        operators: tuple[str, ...],
        seen: Counts,
        *,
        in_host: tuple[str, ...] | None = (),
        whole: bool = True,
    ) -> None:
        """Books a committed checkpoint: storage holds ``operators`` as of ``step``, and memory ``in_host`` besides.

        Args:
            step: Of the checkpoint; the last one of a sparse window.
            operators: What it holds.
            seen: ``[L, E]`` tokens that experts had processed by ``step``.
            in_host: Operators that stay in host memory beside those that were written; None if memory is booked by
                ``hold``.
            whole: A partial checkpoint may build on it. False for a sparse window, whose operators are of several
                steps; then nothing that was saved before may be built upon either.

        Raises:
            ValueError: A newer version is recorded; within a run versions only move forward.
        """
        places = self.catalog.places_of(operators)
        self._stored.record(places, step)
        self._built_upon[places if whole else slice(None)] = whole
        experts = self._experts(places)
        self.tokens.mark_saved(Tier.STORAGE, experts, seen)
        if in_host is not None:
            # The buffer that was written from is kept until the next one is: it holds what storage got, and more.
            in_memory = np.concatenate([places, self.catalog.places_of(in_host)]) if in_host else places
            held = self._in_memory[Tier.HOST] = self._stored.copy()
            held.add(in_memory, step)
            self.tokens.mark_in_host(self._experts(in_memory) if in_host else experts, seen)
        self.at_risk = AtRisk((seen - self.tokens.saved[Tier.STORAGE]).clip(min=0), seen)

    def hold(self, operators: tuple[str, ...], step: int, seen: Counts, tier: Tier = Tier.HOST) -> None:
        """Books that memory which outlives the process has ``operators`` as of ``step``, beside what it had of others.

        If it has no room for older snapshots, fewer experts come back than are booked here; what a recovery restores is
        booked by ``TokenBook.recover``.

        Args:
            operators: Ids.
            step: Of the state.
            seen: ``[L, E]`` tokens that experts had processed by then.
            tier: This rank's memory, or that of peers.
        """
        places = self.catalog.places_of(operators)
        if tier not in self._in_memory:
            self._in_memory[tier] = Versions(self.catalog)
        self._in_memory[tier].add(places, step)
        self.tokens.mark_saved(tier, self._experts(places), seen)

    def restore(self, steps: Mapping[str, int], seen: Counts, *, whole: bool) -> None:
        """Books that the run resumed from a checkpoint of this store. Called after ``tokens.recover``.

        Args:
            steps: Operator -> step of the version that the checkpoint names; the last step of a sparse window.
            seen: ``[L, E]`` tokens routed by the step of that checkpoint; memory may have been ahead of it.
            whole: See ``record``.
        """
        places = self.catalog.places_of(tuple(steps))
        self._stored.replace(places, list(steps.values()))
        self._built_upon[places if whole else slice(None)] = whole
        # Of experts that memory had newer than storage. What was routed since would be routed again.
        self.at_risk = AtRisk((seen - self.tokens.saved[Tier.STORAGE]).clip(min=0), seen)

    def forget(self) -> None:
        """Forgets the versions on storage, as far as they may be built upon: as if nothing had ever been saved."""
        self._stored = Versions(self.catalog)
        self._in_memory.clear()
        self._built_upon[:] = False
        self.tokens.forget_saved()
        self.at_risk = AtRisk(self.tokens.unsaved(), self.tokens.applied.copy())

    def owe(self, operators: Iterable[str], change: int) -> None:
        """Books that operators must be saved, because the ``change``-th change of layout gave them other tensors."""
        self._mandatory.update(dict.fromkeys(operators, change))

    def pay(self, saved: Mapping[str, int]) -> None:
        """Books that these operators, as of these changes, were saved. Those that changed again must still be saved."""
        for operator, change in saved.items():
            if self._mandatory.get(operator) == change:
                del self._mandatory[operator]

    # --- what is asked ---

    @property
    def mandatory(self) -> Mapping[str, int]:
        """Operators that must be saved whatever the policy says, each with the change that is the reason (``owe``)."""
        return dict(self._mandatory)

    @property
    def lacking(self) -> npt.NDArray[np.bool_]:
        """``[operators]`` whether no checkpoint since the last sparse window has it, for a partial one to use."""
        return ~self._built_upon

    def expert_steps(self, tier: Tier = Tier.STORAGE) -> Counts:
        """Returns ``[L, E]`` step of each expert's newest committed copy, or of a newer one in memory of this life, if
        ``tier`` says so; ``NEVER`` if there is none yet."""
        steps = self._stored.numbers
        if tier in self._in_memory:
            steps = np.maximum(steps, self._in_memory[tier].numbers)
        of_experts: Counts = steps[self.catalog.expert_places]
        return of_experts

    def expert_ages(self, step: int) -> Counts:
        """Returns ``[L, E]`` steps since each expert's newest committed copy; -1 if there is none yet."""
        copies = self.expert_steps()
        return np.where(copies == NEVER, -1, step - copies)

    def _experts(self, places: Counts) -> Counts:
        """Returns ``[n, 2]`` layer and expert, of the experts at these places of the catalog."""
        return self.catalog.layer_and_expert[places[self.catalog.is_expert[places]]]


# --- gradient logs ---
#
# An operator's anchor is the newest snapshot that saved it in full. The snapshots since then log its gradients.

MOST_SLOTS = 16
"""Most slots that hold the gradients of one step."""


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
        steps: ``[operators]`` step of each anchor, ``NEVER`` without one (``MemoryFacts.anchored_at``). A new array
            whenever an anchor changes.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.steps: Counts = np.full(len(catalog.operators), NEVER, dtype=np.int64)
        self._sequences = self.steps
        self._groups = self.steps
        self._next_group = 0
        self._is_owed = np.zeros(len(catalog.operators), dtype=bool)
        self._repaid = np.full(len(catalog.operators), NEVER, dtype=np.int64)
        """``[operators]`` the snapshot that saved an owed operator in full again."""

    @property
    def log_operators(self) -> Collection[str]:
        """Operators whose newest version follows from gradients."""
        return self._catalog.ids_of(self._is_owed) if self._is_owed.any() else ()

    def without_anchor(self, gradients: tuple[str, ...]) -> frozenset[str]:
        """Returns the operators among ``gradients`` that have no anchor."""
        places = self._catalog.places_of(gradients)
        lacking = places[self._sequences[places] == NEVER].tolist()
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
        return None if oldest == NEVER else oldest

    def grouped(self, gradients: tuple[str, ...]) -> GradientGroups:
        """Returns operators, grouped by the snapshots that anchored them.

        Args:
            gradients: Operators whose gradients the next snapshot has; each has an anchor.
        """
        places = self._catalog.places_of(gradients)
        numbers, group_at = np.unique(self._groups[places], return_inverse=True)
        slots = np.arange(len(numbers)) * min(MOST_SLOTS, len(numbers)) // max(1, len(numbers))
        slot_of = np.full(len(self.steps), NEVER, dtype=np.int64)
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
        self.steps, self._sequences = np.where(cut, NEVER, self.steps), np.where(cut, NEVER, self._sequences)
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
        resulting = np.full_like(anchored_at, NEVER)
        resulting[gradients] = anchored_at[gradients]
    resulting[anchored] = step
    return resulting
