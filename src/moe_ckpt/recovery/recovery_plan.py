"""Decides which copy of every operator a recovery takes, from inventories alone, before anything is read.

A source is a place that outlives the failure, such as a step directory on storage, or memory. Its inventory says which
operators it holds whole, as of which step. The plan takes the newest copy of each operator, and of equally new copies
that of the nearest source. Trainers make inventories of what exists after a failure, the simulator makes them from its
ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from moe_ckpt.core.operators import EXPERT
from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import CoverageError

_Checkpoint = TypeVar("_Checkpoint")

ABSENT = -1
"""Step of an operator that a source does not hold, or not whole."""


@dataclass(frozen=True, eq=False)
class Inventory:
    """Versions of operators that one source holds.

    Attributes:
        tier: Which kind of source.
        label: Its name, for people: a directory, a rank's memory.
        steps: ``[n]`` step of each operator's copy, in the order of the plan's operators; ``ABSENT`` where none is.
        nbytes: ``[n]`` its bytes.
    """

    tier: Tier
    label: str
    steps: Counts
    nbytes: Counts


@dataclass(frozen=True)
class PlanRow:
    """Operators that come from one source: those as of the plan's own step, or all that are older.

    Attributes:
        source: Which.
        oldest: Step of the oldest of them.
        newest: Step of the newest.
        operators: How many there are.
        experts: How many of them are experts.
        nbytes: Of all together.
    """

    source: Inventory
    oldest: int
    newest: int
    operators: int
    experts: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class RecoveryPlan:
    """Source of each operator. Equal on every rank, except what is memory of this node or of another.

    Attributes:
        checkpoint: Directory of the checkpoint that the run returns to.
        step: Where the run stands when the plan is carried out.
        first: The step whose state is loaded; the steps from there to ``step`` are computed again. ``step`` if none.
        operators: Ids.
        sources: What was there to choose from, nearest first.
        chosen: ``[n]`` index into ``sources``, for each operator.
        updates: Of a gradient log, steps (from, to): the updates of the steps after ``from`` are made once more, with
            the gradients that they consumed. None without.
    """

    checkpoint: str
    step: int
    first: int
    operators: tuple[str, ...]
    sources: tuple[Inventory, ...]
    chosen: Counts
    updates: tuple[int, int] | None = None

    def from_source(self, source: Inventory) -> tuple[str, ...]:
        """The operators that ``source`` gives."""
        mine = self.chosen == self.sources.index(source)
        return tuple(self.operators[at] for at in np.flatnonzero(mine))

    @property
    def _newest(self) -> Counts:
        """Step of the copy that is taken of each operator."""
        newest: Counts = np.stack([source.steps for source in self.sources])[
            self.chosen, np.arange(len(self.operators))
        ]
        return newest

    @property
    def versions(self) -> dict[str, int]:
        """Operator -> the step that it comes back as of: the plan's own, where updates are made once more."""
        steps = [self.step] * len(self.operators) if self.updates is not None else self._newest.tolist()
        return dict(zip(self.operators, steps, strict=True))

    @property
    def beyond_storage(self) -> bool:
        """True if storage alone would give an older state of at least one operator."""
        newest = self._newest
        stored = [source.steps for source in self.sources if source.tier is Tier.STORAGE]
        return self.updates is not None or not stored or bool((np.max(stored, axis=0) < newest).any())

    def rows(self) -> Iterator[PlanRow]:
        """Yields what each source gives, nearest source first, and the plan's own step before older ones."""
        expert = np.fromiter((op.startswith(EXPERT) for op in self.operators), bool, len(self.operators))
        for number, source in enumerate(self.sources):
            for of_this_step in (True, False):
                these = (self.chosen == number) & ((source.steps == self.step) == of_this_step)
                if these.any():
                    steps, nbytes = source.steps[these], int(source.nbytes[these].sum())
                    counts = int(these.sum()), int((these & expert).sum())
                    yield PlanRow(source, int(steps.min()), int(steps.max()), *counts, nbytes)


def first_choice(checkpoints: Iterable[_Checkpoint], age: Callable[[_Checkpoint], Any]) -> _Checkpoint | None:
    """Returns the checkpoint that a recovery tries first.

    Args:
        checkpoints: Those that are left, of the nearest source first.
        age: Greater for newer ones.

    Returns:
        The newest; of equal ones that of the nearest source. None where nothing is left.
    """
    return max(checkpoints, key=age, default=None)


def plan_recovery(
    checkpoint: str,
    step: int,
    operators: tuple[str, ...],
    inventories: Sequence[Inventory],
    *,
    first: int | None = None,
) -> RecoveryPlan:
    """Choose the source of every operator for a return to ``checkpoint``.

    Args:
        checkpoint: Its directory.
        step: The state that it stands for. A copy that is newer is of another state, and is not taken.
        operators: All of the model's.
        inventories: Of the sources that are left, nearest first: own memory, peers' memory, storage.
        first: First step of the checkpoint's sparse window, if it is one.

    Returns:
        The plan: for every operator the newest copy, of the nearest source that has it.

    Raises:
        CoverageError: An operator is nowhere.
    """
    sources = tuple(inventories)
    steps = np.full((len(sources) + 1, len(operators)), ABSENT, dtype=np.int64)
    for number, source in enumerate(sources):
        steps[number] = np.where(source.steps > step, ABSENT, source.steps)
    chosen: Counts = np.argmax(steps, axis=0)  # of equal ones the first
    nowhere = np.flatnonzero(steps[chosen, np.arange(len(operators))] == ABSENT)
    if len(nowhere):
        names = [inventory.label for inventory in inventories]
        raise CoverageError(
            f"returning to {checkpoint}",
            tuple(f"{operators[at]} is held by none of {', '.join(names) or 'no source'}" for at in nowhere),
        )
    return RecoveryPlan(checkpoint, step, step if first is None else first, operators, sources, chosen)
