"""What each policy costs per iteration: the first iterations, and those after everything is warm; peers beside."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import moe_ckpt
from benchmarks.gpu import peers
from benchmarks.gpu.training import Clock, Saver, Training
from moe_ckpt.policies import CheckFreq, Dense, GradientLog, MoC, MoEtion, MoEvement
from moe_ckpt.policies.base import Policy

POLICIES: dict[str, Policy] = {
    "MoC(k=1)": MoC(k=1),
    "MoEvement()": MoEvement(),
    "GradientLog()": GradientLog(),
    "Dense(every_n_steps=2)": Dense(every_n_steps=2),
    "Dense()": Dense(),
    "MoEtion()": MoEtion(),
    "CheckFreq()": CheckFreq(),
}


@dataclass
class Cost:
    """The cost of one way to checkpoint, in iterations of one training.

    Attributes:
        name: Of it.
        reference_ms: Median of the iterations without checkpoints before and after.
        first_ms, warm_ms: Each iteration: the first ones, and those after.
        hooks_ms: What the training thread spent in hooks, per warm iteration.
        begun, left_out: Checkpoints of the warm iterations, and those that were due and left out.
        behind_steps: Steps between the newest checkpoint in memory and the newest step, at the end.
        problem: Why it could not be measured.
    """

    name: str
    reference_ms: float = 0.0
    first_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    hooks_ms: float = 0.0
    begun: int = 0
    left_out: int = 0
    behind_steps: int | None = None
    problem: str = ""

    @property
    def inflation(self) -> float:
        """How many times longer the mean warm iteration is than one without checkpoints."""
        return statistics.fmean(self.warm_ms) / self.reference_ms if self.warm_ms else 0.0

    @property
    def worst_first(self) -> float:
        """How many times longer the longest of the first iterations is; the very first has to open the store."""
        return max(self.first_ms, default=0.0) / self.reference_ms if self.reference_ms else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data, with the ratios."""
        return {**asdict(self), "inflation": self.inflation, "worst_first": self.worst_first}


@contextlib.contextmanager
def ours(training: Training, policy: Policy, directory: Path) -> Iterator[Saver]:
    """Attaches a policy with checkpoints in memory."""
    memory = moe_ckpt.Memory(directory=directory, storage_every="1h", survivor_secs=0)
    options: dict[str, Any] = {"resume": "never", "save_last": False, "memory": memory}
    ckpt = moe_ckpt.attach(training.model, training.optimizer, policy=policy, dirpath=directory / "store", **options)
    try:
        ckpt.resume()
        steps = 0

        def after_step(number: int) -> dict[str, Any]:
            nonlocal steps
            steps += 1
            record = ckpt.after_step(steps)
            behind = None if record.memory_step is None else steps - record.memory_step
            return {
                "hooks_secs": record.stall_secs,
                "begun": record.begun,
                "left_out": record.skipped,
                "behind": behind,
            }

        yield after_step
    finally:
        ckpt.close(10.0)


def measure(
    training: Training, directory: Path, until: float, counts: tuple[int, int], say: Callable[[str], None]
) -> list[Cost]:
    """Measures each policy and peer in turn, between iterations without checkpoints.

    Args:
        training: Continues through all of them.
        directory: On the tmpfs that holds checkpoints in memory.
        until: ``time.monotonic()`` after which no other one begins.
        counts: First and warm iterations of each.
        say: Shows progress.
    """
    contestants: dict[str, Callable[[Path], contextlib.AbstractContextManager[Saver]]] = {
        **{name: partial(ours, training, policy) for name, policy in POLICIES.items()},
        **{name: partial(peer, training) for name, peer in peers.PEERS.items()},
    }
    costs = []
    step, (first, warm) = 0, counts
    _iterate(training, step, 5, lambda number: {})  # the device is warm
    step += 5
    before = _iterate(training, step, warm, lambda number: {})[0]
    step += warm
    for number, (name, contestant) in enumerate(contestants.items()):
        if time.monotonic() > until:
            costs.append(Cost(name, problem="no time was left"))
            continue
        cost = Cost(name)
        path = directory / f"contestant_{number}"
        path.mkdir()
        try:
            with contestant(path) as saver:
                cost.first_ms, _ = _iterate(training, step, first, saver)
                cost.warm_ms, entries = _iterate(training, step + first, warm, saver)
        except Exception as error:  # of any kind: peers are other people's code
            cost.problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            entries = []
        step += first + warm
        after = _iterate(training, step, max(3, warm // 2), lambda number: {})[0]
        step += max(3, warm // 2)
        cost.reference_ms = statistics.median([*before, *after])
        before = after
        if entries:
            cost.hooks_ms = 1e3 * statistics.fmean(one.get("hooks_secs", 0.0) for one in entries)
            cost.begun, cost.left_out = (sum(bool(one.get(key)) for one in entries) for key in ("begun", "left_out"))
            cost.behind_steps = entries[-1].get("behind")
        costs.append(cost)
        say(f"{name}: {cost.problem or f'{cost.inflation:.3f} times an iteration of {cost.reference_ms:.1f} ms'}")
    return costs


def _iterate(training: Training, step: int, count: int, saver: Saver) -> tuple[list[float], list[dict[str, Any]]]:
    """Milliseconds of each iteration, and what the saver told of it."""
    clock, results = Clock(training.device), []
    for number in range(step + 1, step + count + 1):
        clock.mark()
        training.step(number)
        results.append(saver(number))
    clock.mark()
    return clock.milliseconds(), results
