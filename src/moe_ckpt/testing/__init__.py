"""Tools to test your own runs with: storage that fails, and processes that die, where you say."""

from __future__ import annotations

from moe_ckpt.testing.faults import (
    PHASES,
    FaultyStorage,
    Kill,
    KillHook,
    KillSchedule,
    crash_at,
    kill_process,
    lose_node,
    watch_phases,
)

__all__ = [
    "PHASES",
    "FaultyStorage",
    "Kill",
    "KillHook",
    "KillSchedule",
    "crash_at",
    "kill_process",
    "lose_node",
    "watch_phases",
]
