"""Sparse windows: a dense checkpoint spread over W consecutive steps (MoEvement, section 3.2).

At each step of a window the operators of its slot are anchored: saved at full fidelity. Those of later slots are
saved as what the forward and backward pass reads (compute fidelity), so that the step can be computed again; those
of earlier slots are not saved, since replay brings them here from their anchor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from moe_ckpt.core.plan import Fidelity, PlanItem, SnapshotPlan


@dataclass(frozen=True)
class OperatorBytes:
    """Size of one operator in the whole model, not of one rank's share.

    full: weights and optimizer state. compute: what the forward and backward pass reads of it.
    """

    full: int
    compute: int


@dataclass(frozen=True)
class Window:
    """Who is anchored when. slots: W tuples of operator ids; every operator of the model is in exactly one.

    start: step of the first slot.
    frequencies: per expert operator, its share of the activity when the order was made; what a reorder is judged
        against.
    """

    start: int
    slots: tuple[tuple[str, ...], ...]
    frequencies: Mapping[str, float] | None = None

    @property
    def size(self) -> int:
        """W."""
        return len(self.slots)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """All operators, in the order in which they are anchored."""
        return tuple(op for slot in self.slots for op in slot)

    def frozen(self, slot: int) -> tuple[str, ...]:
        """Operators that are not anchored up to ``slot``."""
        return tuple(op for later in self.slots[slot + 1 :] for op in later)


def slot_plan(window: Window, slot: int, step: int) -> SnapshotPlan:
    """The plan of one step of a window: anchors in full, what comes later as compute weights."""
    anchors = tuple(PlanItem(op) for op in window.slots[slot])
    frozen = tuple(PlanItem(op, Fidelity.COMPUTE) for op in window.frozen(slot))
    return SnapshotPlan(step, anchors + frozen, window=window, slot=slot)


def slot_bytes(slots: Sequence[Iterable[str]], sizes: Mapping[str, OperatorBytes]) -> tuple[int, ...]:
    """Bytes of each slot's snapshot, all ranks together: its anchors in full, later slots' operators as compute."""
    found: list[int] = []
    frozen = 0
    for slot in reversed(slots):
        ops = list(slot)
        found.append(sum(sizes[op].full for op in ops) + frozen)
        frozen += sum(sizes[op].compute for op in ops)
    return tuple(reversed(found))
