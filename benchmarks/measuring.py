"""Runs the contestants in turn and measures iterations, hooks, bytes and what is left to write."""

from __future__ import annotations

import ctypes
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.contestants import Contestant, Gate, HookClock, Reference
from benchmarks.failing import Failures
from benchmarks.workload import Model, endless_batches


@dataclass(frozen=True)
class Shape:
    """Iterations of one fit: reference, checkpointed, reference again; the first of each are not counted.

    settle: uncounted iterations before each reference part.
    warm: uncounted checkpointed iterations, in which buffers, processes and files come into being.
    """

    reference: int = 3
    saved: int = 5
    settle: int = 1
    warm: int = 3

    @property
    def iterations(self) -> int:
        return 2 * (self.settle + self.reference) + self.warm + self.saved


@dataclass
class Sample:
    """One fit of one contestant. Seconds and bytes; lists are per counted iteration.

    reference, saved: wall time without and with a checkpoint. thread_cpu: processor time of the training
        thread in the latter; other programs on the machine do not enter into it, waiting neither.
    nbytes: size of one checkpoint on storage, the median over those of this fit.
    kept: checkpoints found on storage at the end, and those that retention has deleted; asked: how many were asked for.
    drain: time from the end of the last checkpointed iteration until all is written.
    """

    contestant: str
    reference: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    hooks: list[float] = field(default_factory=list)
    thread_cpu: list[float] = field(default_factory=list)
    reference_thread_cpu: list[float] = field(default_factory=list)
    idle_hooks: list[float] = field(default_factory=list)
    drain: float = 0.0
    nbytes: int = 0
    kept: int = 0
    asked: int = 0

    @property
    def stall(self) -> float:
        """What an iteration takes longer with a checkpoint than without one beside it."""
        return median(self.saved) - median(self.reference)

    @property
    def extra_cpu(self) -> float:
        """What the training thread computes more in an iteration with a checkpoint. Exact only with 1 thread."""
        return median(self.thread_cpu) - median(self.reference_thread_cpu)


class _Conductor(pl.Callback):
    """Opens and closes the gate, and takes the time of whole iterations."""

    def __init__(self, shape: Shape, gate: Gate, contestant: Contestant, clock: HookClock, sample: Sample) -> None:
        self._gate, self._contestant, self._clock, self._sample = gate, contestant, clock, sample
        off = ["settle"] * shape.settle + ["reference"] * shape.reference
        self._plan = off + ["warm"] * shape.warm + ["saved"] * shape.saved + off
        self._at = -1
        self._began = self._cpu_began = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        now = time.perf_counter()
        if self._at >= 0:
            self._book(self._plan[self._at], now - self._began)
        self._at += 1
        saving = self._plan[self._at] in ("warm", "saved")
        if self._gate.is_open and not saving:
            began = time.perf_counter()
            self._contestant.drain()
            self._sample.drain = time.perf_counter() - began
        self._gate.is_open = saving
        self._sample.asked += saving
        self._clock.take()
        self._cpu_began = time.thread_time()
        self._began = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self._book(self._plan[self._at], time.perf_counter() - self._began)
        self._gate.is_open = False

    def _book(self, phase: str, took: float) -> None:
        hooks, cpu = self._clock.take(), time.thread_time() - self._cpu_began
        if phase == "saved":
            self._sample.saved.append(took)
            self._sample.hooks.append(hooks)
            self._sample.thread_cpu.append(cpu)
        elif phase == "reference":
            self._sample.reference.append(took)
            self._sample.idle_hooks.append(hooks)
            self._sample.reference_thread_cpu.append(cpu)


def run_once(contestant: Contestant, module: Model, batch: int, shape: Shape, directory: Path) -> Sample:
    """One fit in a fresh directory, which is removed afterwards."""
    directory.mkdir(parents=True)
    sample = Sample(contestant.name)
    gate = Gate()
    callbacks = contestant.begin(gate, directory)
    conductor = _Conductor(shape, gate, contestant, HookClock(callbacks), sample)
    try:
        trainer = pl.Trainer(
            max_steps=shape.iterations,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[conductor, *callbacks],
            default_root_dir=directory,
            **contestant.trainer_options,
        )
        trainer.fit(module, endless_batches(module.config, batch))
        contestant.end()
        sizes = _checkpoint_sizes(contestant, directory)
        sample.kept = contestant.made(sample.asked, len(sizes))
        sample.nbytes = int(median(sizes)) if sizes else 0
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if contestant.saves and sample.asked and not sample.kept:
        raise RuntimeError(f"none of the {sample.asked} checkpoints that it was asked for is on storage")
    return sample


def _checkpoint_sizes(contestant: Contestant, directory: Path) -> list[int]:
    """Bytes of each entry that is a whole checkpoint: every step is one file or one directory."""
    sizes = []
    for entry in directory.iterdir():
        if entry.name.startswith("step") and contestant.complete(entry):
            files = [entry] if entry.is_file() else [f for f in entry.rglob("*") if f.is_file()]
            sizes.append(sum(f.stat().st_size for f in files))
    return sizes


def memcpy_secs(module: Model, repeats: int = 5) -> float:
    """Median time to ``memmove`` the whole state into warm memory, tensor by tensor, on one core."""
    sources = [t for t in module.state_tensors() if t.numel()]
    targets = [torch.zeros_like(t) for t in sources]
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        times.append(time.perf_counter() - began)
    return median(times[1:])


@dataclass
class Measurements:
    """samples: all fits, in order; memcpy: seconds, once per round; state_nbytes: bytes of the live state.

    failed: those that failed, which got no further turn; what they did before that counts.
    """

    state_nbytes: int = 0
    memcpy: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failed: Failures = field(default_factory=Failures)


def measure(
    measurements: Measurements,
    contestants: Sequence[Contestant],
    module: Model,
    batch: int,
    shape: Shape,
    rounds: int,
    home: Path,
    progress: Callable[[str], None],
    keep: Callable[[], None],
) -> None:
    """``rounds`` times all contestants, each round beginning with another one.

    Fills ``found`` as results come and calls ``keep`` after each, so that nothing is lost when a later one ends the
    process. A contestant that raises is closed and named in ``found.failed``.
    """
    progress("warm-up")
    run_once(Reference(), module, batch, Shape(1, 1, 0, 0), home / "warm-up")
    measurements.state_nbytes = sum(t.nbytes for t in module.state_tensors())
    for number in range(rounds):
        measurements.memcpy.append(memcpy_secs(module))
        first = number * len(contestants) // rounds
        for contestant in [*contestants[first:], *contestants[:first]]:
            if contestant.name in measurements.failed:
                continue
            progress(f"round {number + 1} of {rounds}: {contestant.name}")
            with measurements.failed.of(contestant.name):
                directory = home / f"{number}_{contestants.index(contestant)}"
                measurements.samples.append(run_once(contestant, module, batch, shape, directory))
            if contestant.name in measurements.failed:
                with measurements.failed.of(contestant.name):
                    contestant.close()
            keep()
