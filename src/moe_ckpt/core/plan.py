"""Frozen plans: what one checkpoint writes, at which fidelity, to which tier."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fidelity(str, enum.Enum):
    """How much of an operator a snapshot holds.

    FULL: master weights and optimizer state (12 B/param for fp32 Adam).
    COMPUTE: what forward and backward read (2 B/param in bf16); only MoEvement's windows use it.
    """

    FULL = "full"
    COMPUTE = "compute"


class Tier(str, enum.Enum):
    """Where a snapshot ends: this node's memory, a peer's memory, or durable storage."""

    HOST = "host"
    PEER = "peer"
    STORAGE = "storage"


@dataclass(frozen=True)
class PlanItem:
    operator: str
    fidelity: Fidelity = Fidelity.FULL
    tier: Tier = Tier.STORAGE


@dataclass(frozen=True)
class SnapshotPlan:
    """The decision of a policy for one step; equal on every rank.

    An empty plan means: no checkpoint at this step. ``wait`` asks the engine to finish the checkpoint
    before training goes on (the synchronous baseline).
    """

    step: int
    items: tuple[PlanItem, ...] = ()
    wait: bool = False

    def __bool__(self) -> bool:
        return bool(self.items)

    def operators(self, tier: Tier = Tier.STORAGE) -> tuple[str, ...]:
        return tuple(item.operator for item in self.items if item.tier is tier)


def save_nothing(step: int) -> SnapshotPlan:
    return SnapshotPlan(step)


def save_full(step: int, operators: tuple[str, ...], *, wait: bool = False) -> SnapshotPlan:
    """A plan that sends ``operators`` to storage at full fidelity."""
    return SnapshotPlan(step, tuple(PlanItem(op) for op in operators), wait)
