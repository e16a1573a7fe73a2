"""Which version of every operator exists in which tier: the only place where that is booked.

Missing, stale, unsaved, lost, oldest, where a log of gradients begins: all of it is computed here, in
``ledger.ledger`` and in ``core.anchors``, for trainer and simulator, from what was recorded when a checkpoint was
committed. Pure: arrays over the operators of one model, no I/O. ``recovery.recovery_plan`` decides by the versions that
sources tell after a failure; this ledger is what a run knows while it lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.anchors import Anchors
from moe_ckpt.core.operators import Catalog, grid_of
from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import AtRisk, Counts, TokenBook

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


class Ledger:
    """Newest version of every operator on storage, what its experts have seen in each tier, and what is owed.

    Attributes:
        catalog: Of the model.
        tokens: What was routed, and what of it the newest copy of each expert has seen, by tier.
        at_risk: What a return to the newest committed checkpoint would lose.
        anchors: Of a gradient log: from which snapshot on the gradients of each operator are logged.
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
            step: Of the checkpoint; of a sparse window its last one.
            operators: What it holds.
            seen: ``[L, E]`` tokens that experts had processed by ``step``.
            in_host: What stays in host memory beside what was written from there; None where memory is booked by
                ``hold``.
            whole: A partial checkpoint may build on it. Not so on a sparse window, whose operators are of several
                steps, nor on anything that was saved before one.

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
        """Memory that outlives the process has ``operators`` as of ``step``, and all that it had of others before.

        Where it has no room for what is older, fewer experts come back than is booked here; what a recovery finds is
        booked by ``TokenBook.recover``.

        Args:
            operators: Which.
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
        """The run went on from a checkpoint of this store. To be called after ``tokens.recover``.

        Args:
            steps: Operator -> step of the version that the checkpoint names; of a sparse window its last step.
            seen: ``[L, E]`` tokens routed by the step of that checkpoint, which memory may have been ahead of.
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
        """These operators have other tensors than before, by the ``change``-th change: old versions do not fit."""
        self._mandatory.update(dict.fromkeys(operators, change))

    def pay(self, saved: Mapping[str, int]) -> None:
        """A checkpoint with these operators is committed; those changed again since are owed still."""
        for operator, change in saved.items():
            if self._mandatory.get(operator) == change:
                del self._mandatory[operator]

    # --- what is asked ---

    @property
    def mandatory(self) -> Mapping[str, int]:
        """Operators to be saved whatever the policy says, each with the change that it is owed to (see ``owe``)."""
        return dict(self._mandatory)

    @property
    def lacking(self) -> npt.NDArray[np.bool_]:
        """Per operator: no checkpoint holds it for a partial one to build on, of all that were saved since a window."""
        return ~self._built_upon

    def expert_steps(self, tier: Tier = Tier.STORAGE) -> Counts:
        """``[L, E]`` step of each expert's newest committed copy, or of a newer one in memory of the life at hand, if
        ``tier`` says so; ``NEVER`` where there is none yet."""
        steps = self._stored.numbers
        if tier in self._in_memory:
            steps = np.maximum(steps, self._in_memory[tier].numbers)
        of_experts: Counts = steps[self.catalog.expert_places]
        return of_experts

    def expert_ages(self, step: int) -> Counts:
        """``[L, E]`` steps since each expert's newest committed copy; -1 where there is none yet."""
        copies = self.expert_steps()
        return np.where(copies == NEVER, -1, step - copies)

    def oldest_expert_steps(self, step: int) -> int:
        """Steps since the state of the expert whose newest committed copy is the oldest; 0 before the first."""
        return int(self.expert_ages(step).max(initial=0))

    @property
    def at_risk_plt(self) -> float:
        """PLT if the run failed now and came back to the newest committed step."""
        routed = self.tokens.routed_tokens
        return (self.tokens.lost_tokens + self.at_risk.tokens) / routed if routed else 0.0

    def _experts(self, places: Counts) -> Counts:
        """``[n, 2]``: ``(layer, expert)`` of the experts at these places of the catalog."""
        return self.catalog.layer_and_expert[places[self.catalog.is_expert[places]]]
