"""The engine's settings: limits on memory and waiting."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from moe_ckpt.core.quantities import parse_bytes, parse_secs
from moe_ckpt.core.retention import RetentionPolicy
from moe_ckpt.errors import ConfigError
from moe_ckpt.memory.options import Memory

_LONGEST_WAIT_SECS = 30 * 86_400.0
"""A month: longer than any peer is worth waiting for, and short enough for every clock that it is handed to."""


@dataclass(frozen=True)
class Settings:
    """Limits of the engine; every field has a safe default.

    Attributes:
        retention: Which committed checkpoints stay on storage.
        host_memory_bytes: Budget of this rank's snapshots in memory, as a number or as text such as "8GB"; None takes
            half of what is free. Three snapshots avoid stalls. If it does not hold ``max_in_flight`` + 1 of them, the
            newest committed one in private memory is dropped when room is needed.
        budget_fraction: Portion of the time between checkpoints that saving may take, above 0 and at most 1, for
            policies that compute what fits (MoEtion, MoEvement, GradientLog).
        when_busy: "skip" drops a checkpoint for which no buffer is free; "wait" stalls training until one is.
        max_in_flight: Snapshots copied or being written at the same time.
        timeout_secs: Longest wait for a peer, or for the last writes at the end of training; a number, or text such as
            "10min".
        pinned: Use page-locked buffers, for copies from a GPU.
        local_ranks: Ranks that share this host's memory.
        memory: Keep snapshots in files on a tmpfs, which outlive the process; None: in private memory.

    Raises:
        ConfigError: An invalid value; the message names it.
    """

    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    host_memory_bytes: int | None = None
    budget_fraction: float = 1.0
    when_busy: str = "skip"
    max_in_flight: int = 2
    timeout_secs: float = 600.0
    pinned: bool = False
    local_ranks: int = 1
    memory: Memory | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.retention, RetentionPolicy):
            raise ConfigError(
                f"retention={self.retention!r}: give a RetentionPolicy, such as moe_ckpt.RetentionPolicy(keep_last=3)"
            )
        if self.memory is not None and not isinstance(self.memory, Memory):
            raise ConfigError(f"memory={self.memory!r}: give moe_ckpt.Memory(), or None for private memory")
        require_choice("when_busy", self.when_busy, ("skip", "wait"))
        if self.host_memory_bytes is not None:
            self._set("host_memory_bytes", parse_bytes(self.host_memory_bytes, "host_memory_bytes"))
        self._set("timeout_secs", parse_secs(self.timeout_secs, "timeout_secs", _LONGEST_WAIT_SECS))
        require_fraction("budget_fraction", self.budget_fraction)
        for name in ("max_in_flight", "local_ranks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: must be a whole number greater than 0")

    def _set(self, name: str, value: Any) -> None:
        """Replaces a field that was given as text or as a path object by the number or text that it stands for."""
        object.__setattr__(self, name, value)


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ``ConfigError`` unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name}={value!r}: choose from {', '.join(map(repr, choices))}")


def require_fraction(name: str, value: object) -> None:
    """Raises ``ConfigError`` unless ``value`` is a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{name}={value!r}: must be a number above 0 and at most 1, the portion of time to use")


def require_path(name: str, value: object) -> str:
    """Returns a path or URL as text.

    Raises:
        ConfigError: It is empty, holds a NUL, or is no path at all.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"{name}={value!r}: must be a path, as text or pathlib.Path")
    return text
