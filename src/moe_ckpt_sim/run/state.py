"""The state of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import Window
from moe_ckpt_sim.run.track import Track


@dataclass
class BookedSecs:
    """Where time went that trained nothing, as ``scenario.Spent``."""

    stall: float = 0.0
    lost: float = 0.0
    down: float = 0.0
    idle: float = 0.0
    retrieve: float = 0.0
    replay: float = 0.0


@dataclass
class SavedBytes:
    """What snapshots weighed.

    Attributes:
        newest: Of the newest snapshot, all ranks.
        rank, total: Of all snapshots that began, copied by the rank that had most, and stored by all.
        sent: What of the former left that rank, one copy of it.
        heaviest: Of one snapshot, on one rank.
    """

    newest: int = 0
    rank: int = 0
    total: int = 0
    sent: int = 0
    heaviest: int = 0


@dataclass
class LostMemory:
    """What nodes' memory lacks.

    Attributes:
        nodes: Failed since something last became durable: their own memory has nothing before.
        holders: Failed since peers last got something: what they held for others is not there again before.
        is_empty: Everything came from storage, or from nowhere, since something last became durable.
        in_update: The iteration was cut off in the optimizer's update: those that end it seal the next step.
    """

    nodes: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)
    is_empty: bool = False
    in_update: bool = False


@dataclass
class SimulatedState:
    """Where a simulated run is. Seconds since its start, all on the clock of ``sim.clock``.

    Attributes:
        step: Optimizer steps done, less what failures undid.
        counts: ``[L, E]`` tokens routed by one of them.
        halt: Why the policy asked training to end in good order.
        round_steps: W of a log of gradients.
    """

    track: Track
    counts: Counts
    now: float = 0.0
    step: int = 0
    plans: int = 0
    reorders: int = 0
    interval: int | None = None
    k: int | None = None
    window: Window | None = None
    round_steps: int | None = None
    failures: int = 0
    halt: str | None = None
    secs: BookedSecs = field(default_factory=BookedSecs)
    saved: SavedBytes = field(default_factory=SavedBytes)
    lost_memory: LostMemory = field(default_factory=LostMemory)
