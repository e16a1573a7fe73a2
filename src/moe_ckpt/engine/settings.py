"""How the engine may use the machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_ckpt.core.retention import RetentionPolicy
from moe_ckpt.core.sharding import SHARDINGS
from moe_ckpt.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """Limits and habits of the engine; every field has a safe default.

    retention: which committed checkpoints stay on storage.
    host_memory_bytes: budget of this rank's snapshot buffers; None takes half of what is free. Where it does not
        hold ``max_in_flight`` + 1 of them, the newest committed one is given up when room is needed.
    when_busy: "skip" drops a checkpoint for which no buffer is free, "wait" stalls training for it.
    max_in_flight: snapshots copied or being written at the same time.
    timeout_secs: longest wait for a peer, or for the last writes at the end of training.
    max_failures: checkpoints that may fail in a row before training is stopped.
    pinned: page-locked buffers, for copies from a GPU.
    local_ranks: ranks that share this host's memory.
    sharding: how the ranks divide the writing of what all of them hold, experts aside: "none", "equal" or
        "adaptive", see ``core.sharding``.
    profile: file that rank 0 keeps the run's profile in, for simulator and planner; None: none. See docs/profile.md.
    """

    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    host_memory_bytes: int | None = None
    when_busy: str = "skip"
    max_in_flight: int = 2
    timeout_secs: float = 600.0
    max_failures: int = 5
    pinned: bool = False
    local_ranks: int = 1
    sharding: str = "adaptive"
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.when_busy not in ("skip", "wait"):
            raise ConfigError(f"when_busy={self.when_busy!r}: choose 'skip' or 'wait'")
        if self.sharding not in SHARDINGS:
            raise ConfigError(f"sharding={self.sharding!r}: choose from {', '.join(map(repr, SHARDINGS))}")
        if self.profile is not None and (not self.profile or "://" in self.profile):
            raise ConfigError(f"profile={self.profile!r}: give the path of a local file, or None to keep no profile")
        for name in ("host_memory_bytes", "max_in_flight", "timeout_secs", "max_failures", "local_ranks"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r}: must be greater than 0")
