"""The state of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import Window
from moe_ckpt_sim.run.track import Track


@dataclass
class BookedSecs:
    """Time that did not train, by the parts of ``scenario.Spent``."""

    stall: float = 0.0
    lost: float = 0.0
    down: float = 0.0
    idle: float = 0.0
    retrieve: float = 0.0
    replay: float = 0.0


@dataclass
class SavedBytes:
    """Bytes of snapshots.

    Attributes:
        newest: Bytes of the newest snapshot, all ranks.
        rank, total: Bytes of all snapshots that began, copied by the rank that had most, and stored by all ranks.
        sent: Bytes of ``rank`` that left that rank, for one copy.
        heaviest: Most bytes of one snapshot on one rank.
    """

    newest: int = 0
    rank: int = 0
    total: int = 0
    sent: int = 0
    heaviest: int = 0


@dataclass
class LostMemory:
    """Memory that failures have emptied.

    Attributes:
        nodes: Nodes that failed since a checkpoint last became durable; their own memory has none.
        holders: Nodes that failed since peers last got a checkpoint; they hold none for others.
        is_empty: No memory has a checkpoint: none became durable since the run loaded from storage or began anew.
        in_update: The iteration was cut off in the optimizer's update: ranks that complete it seal the next step.
    """

    nodes: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)
    is_empty: bool = False
    in_update: bool = False


@dataclass
class SimulatedState:
    """The state of a simulated run. Times are seconds since its start, on the clock of ``cluster.clock``.

    Attributes:
        step: Optimizer steps done, less those that failures undid.
        counts: ``[L, E]`` tokens that one step routes.
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
    secs: BookedSecs = field(default_factory=BookedSecs)
    saved: SavedBytes = field(default_factory=SavedBytes)
    lost_memory: LostMemory = field(default_factory=LostMemory)
