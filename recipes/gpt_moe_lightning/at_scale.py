"""The demo's policies where they matter: a large model on many GPUs, by the library's simulator.

The demo's model is so small that any policy will do. The simulator drives the same policies on a model and a cluster of
the MoEvement paper, in a few seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WHERE = "DeepSeek-MoE, 16.4 B parameters, on 96 GPUs, a failure every 10 minutes, 12 hours"
ARGUMENTS = ("setup=moevement_deepseek", "policy=dense,moc_peers,moevement_peers", "failures.mtbf_secs=600")
TITLES = {
    "dense": "Dense, on storage",
    "moc_peers": "MoC, in the memory of two peers",
    "moevement_peers": "MoEvement, in the memory of two peers",
}
WHY = (
    "Which policy is best cannot be seen at this size. The state is so small that Dense writes all of it in passing, "
    "and what a kill throws away is computed again in a moment: here Dense is the cheapest. With the model and the "
    "cluster grow the time to write everything, hence the distance between full checkpoints, hence the work that each "
    "failure throws away; and failures come more often. What saves a part at a time can stay in memory, its own "
    "and that of peers (Memory(replicas=2)). "
)
PLAN = "For your own model and cluster: moe-ckpt plan."
COLUMNS = ("simulated", "a checkpoint", "time that trained", "thrown away by failures", "lost tokens (PLT)")


@dataclass(frozen=True)
class AtScale:
    """One policy. useful, redone: shares of the time that went into the final state (ETTR), and into work that failures
    threw away or that was replayed."""

    title: str
    saves: str
    useful: float
    redone: float
    plt: float

    def cells(self) -> tuple[str, ...]:
        return self.title, self.saves, f"{self.useful:.1%}", f"{self.redone:.1%}", f"{self.plt:.2%}"


def command() -> list[str]:
    return [sys.executable, "-m", "moe_ckpt.cli.main", "simulate", *ARGUMENTS]


def simulate() -> list[AtScale]:
    """Raises ``RuntimeError`` with the simulator's last words if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command(), "--json", "--quiet"], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"moe-ckpt simulate ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return read(json.loads(done.stdout))


def read(results: dict[str, Any]) -> list[AtScale]:
    """From what ``moe-ckpt simulate --json`` writes."""
    rows = []
    for run in results["runs"]:
        outcome = run["outcomes"][0]
        spent = outcome["spent"]
        redone = (spent["lost"] + spent["replay"]) / sum(spent.values())
        title = TITLES[outcome["system"]]
        rows.append(AtScale(title, _saves(outcome), run["ettr"]["mean"], redone, outcome["plt"]))
    return rows


def _saves(outcome: dict[str, Any]) -> str:
    if outcome["window"]:
        return f"in parts, over {outcome['window']} iterations"
    often = "every iteration" if outcome["interval"] == 1 else f"every {outcome['interval']} iterations"
    return f"{often}, {outcome['k']} experts per layer" if outcome["k"] else often


def sentence(rows: Sequence[AtScale]) -> str:
    """What the table is there for."""
    return f"{WHY}The simulator, with the same policies on {WHERE}" + (":" if rows else " could not be run.")
