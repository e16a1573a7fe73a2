"""Frozen plans: what one checkpoint saves, at which fidelity, and where it ends."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_ckpt.core.window import Window


class Tier(str, enum.Enum):
    """Destination of a snapshot: this node's memory, a peer's memory, or durable storage."""

    HOST = "host"
    PEER = "peer"
    STORAGE = "storage"


@dataclass(frozen=True)
class SnapshotPlan:
    """The decision of a policy for one step; equal on every rank.

    An empty plan means: no checkpoint at this step. Operators that go to storage pass through host memory anyway.

    Attributes:
        step: Optimizer steps done.
        full: Operators that go to storage with master weights and optimizer state (12 B/param for fp32 Adam).
        memory_only: Others that are kept in host memory in full, beside those.
        compute: Operators of which storage gets what forward and backward read (2 B/param in bf16), in a window.
        gradients: Operators of which only what the step's update consumed is saved, in a gradient log.
        wait: The engine finishes the checkpoint before training continues (the synchronous baseline).
        k: Experts per layer that the policy sends to storage at present, where it counts them so (MoC).
        plt_budget: Portion of lost tokens that the policy keeps to, if it does.
        halt: Why training should end in good order after this step, if it should.
        window: The sparse window that this step belongs to (MoEvement). Such a step's snapshot is no checkpoint by
            itself: that exists when the window's last one is committed.
        slot: The step's place in ``window``.
        sends_memory_only: What is ``memory_only`` goes to peers, too, where there are any; what goes to storage always
            does.
        together: Operators that are saved in full here and will be anchored together in the gradient log that begins
            with this step, one group after the other. A forecast: it only spares memory.
    """

    step: int
    full: tuple[str, ...] = ()
    memory_only: tuple[str, ...] = ()
    compute: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    wait: bool = False
    k: int | None = None
    plt_budget: float | None = None
    halt: str | None = None
    window: Window | None = None
    slot: int = 0
    sends_memory_only: bool = True
    together: tuple[tuple[str, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.full or self.memory_only or self.compute or self.gradients)
