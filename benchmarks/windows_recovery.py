"""What comes after ``kill -9``: iterations computed again, and seconds until the run is where it was.

A chain per contestant: the same program, killed at moments drawn from a seed and started again each time, in processes
forked from a server that has imported torch already. Both contestants are killed after equally many new iterations.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import killed_lives
from benchmarks.failing import Failures
from benchmarks.killed_lives import Life, iteration_secs, lives_of, reached_in, restarts_in


def measure(
    window: int,
    interval: int,
    size: str,
    batch: int,
    kills: int,
    seed: int,
    threads: int,
    home: Path,
    tell: Callable[[str], None],
    failed: Failures,
) -> dict[str, dict[str, Any]]:
    """Both chains: name -> facts of ``facts``; of one that raises, the reason in ``failed``."""
    results = {}
    for name, policy in {
        f"dense every {interval}": ("dense", interval),
        f"MoEvement, W={window}": ("windows", window),
    }.items():
        where = home / policy[0]
        life = Life(policy, str(where), size, batch, threads)
        with failed.of(name):
            where.mkdir(parents=True)
            results[name] = _chain(name, life, interval, kills, seed, tell)
    return results


def _chain(name: str, life: Life, interval: int, kills: int, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """One program, killed ``kills`` times. Raises ``RuntimeError`` when a life ends by itself."""
    rng = random.Random(seed)
    secs = 0.1
    for number in range(kills + 1):
        tell(f"recovery, {name}: life {number + 1} of {kills + 1}")
        further, part = interval // 2 + rng.randrange(interval), rng.random()
        # The last life need only come back to where the one before it was.
        step = reached_in(life.log) + (1 if number == kills else further)
        killed_lives.killed_at(life, step, secs * part)
        secs = iteration_secs(lives_of(life.log))
    return facts(life.log)


def facts(log: str) -> dict[str, Any]:
    """Returns what each restart cost, and means."""
    lives = lives_of(log)
    restarts = restarts_in(lives)
    again = [restart.recomputed for restart in restarts]
    return {
        "restarts": [asdict(restart) for restart in restarts],
        "recomputed_mean": mean(again),
        "recomputed_max": max(again),
        "secs_mean": mean(restart.secs for restart in restarts),
        "secs_max": max(restart.secs for restart in restarts),
        "loading_secs": median(restart.loading_secs for restart in restarts),
        "iteration_ms": iteration_secs(lives) * 1e3,
    }
