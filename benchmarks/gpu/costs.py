"""What each policy costs per iteration: the first iterations, and those after everything is warm; peers beside."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import moe_ckpt
from benchmarks.gpu import peers
from benchmarks.gpu.training import AfterStep, Clock, Training
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

_SETTLED, _SETTLE_SECS = 5, 12.0
"""Iterations in a row that leave no checkpoint out; what leaves some out for ever is waited for so long."""
_SEAL_SECS = 30.0


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
        sealed_secs: From the time when everything was copied, at the end, until it was sealed in memory; None of peers.
        settling: Iterations between the first and the warm ones, in which host memory was still being made.
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
    sealed_secs: float | None = None
    settling: int = 0
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


@dataclass(frozen=True)
class Saver:
    """What is called after each step, as peers are; and what waits until all is sealed, and says whether it is."""

    after_step: AfterStep
    sealed: Callable[[], bool]

    def __call__(self, number: int) -> dict[str, Any]:
        return self.after_step(number)


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

        yield Saver(after_step, lambda: ckpt.session._snapshots.pipeline.first.wait(0, _SEAL_SECS))
    finally:
        ckpt.close(10.0)


def measure(
    training: Training, directory: Path, until: float, counts: tuple[int, int], say: Callable[[Cost], None]
) -> None:
    """Measures each policy and peer in turn, between iterations without checkpoints.

    Args:
        training: Continues through all of them.
        directory: On the tmpfs that holds checkpoints in memory.
        until: ``time.monotonic()`` after which no other one begins.
        counts: First and warm iterations of each.
        say: Takes each cost as soon as it is known.
    """
    contestants: dict[str, Callable[[Path], contextlib.AbstractContextManager[Any]]] = {
        **{name: partial(ours, training, policy) for name, policy in POLICIES.items()},
        **{name: partial(peer, training) for name, peer in peers.PEERS.items()},
    }
    step, (first, warm) = 0, counts
    _iterate(training, step, 5, lambda number: {})  # the device is warm
    step += 5
    before = _iterate(training, step, warm, lambda number: {})[0]
    step += warm
    for number, (name, contestant) in enumerate(contestants.items()):
        if time.monotonic() > until:
            say(Cost(name, problem="no time was left"))
            continue
        cost = Cost(name)
        path = directory / f"contestant_{number}"
        path.mkdir()
        try:
            with contestant(path) as saver:
                cost.first_ms, _ = _iterate(training, step, first, saver)
                cost.settling = _settle(training, step + first, saver)
                step += cost.settling
                cost.warm_ms, entries = _iterate(training, step + first, warm, saver)
                if isinstance(saver, Saver):
                    cost.sealed_secs = _seal(training, saver)
        except Exception as error:  # of any kind: peers are other people's code
            cost.problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            entries = []
        shutil.rmtree(path, ignore_errors=True)
        step += first + warm
        after = _iterate(training, step, max(3, warm // 2), lambda number: {})[0]
        step += max(3, warm // 2)
        cost.reference_ms = statistics.median([*before, *after])
        before = after
        if entries:
            cost.hooks_ms = 1e3 * statistics.fmean(one.get("hooks_secs", 0.0) for one in entries)
            cost.begun, cost.left_out = (sum(bool(one.get(key)) for one in entries) for key in ("begun", "left_out"))
            cost.behind_steps = entries[-1].get("behind")
        say(cost)


def _settle(training: Training, step: int, saver: AfterStep) -> int:
    """Trains until no checkpoint is left out for want of memory, or for some seconds; returns the iterations."""
    until, count, in_row = time.monotonic() + _SETTLE_SECS, 0, 0
    while in_row < _SETTLED and time.monotonic() < until:
        _, [entry] = _iterate(training, step + count, 1, saver)
        in_row = 0 if entry.get("left_out") else in_row + 1
        count += 1
    return count


def _seal(training: Training, saver: Saver) -> float | None:
    """Returns the seconds from the end of the last copy to its seal."""
    if training.device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    return time.perf_counter() - began if saver.sealed() else None


def _iterate(training: Training, step: int, count: int, saver: AfterStep) -> tuple[list[float], list[dict[str, Any]]]:
    """Milliseconds of each iteration, and what the saver told of it."""
    clock, results = Clock(training.device), []
    for number in range(step + 1, step + count + 1):
        clock.mark()
        training.step(number)
        results.append(saver(number))
    clock.mark()
    return clock.milliseconds(), results
