"""Frozen plans: what one checkpoint writes, at which fidelity, to which tier."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from moe_ckpt.core.remembered import Remembered

if TYPE_CHECKING:
    from moe_ckpt.core.window import Window


class Fidelity(str, enum.Enum):
    """Part of an operator that a snapshot holds.

    ``FULL``: master weights and optimizer state (12 B/param for fp32 Adam). ``COMPUTE``: what forward and backward read
    (2 B/param in bf16); only MoEvement's windows use it. ``GRADIENT``: what the optimizer consumed in the update that
    made the step; only logs of gradients use it.
    """

    FULL = "full"
    COMPUTE = "compute"
    GRADIENT = "gradient"


class Tier(str, enum.Enum):
    """Destination of a snapshot: this node's memory, a peer's memory, or durable storage."""

    HOST = "host"
    PEER = "peer"
    STORAGE = "storage"


@dataclass(frozen=True)
class PlanItem:
    """One operator of a plan.

    Attributes:
        operator: Its id.
        fidelity: How much of it is saved.
        tier: Where it ends.
    """

    operator: str
    fidelity: Fidelity = Fidelity.FULL
    tier: Tier = Tier.STORAGE


@dataclass(frozen=True)
class SnapshotPlan:
    """The decision of a policy for one step; equal on every rank.

    An empty plan means: no checkpoint at this step. Items of the HOST tier are kept in host memory beside those of the
    STORAGE tier, which pass through it anyway.

    Attributes:
        step: Optimizer steps done.
        items: What is saved.
        wait: The engine finishes the checkpoint before training continues (the synchronous baseline).
        k: Experts per layer that the policy sends to storage at present, where it counts them so (MoC).
        plt_budget: Portion of lost tokens that the policy keeps to, if it does.
        halt: Why training should end in good order after this step, if it should.
        window: The sparse window that this step belongs to (MoEvement). Such a step's snapshot is no checkpoint by
            itself: that exists when the window's last one is committed.
        slot: The step's place in ``window``.
        sends_host_only: Items of the HOST tier go to peers, too, where there are any; what goes to storage always does.
        together: Operators that are saved in full here and will be anchored together in the gradient log that begins
            with this step, one group after the other. A forecast: it only spares memory.
    """

    step: int
    items: tuple[PlanItem, ...] = field(default_factory=tuple)
    wait: bool = False
    k: int | None = None
    plt_budget: float | None = None
    halt: str | None = None
    window: Window | None = None
    slot: int = 0
    sends_host_only: bool = True
    together: tuple[tuple[str, ...], ...] = ()

    def __getattr__(self, name: str) -> Any:
        """``items``, where the plan was made without them: callers rarely need thousands of items."""
        if name != "items" or "_operators" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        full = self._operators
        items = _in_full(full.get(Tier.STORAGE, ())) + tuple(
            PlanItem(op, tier=tier) for tier in (Tier.HOST, Tier.PEER) for op in full.get(tier, ())
        )
        vars(self)[name] = items + _for_compute(self.compute_only) + _as_gradients(self.gradients)
        return self.items

    def __bool__(self) -> bool:
        if "items" in vars(self):
            return bool(self.items)
        return any(self._operators.values()) or bool(self.compute_only or self.gradients)

    def operators(self, tier: Tier = Tier.STORAGE) -> tuple[str, ...]:
        """Returns the operators that go to ``tier`` at full fidelity."""
        return self._operators.get(tier, ())

    @cached_property
    def _operators(self) -> Mapping[Tier, tuple[str, ...]]:
        full = [item for item in self.items if item.fidelity is Fidelity.FULL]
        return {tier: tuple(item.operator for item in full if item.tier is tier) for tier in Tier}

    @cached_property
    def compute_only(self) -> tuple[str, ...]:
        """Operators that go to storage at compute fidelity."""
        return tuple(item.operator for item in self.items if item.fidelity is Fidelity.COMPUTE)

    @cached_property
    def gradients(self) -> tuple[str, ...]:
        """Operators of which only the consumed gradients are saved."""
        return tuple(item.operator for item in self.items if item.fidelity is Fidelity.GRADIENT)


def save_nothing(step: int) -> SnapshotPlan:
    """Returns the empty plan: no checkpoint at this step."""
    return SnapshotPlan(step)


def save_full(
    step: int,
    operators: tuple[str, ...],
    *,
    host_only: tuple[str, ...] = (),
    wait: bool = False,
    k: int | None = None,
    plt_budget: float | None = None,
    sends_host_only: bool = True,
    together: tuple[tuple[str, ...], ...] = (),
) -> SnapshotPlan:
    """Returns a plan that saves operators at full fidelity.

    Args:
        step: As of the context.
        operators: Ids of what goes to storage.
        host_only: Ids of what is kept in host memory besides.
        wait: See ``SnapshotPlan``.
        k: See ``SnapshotPlan``.
        plt_budget: See ``SnapshotPlan``.
        sends_host_only: See ``SnapshotPlan``.
        together: See ``SnapshotPlan``.
    """
    plan = SnapshotPlan(step, (), wait, k, plt_budget, sends_host_only=sends_host_only, together=together)
    return _answering(plan, {Tier.STORAGE: operators, Tier.HOST: host_only}, ())


def save_slot(
    step: int, anchored: tuple[str, ...], compute_only: tuple[str, ...], window: Window, slot: int
) -> SnapshotPlan:
    """A plan that sends ``anchored`` to storage at full fidelity and ``compute_only`` at compute fidelity."""
    plan = SnapshotPlan(step, window=window, slot=slot)
    return _answering(plan, {Tier.STORAGE: anchored}, compute_only)


def save_logged(
    step: int,
    anchored: tuple[str, ...],
    gradients: tuple[str, ...],
    *,
    host_only: tuple[str, ...] = (),
    k: int | None = None,
    sends_host_only: bool = True,
) -> SnapshotPlan:
    """Returns a plan that saves ``anchored`` at full fidelity, and of ``gradients`` what the step's update consumed.

    Args:
        step: As of the context.
        anchored: Ids.
        gradients: Ids of others, each of which was saved at the step before.
        host_only: Ids of what is kept in this node's memory in full besides.
        k: See ``SnapshotPlan``.
        sends_host_only: See ``SnapshotPlan``.
    """
    plan = SnapshotPlan(step, k=k, sends_host_only=sends_host_only)
    return _answering(plan, {Tier.STORAGE: anchored, Tier.HOST: host_only}, (), gradients)


def _answering(
    plan: SnapshotPlan,
    full: Mapping[Tier, tuple[str, ...]],
    compute_only: tuple[str, ...],
    gradients: tuple[str, ...] = (),
) -> SnapshotPlan:
    """The plan of what it is known to answer: its items are made when somebody asks for them."""
    del plan.__dict__["items"]
    plan.__dict__.update(_operators=full, compute_only=compute_only, gradients=gradients)
    return plan


class _Items(dict[str, PlanItem]):
    """Operator -> its item, which is made on first use."""

    def __init__(self, fidelity: Fidelity) -> None:
        self._fidelity = fidelity

    def __missing__(self, operator: str) -> PlanItem:
        if len(self) >= _MOST_ITEMS:  # of models that came and went
            self.clear()
        item = self[operator] = PlanItem(operator, self._fidelity)
        return item


_MOST_ITEMS = 1 << 16
_ITEMS = {fidelity: _Items(fidelity) for fidelity in Fidelity}


def _items_of(fidelity: Fidelity, operators: tuple[str, ...]) -> tuple[PlanItem, ...]:
    """Of the STORAGE tier. Items are values, and the same ones at most steps: they are made once."""
    return tuple(map(_ITEMS[fidelity].__getitem__, operators))


_in_full = Remembered(partial(_items_of, Fidelity.FULL))
_for_compute = Remembered(partial(_items_of, Fidelity.COMPUTE))
_as_gradients = Remembered(partial(_items_of, Fidelity.GRADIENT))
"""Dense checkpoints name every operator of the model, each time; and slots of windows are of the same tuples."""
