"""A training program that is killed (``kill -9``) and started again: its lives, their events, and what a restart cost.

Each life is a process of its own, forked from a server that has imported torch already. ``windows_recovery`` and
``gradient_log_runs`` measure with it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.windowed import batches, trainer, workload
from benchmarks.workload import SIZES
from moe_ckpt import Memory
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import Dense, GradientLog
from moe_ckpt.policies.base import Policy
from moe_ckpt.policies.moevement import MoEvement

_PATIENCE_SECS = 600.0
_RARELY = 1_000_000
"""Steps between two checkpoints on storage where memory alone is measured."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.killed_lives"])

Events = Sequence[Mapping[str, Any]]
"""Of one life, in order: ``begin``, ``loaded``, and a ``step`` after each batch, with the clock ``at`` each."""


@dataclass(frozen=True)
class Life:
    """Settings of one life of the program.

    Attributes:
        policy: "none", "dense", "windows", "log" or "log, bf16", and its interval or W.
        home: Directory of its store, memory and log of events.
        size: Of the model.
        batch: Sequences in a batch.
        threads: Of torch.
        in_memory: Checkpoints stay in memory that outlives the process, and do not go to storage.
    """

    policy: tuple[str, int]
    home: str
    size: str
    batch: int
    threads: int
    in_memory: bool = False

    @property
    def log(self) -> str:
        return f"{self.home}/log.jsonl"

    @property
    def memory(self) -> str:
        return f"{self.home}/memory"

    @property
    def output(self) -> str:
        return f"{self.log}.txt"

    def made(self) -> Policy:
        """Returns its policy."""
        kind, number = self.policy
        if kind == "dense":
            return Dense(every_n_steps=number)
        if kind == "windows":
            return MoEvement(window=number)
        return GradientLog(window=number, grad_dtype="bf16" if kind == "log, bf16" else "as_consumed")


class _EventLog(pl.Callback):
    """One line per event, in the file before anything else happens: a kill takes nothing of it away."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - until the process is killed
        self.ours: MoECheckpoint | None = None

    def note(self, event: str, step: int = 0, **facts: float) -> None:
        self._file.write(json.dumps({"event": event, "step": step, "at": time.monotonic(), **facts}) + "\n")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note("loaded", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        last = None if self.ours is None else self.ours.last
        facts = {} if last is None else {"stall": last.stall_secs, "held": float(last.memory_nbytes)}
        if last is not None and last.begun:
            facts["saved"] = float(last.nbytes)
        self.note("step", trainer.global_step, **facts)


def _live(life: Life, steps: int) -> None:
    """One life, in a process of its own. From its first line on the clock of its restart runs."""
    log = _EventLog(life.log)
    log.note("begin")
    output = os.open(life.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(life.threads)
    config, _ = SIZES[life.size]
    callbacks: list[pl.Callback] = [log]
    if life.policy[0] != "none":
        memory = Memory(directory=life.memory, storage_every=_RARELY) if life.in_memory else None
        log.ours = MoECheckpoint(life.made(), f"{life.home}/store", save_last=False, when_busy="wait", memory=memory)
        callbacks.append(log.ours)
    trainer(steps, Path(life.home), *callbacks).fit(workload(config), batches(config, life.batch))


def killed_at(life: Life, step: int, after_secs: float) -> None:
    """Lets it live until it has made step ``step`` and ``after_secs`` more, then ``kill -9``.

    Raises:
        RuntimeError: It ends by itself, or does not come to that step in time; with its last words.
    """
    process = _context.Process(target=_live, args=(life, step + 1000))
    process.start()
    try:
        deadline = time.monotonic() + _PATIENCE_SECS
        while reached_in(life.log) < step:
            if not process.is_alive() or time.monotonic() > deadline:
                raise _failed(life, f"did not come as far as step {step}, exit code {process.exitcode}")
            time.sleep(0.01)
        time.sleep(after_secs)
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            raise _failed(life, f"ended before it was killed, exit code {process.exitcode}")
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _failed(life: Life, what: str) -> RuntimeError:
    output = Path(life.output)
    words = output.read_text(errors="replace")[-3000:] if output.exists() else "(none)"
    return RuntimeError(f"{life.policy} {what}; its last words:\n{words}")


def _events(path: str) -> list[dict[str, Any]]:
    try:
        lines = Path(path).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def reached_in(path: str) -> int:
    """Returns the newest step of a log of events; 0 if there is none."""
    return max((line["step"] for line in _events(path)), default=0)


def lives_of(path: str) -> list[Events]:
    """Returns the events of each life in a log."""
    results: list[list[dict[str, Any]]] = []
    for line in _events(path):
        if line["event"] == "begin":
            results.append([])
        results[-1].append(line)
    return list(results)


def iteration_secs(lives: Sequence[Events]) -> float:
    """Returns the median time from step to step, of all lives, those computed again left out; 0.1 without any."""
    taken, reached = [], 0
    for life in lives:
        steps = [line for line in life if line["event"] == "step"]
        taken += [b["at"] - a["at"] for a, b in pairwise(steps) if a["step"] > reached]
        reached = max([reached, *(line["step"] for line in steps)])
    return median(taken) if taken else 0.1


@dataclass(frozen=True)
class Restart:
    """What the start of a life cost. The step under way when the kill came is not counted: it had not been made.

    Attributes:
        reached: Newest step of the lives before.
        recomputed: Steps that this life computed again.
        secs: From its begin until it had computed ``reached`` again.
        loading_secs: Of these, until training began.
    """

    reached: int
    recomputed: int
    secs: float
    loading_secs: float


def restarts_in(lives: Sequence[Events]) -> list[Restart]:
    """Returns the restarts, one for each life but the first."""
    restarts, reached = [], 0
    for number, life in enumerate(lives):
        steps = {line["step"]: line["at"] for line in life if line["event"] == "step"}
        if number:
            begin = life[0]["at"]
            loaded = next(line for line in life if line["event"] == "loaded")
            back = steps[reached] if loaded["step"] < reached else loaded["at"]
            restarts.append(Restart(reached, reached - loaded["step"], back - begin, loaded["at"] - begin))
        reached = max([reached, *steps])
    return restarts
