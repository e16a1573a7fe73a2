"""Fits of ``step_scale.py``: one model in one process, the policies in turns, times of whole iterations."""

from __future__ import annotations

import functools
import gc
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning.pytorch as pl

from benchmarks.failing import Failures
from benchmarks.step_model import TinyMoE, batches
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.callbacks.fit import Fit
from moe_ckpt.policies import Dense, MoC, MoEtion, MoEvement
from moe_ckpt.policies.base import Policy

WINDOW = 4
_LARGE = 1 << 13
"""Bytes. The C library puts in order what was freed as soon as somebody asks for so much, whoever that is. After an
update of tens of thousands of small tensors that takes 1 to 3 ms, also where no checkpoint is made."""


def policy_of(name: str, experts: int) -> Policy | None:
    """A policy that saves at every step; None for "none"."""
    policies: Mapping[str, Policy | None] = {
        "none": None,
        "moc": MoC(k=1),
        "moetion": MoEtion(experts=max(1, experts // 6)),
        "moevement": MoEvement(window=WINDOW),
        "dense": Dense(),
    }
    return policies[name]


@dataclass(frozen=True)
class Turn:
    """Length of one turn of one policy.

    warm: iterations that are not counted: the first checkpoint is dense, and buffers and plans come into being.
    counted: then so many are; fewer once the turn has taken ``secs``, but at least ``least``. Of all three the next
        multiple of ``WINDOW`` is taken, so that every slot of a window counts alike.
    """

    warm: int = 8
    counted: int = 24
    least: int = 4
    secs: float = 20.0


@dataclass
class Sample:
    """One turn. Lists have one number per counted iteration.

    secs: wall time. cpu: processor seconds of the process, user and system, all threads. thread_cpu: of these, those of
        the training thread. hook_cpu: of these, those in our hooks, so without what a checkpoint makes slower elsewhere
        by using the same caches.
    nbytes: tensor bytes of the checkpoint, on this rank.
    """

    policy: str
    secs: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    thread_cpu: list[float] = field(default_factory=list)
    hook_cpu: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


class Clock:
    """Takes the time of iterations. ``tick`` at the same place of each; True when the turn is over.

    together: given whether this rank's turn is over, whether the turn of all ranks is.
    """

    def __init__(self, turn: Turn, sample: Sample, together: Callable[[bool], bool] = bool) -> None:
        self._turn, self._sample, self._together = turn, sample, together
        self._ticks, self._started = -1, time.monotonic()
        self._last = (0.0, 0.0, 0.0, 0.0)
        self._in_hooks = 0.0

    @contextmanager
    def hook(self) -> Iterator[None]:
        """One of our hooks runs, on the training thread; within another one it is counted with that."""
        bytearray(_LARGE)
        began, before = time.thread_time(), self._in_hooks
        try:
            yield
        finally:
            self._in_hooks = before + time.thread_time() - began

    def tick(self, nbytes: int) -> bool:
        """nbytes: of the checkpoint of the iteration that has just ended."""
        now, sample = self._now(), self._sample
        if self._ticks >= self._turn.warm:
            lists = sample.secs, sample.cpu, sample.thread_cpu, sample.hook_cpu
            for times, end, begin in zip(lists, now, self._last, strict=True):
                times.append(end - begin)
            sample.nbytes.append(nbytes)
        self._ticks += 1
        counted = len(sample.secs)
        if counted and counted % WINDOW == 0:
            late = time.monotonic() - self._started > self._turn.secs and counted >= self._turn.least
            if self._together(late or counted >= self._turn.counted):
                return True
        self._last = self._now()
        return False

    def _now(self) -> tuple[float, float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time(), self._in_hooks


_HOOKS = ("join", "on_before_backward", "before_update", "on_train_batch_end", "after_batch")
"""Of ``Fit``: all that it does at a step."""


@contextmanager
def _timed_hooks(clock: Clock) -> Iterator[None]:
    originals = {name: getattr(Fit, name) for name in _HOOKS}

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            with clock.hook():
                return original(*args, **kwargs)

        return run

    try:
        for name, original in originals.items():
            setattr(Fit, name, timed(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(Fit, name, original)


class _Timed(pl.Callback):
    """Stops the fit when the turn is over. A step at which no checkpoint began makes the fit fail."""

    def __init__(self, clock: Clock, ours: MoECheckpoint | None) -> None:
        self._clock, self._ours = clock, ours

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        record = None if self._ours is None else self._ours.last
        if record is not None and not record.begun:
            raise RuntimeError(f"no checkpoint began at step {record.step}")
        if self._clock.tick(0 if record is None else record.nbytes):
            trainer.should_stop = True  # after one more iteration, which is not counted


def fit_once(
    name: str,
    experts: int,
    module: TinyMoE,
    turn: Turn,
    directory: Path,
    make_trainer: Callable[..., pl.Trainer],
    rank: int = 0,
    world_size: int = 1,
    together: Callable[[bool], bool] = bool,
) -> Sample:
    """One turn of one policy, in a directory of its own, which is removed afterwards. together: see ``Clock``."""
    sample, policy = Sample(name), policy_of(name, experts)
    ours = None
    if policy is not None:
        ours = MoECheckpoint(policy, directory / "store", save_last=False, when_busy="wait", resume="never")
    clock = Clock(turn, sample, together)
    callbacks = [_Timed(clock, ours), *([] if ours is None else [ours])]
    try:
        gc.collect()
        with _timed_hooks(clock):
            make_trainer(callbacks, directory).fit(module, batches(rank, world_size))
        if ours is not None and not (ours.last and ours.last.committed_step):
            raise RuntimeError("no checkpoint was committed")
    finally:
        if rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
    return sample


def in_turns(
    names: Sequence[str],
    rounds: int,
    once: Callable[[str, int], Sample],
    tell: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """``rounds`` times all policies, each round beginning with another one. One that fails gets no further turn.

    keep: called after every turn with what this will return: ``as_dict``.
    """
    samples: list[Sample] = []
    failed = Failures()
    for number in range(rounds):
        first = number * len(names) // rounds
        for name in [*names[first:], *names[:first]]:
            if name in failed:
                continue
            tell(f"round {number + 1} of {rounds}: {name}")
            with failed.of(name):
                samples.append(once(name, number))
            keep(as_dict(names, samples, failed))
    return as_dict(names, samples, failed)


def rows(names: Sequence[str], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Per policy, over its turns: medians of the turns' medians, JSON-ready, milliseconds."""
    table_rows = []
    reference: dict[str, float] = {}
    for name in ["none", *(name for name in names if name != "none")]:
        selected = [sample for sample in samples if sample.policy == name and sample.secs]
        if not selected:
            continue
        row = {
            "iteration_ms": _ms(median(sample.secs) for sample in selected),
            "mean_ms": _ms(mean(sample.secs) for sample in selected),
            "cpu_ms": _ms(mean(sample.cpu) for sample in selected),
            "thread_cpu_ms": _ms(mean(sample.thread_cpu) for sample in selected),
            "hook_cpu_ms": _ms(median(sample.hook_cpu) for sample in selected),
        }
        if name == "none":
            reference = row
        extra = {f"extra_{key}": round(row[key] - reference[key], 2) for key in row if reference}
        counts = {
            "kib": round(median(mean(s.nbytes) for s in selected) / 1024, 1),
            "n": sum(len(s.secs) for s in selected),
        }
        table_rows.append({"policy": name, **row, **extra, **counts})
    return table_rows


def _ms(secs: Iterable[float]) -> float:
    return round(median(secs) * 1e3, 2)


def as_dict(names: Sequence[str], samples: Sequence[Sample], failed: Failures) -> dict[str, Any]:
    """JSON-ready; "samples" in seconds."""
    return {
        "rows": rows(names, samples),
        "failed": dict(failed.reasons),
        "samples": [asdict(sample) for sample in samples],
    }
