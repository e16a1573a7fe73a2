"""What comes after ``kill -9``: iterations computed again, and seconds until the run is where it was.

A chain per contestant: the same program, killed at moments drawn from a seed and started again each time, in processes
forked from a server that has imported torch already. Both contestants are killed after equally many new iterations.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.failing import Failures
from benchmarks.windowed import batches, trainer, workload
from benchmarks.workload import SIZES
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies.base import Policy
from moe_ckpt.policies.dense import Dense
from moe_ckpt.policies.moevement import MoEvement

_PATIENCE_SECS = 300.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.windows_recovery"])


@dataclass(frozen=True)
class Life:
    """What one life of the program is told. policy: "dense" or "windows", and its interval or W."""

    policy: tuple[str, int]
    store: str
    log: str
    size: str
    batch: int
    threads: int

    def made(self) -> Policy:
        kind, number = self.policy
        return Dense(every_n_steps=number) if kind == "dense" else MoEvement(window=number)


class _Log(pl.Callback):
    """One line per event, in the file before anything else happens: a kill takes nothing of it away."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - until the process is killed

    def note(self, event: str, step: int = 0) -> None:
        self._file.write(json.dumps({"event": event, "step": step, "at": time.monotonic()}) + "\n")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note("loaded", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note("step", trainer.global_step)


def _live(life: Life, steps: int) -> None:
    """One life, in a process of its own. From here on the clock of its restart runs."""
    log = _Log(life.log)
    log.note("begin")
    output = os.open(_output(life), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(life.threads)
    config, _ = SIZES[life.size]
    ours = MoECheckpoint(life.made(), life.store, save_last=False, when_busy="wait")
    trainer(steps, Path(life.store).parent, log, ours).fit(workload(config), batches(config, life.batch))


def _output(life: Life) -> str:
    return f"{life.log}.txt"


def _failed(life: Life, what: str) -> RuntimeError:
    output = Path(_output(life))
    words = output.read_text(errors="replace")[-3000:] if output.exists() else "(none)"
    return RuntimeError(f"{life.policy} {what}; its last words:\n{words}")


def _events(path: str) -> list[dict[str, Any]]:
    try:
        lines = Path(path).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _lives(path: str) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    for line in _events(path):
        if line["event"] == "begin":
            found.append([])
        found[-1].append(line)
    return found


def _reached(path: str) -> int:
    return max((line["step"] for line in _events(path)), default=0)


def _killed_at(life: Life, step: int, after_secs: float) -> None:
    """Let it live until it has made step ``step`` and ``after_secs`` more, then ``kill -9``."""
    process = _context.Process(target=_live, args=(life, step + 1000))
    process.start()
    try:
        deadline = time.monotonic() + _PATIENCE_SECS
        while _reached(life.log) < step:
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
    found = {}
    for name, policy in {
        f"dense every {interval}": ("dense", interval),
        f"MoEvement, W={window}": ("windows", window),
    }.items():
        where = home / policy[0]
        life = Life(policy, str(where / "store"), str(where / "log.jsonl"), size, batch, threads)
        with failed.of(name):
            where.mkdir(parents=True)
            found[name] = _chain(name, life, interval, kills, seed, tell)
    return found


def _chain(name: str, life: Life, interval: int, kills: int, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """One program, killed ``kills`` times. Raises ``RuntimeError`` when a life ends by itself."""
    rng = random.Random(seed)
    secs = 0.1
    for number in range(kills + 1):
        tell(f"recovery, {name}: life {number + 1} of {kills + 1}")
        further, part = interval // 2 + rng.randrange(interval), rng.random()
        # The last life need only come back to where the one before it was.
        step = _reached(life.log) + (1 if number == kills else further)
        _killed_at(life, step, secs * part)
        secs = _iteration_secs(_lives(life.log))
    return facts(life.log)


def _iteration_secs(lives: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Median time from step to step, of all lives, those computed again left out."""
    taken, reached = [], 0
    for life in lives:
        steps = [line for line in life if line["event"] == "step"]
        taken += [b["at"] - a["at"] for a, b in pairwise(steps) if a["step"] > reached]
        reached = max([reached, *(line["step"] for line in steps)])
    return median(taken) if taken else 0.1


def facts(log: str) -> dict[str, Any]:
    """Per restart: iterations computed again, seconds until they were, and of these seconds those until training began.

    The step under way when the kill came is not counted: it had not been made.
    """
    lives = _lives(log)
    restarts, reached = [], 0
    for number, life in enumerate(lives):
        steps = {line["step"]: line["at"] for line in life if line["event"] == "step"}
        if number:
            begin = life[0]["at"]
            loaded = next(line for line in life if line["event"] == "loaded")
            back = steps[reached] if loaded["step"] < reached else loaded["at"]
            restarts.append(
                {
                    "reached": reached,
                    "recomputed": reached - loaded["step"],
                    "secs": back - begin,
                    "loading_secs": loaded["at"] - begin,
                }
            )
        reached = max([reached, *steps])
    again = [restart["recomputed"] for restart in restarts]
    return {
        "restarts": restarts,
        "recomputed_mean": mean(again),
        "recomputed_max": max(again),
        "secs_mean": mean(restart["secs"] for restart in restarts),
        "secs_max": max(restart["secs"] for restart in restarts),
        "loading_secs": median(restart["loading_secs"] for restart in restarts),
        "iteration_ms": _iteration_secs(lives) * 1e3,
    }
