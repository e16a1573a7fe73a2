"""What an iteration with a checkpoint costs: bytes and stalls of dense, partial (MoC) and windowed (MoEvement) ones.

Each contestant gets fits of one model, in turns; iterations without checkpoints come before and after those with, in
the same fit, and are what it is compared with.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning.pytorch as pl

from benchmarks.acting import wait_until_written
from benchmarks.contestants import Gate
from benchmarks.failing import Failures
from benchmarks.windowed import batches, trainer
from benchmarks.workload import Workload
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.window import slot_bytes
from moe_ckpt.policies.base import Policy, PolicyContext
from moe_ckpt.policies.dense import Dense
from moe_ckpt.policies.moc import MoC
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.policies.wrapper import Wrapper
from moe_ckpt.run.events import StepRecord


@dataclass(frozen=True)
class Gated(Wrapper):
    """Any policy, silent while the gate is closed. Notes what the formula says that a slot should weigh.

    expected: step -> bytes, for the steps of sparse windows.
    """

    gate: Gate
    expected: dict[int, int] = field(default_factory=dict)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        if not self.gate.is_open:
            return SnapshotPlan(context.run.step)
        plan = self.policy.plan(context)
        if plan.window is not None:
            self.expected[context.run.step] = slot_bytes(plan.window.slots, context.model.sizes)[plan.slot]
        return plan


def contestants(window: int) -> dict[str, Policy | None]:
    """Name -> policy; None checkpoints nothing. All others checkpoint at every iteration."""
    return {
        "no checkpoint": None,
        "dense": Dense(),
        "MoC, K=1": MoC(k=1),
        f"MoEvement, W={window}": MoEvement(window=window),
        "MoEvement, sized by itself": MoEvement(),
    }


@dataclass(frozen=True)
class Shape:
    """Iterations of one fit; ``settle`` and ``warm`` are not counted.

    In the warm ones buffers and files come into being, and a dense checkpoint is made and written, without which there
    are no windows.
    """

    reference: int = 3
    saved: int = 6
    settle: int = 1
    warm: int = 6

    @property
    def phases(self) -> list[str]:
        off = ["settle"] * self.settle + ["reference"] * self.reference
        return [*off, *["warm"] * self.warm, *["saved"] * self.saved, *off]


@dataclass
class Fit:
    """One fit of one contestant. Seconds and bytes; lists are per counted iteration.

    reference, saved: wall time of iterations without and with a checkpoint.
    stalls, nbytes, frozen: of the latter's ``StepRecord``. expected: what the formula of sparse windows says.
    windows: W of the window that the iteration belongs to, 0 for none.
    side: bytes of a checkpoint's files beyond its tensors: manifest, headers, and the state of loops, random numbers,
        loaders; of the largest that was still there at the end (of old ones parts are deleted).
    """

    contestant: str
    reference: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)
    expected: list[int | None] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    side: int = 0

    @property
    def ratio(self) -> float:
        """Of an iteration with a checkpoint to one without."""
        return mean(self.saved) / mean(self.reference)

    @property
    def stall_share(self) -> float:
        """Portion of the time of iterations that training waited for checkpointing."""
        return sum(self.stalls) / sum(self.saved)


class _Watcher(pl.Callback):
    """Opens and closes the gate; takes the time of whole iterations and what the checkpoint callback says of them."""

    def __init__(
        self, fit: Fit, shape: Shape, gate: Gate, ours: MoECheckpoint | None, expected: dict[int, int]
    ) -> None:
        self._fit, self._phases, self._gate, self._ours, self._expected = fit, shape.phases, gate, ours, expected
        self._at, self._began = -1, 0.0
        self.records: dict[int, StepRecord] = {}

    def on_train_batch_start(self, *_: Any) -> None:
        self._ended()
        self._at += 1
        saving = self._phases[self._at] in ("warm", "saved")
        if self._gate.is_open and not saving:
            drain(self._ours)
        self._gate.is_open = saving
        self._began = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self._ended()
        self._gate.is_open = False

    def _ended(self) -> None:
        took, fit = time.perf_counter() - self._began, self._fit
        phase = self._phases[self._at] if self._at >= 0 else "settle"
        record = None if self._ours is None else self._ours.last
        if phase == "reference":
            fit.reference.append(took)
        if record is not None and record.begun:
            self.records[record.step] = record
        if phase != "saved":
            return
        fit.saved.append(took)
        if record is not None:
            fit.stalls.append(record.stall_secs)
            fit.nbytes.append(record.nbytes)
            fit.frozen.append(record.frozen_nbytes)
            fit.windows.append(record.window)
            fit.expected.append(self._expected.get(record.step) if record.begun else None)


def drain(ours: MoECheckpoint | None) -> None:
    """Return when everything begun is written."""
    if ours is not None and ours._fit is not None:
        wait_until_written(ours._fit.session)


def run_once(name: str, policy: Policy | None, module: Workload, batch: int, shape: Shape, directory: Path) -> Fit:
    """One fit in a fresh directory, which is removed afterwards."""
    fit, gate, ours, expected = Fit(name), Gate(), None, {}
    if policy is not None:
        gated = Gated(policy, gate)
        expected = gated.expected
        ours = MoECheckpoint(gated, directory, save_last=False, when_busy="wait")
    watcher = _Watcher(fit, shape, gate, ours, expected)
    directory.mkdir(parents=True)
    try:
        lightning_trainer = trainer(len(shape.phases), directory, watcher, *([] if ours is None else [ours]))
        lightning_trainer.fit(module, batches(module.config, batch))
        fit.side = _side_bytes(directory, watcher.records)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return fit


def _side_bytes(directory: Path, records: dict[int, StepRecord]) -> int:
    results = []
    for entry in directory.glob("step_*"):
        record = records.get(int(entry.name.split("_")[1].split(".")[0]))
        if record is not None:
            results.append(sum(f.stat().st_size for f in entry.rglob("*") if f.is_file()) - record.nbytes)
    return max(results, default=0)


def measure(
    module: Workload,
    window: int,
    batch: int,
    shape: Shape,
    rounds: int,
    home: Path,
    tell: Callable[[str], None],
    failed: Failures,
) -> list[Fit]:
    """``rounds`` times all contestants, each round beginning with another one.

    One that raises is named in ``failed`` and gets no further turn.
    """
    field_of = list(contestants(window).items())
    tell("warm-up")
    run_once("warm-up", None, module, batch, Shape(1, 1, 0, 0), home / "warm-up")
    fits = []
    for number in range(rounds):
        first = number * len(field_of) // rounds
        for name, policy in [*field_of[first:], *field_of[:first]]:
            if name in failed:
                continue
            tell(f"cost, round {number + 1} of {rounds}: {name}")
            with failed.of(name):
                fits.append(run_once(name, policy, module, batch, shape, home / f"cost_{number}_{name}"))
    return fits


def rows(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Per contestant, over its fits: medians over rounds; ``ratios`` are those of each round."""
    table_rows = []
    for name in dict.fromkeys(fit.contestant for fit in fits):
        selected = [fit for fit in fits if fit.contestant == name]
        nbytes = [n for fit in selected for n in fit.nbytes]
        pairs = [(n, e) for fit in selected for n, e in zip(fit.nbytes, fit.expected, strict=True) if e]
        windows = [w for fit in selected for w in fit.windows if w]
        table_rows.append(
            {
                "name": name,
                "bytes": mean(nbytes) if nbytes else 0,
                "heaviest_bytes": max(nbytes, default=0),
                "compute_bytes": mean(n for fit in selected for n in fit.frozen) if nbytes else 0,
                "side_bytes": median(fit.side for fit in selected),
                "off_formula": max((abs(n / e - 1) for n, e in pairs), default=None),
                "window": [min(windows), max(windows)] if windows else None,
                "iteration_ms": median(median(fit.reference) for fit in selected) * 1e3,
                "stall_ms": median(mean(fit.stalls) for fit in selected) * 1e3 if nbytes else 0.0,
                "stall_share": median(fit.stall_share for fit in selected) if nbytes else 0.0,
                "ratio": median(fit.ratio for fit in selected),
                "ratios": [fit.ratio for fit in selected],
            }
        )
    return table_rows
