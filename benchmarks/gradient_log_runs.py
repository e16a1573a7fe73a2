"""One program, the same failures: a gradient log, MoEvement's windows, and a dense checkpoint every 10 iterations.

Each contestant trains the same model in a process that is killed (SIGKILL) at the same iterations and started again, in
processes forked from a server that has imported torch already. All keep their checkpoints in memory that outlives the
process. What a step weighs is counted in the slots that each kill leaves, and compared with the formula.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import lightning.pytorch as pl
import torch

from benchmarks import report
from benchmarks.windowed import batches, trainer, workload
from benchmarks.workload import SIZES
from moe_ckpt import Memory
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.core.rolling import bytes_per_parameter
from moe_ckpt.memory.slot import Slot
from moe_ckpt.policies import Dense, GradientLog
from moe_ckpt.policies.base import Policy
from moe_ckpt.policies.moevement import MoEvement

_EXAMPLE = "example: python benchmarks/gradient_log_runs.py --size small --kills 4 --write"
_PATIENCE_SECS = 600.0
_RARELY = 1_000_000
"""Steps between two checkpoints on storage: memory alone is measured."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.gradient_log_runs"])


@dataclass(frozen=True)
class Life:
    """What one life is told. policy: "none", "log", "log, bf16", "windows" or "dense", and W or the interval."""

    policy: tuple[str, int]
    home: str
    size: str
    batch: int
    threads: int

    @property
    def log(self) -> str:
        return f"{self.home}/log.jsonl"

    @property
    def memory(self) -> str:
        return f"{self.home}/memory"

    def made(self) -> Policy:
        kind, number = self.policy
        if kind == "dense":
            return Dense(every_n_steps=number)
        if kind == "windows":
            return MoEvement(window=number)
        return GradientLog(window=number, grad_dtype="bf16" if kind == "log, bf16" else "as_consumed")


class _Noting(pl.Callback):
    """One line per event, in the file before anything else happens: a kill takes nothing of it away."""

    def __init__(self, path: str, ours: MoECheckpoint | None) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - until the process is killed
        self._ours = ours

    def note(self, event: str, step: int = 0, **facts: float) -> None:
        self._file.write(json.dumps({"event": event, "step": step, "at": time.monotonic(), **facts}) + "\n")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note("loaded", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        last = None if self._ours is None else self._ours.last
        facts = {} if last is None else {"stall": last.stall_secs, "held": float(last.memory_nbytes)}
        self.note("step", trainer.global_step, **facts)


def _live(life: Life, steps: int) -> None:
    """One life, in a process of its own. From its first line on the clock of its restart runs."""
    output = os.open(f"{life.log}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(life.threads)
    config, _ = SIZES[life.size]
    ours = None
    if life.policy[0] != "none":
        memory = Memory(directory=life.memory, storage_every_n_steps=_RARELY)
        ours = MoECheckpoint(life.made(), f"{life.home}/store", save_last=False, when_busy="wait", memory=memory)
    log = _Noting(life.log, ours)
    log.note("begin")
    callbacks = [log] if ours is None else [log, ours]
    trainer(steps, Path(life.home), *callbacks).fit(workload(config), batches(config, life.batch))


Left = Mapping[int, tuple[int, int | None]]
"""Step -> bytes of the slices in its slot, and the first step of the window that it is of."""


def _events(path: str) -> list[dict[str, Any]]:
    try:
        lines = Path(path).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _reached(path: str) -> int:
    return max((line["step"] for line in _events(path)), default=0)


def lives_of(path: str) -> list[list[dict[str, Any]]]:
    """The events of each life."""
    found: list[list[dict[str, Any]]] = []
    for line in _events(path):
        if line["event"] == "begin":
            found.append([])
        found[-1].append(line)
    return found


def _killed_at(life: Life, step: int, after_secs: float) -> None:
    """Let it live until it has made step ``step`` and ``after_secs`` more, then ``kill -9``."""
    process = _context.Process(target=_live, args=(life, step + 1000))
    process.start()
    try:
        deadline = time.monotonic() + _PATIENCE_SECS
        while _reached(life.log) < step:
            if not process.is_alive() or time.monotonic() > deadline:
                words = Path(f"{life.log}.txt").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{life.policy} did not come to step {step}; its last words:\n{words}")
            time.sleep(0.01)
        time.sleep(after_secs)
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"{life.policy} ended before it was killed, exit code {process.exitcode}")
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def left_bytes(memory: str) -> Left:
    """What lies in the slots that a kill left; side tensors do not count."""
    found: dict[int, tuple[int, int | None]] = {}
    for head in Path(memory).rglob("*.head"):
        _, header = Slot.open(head.with_suffix(""))
        parts = (header.slices(part, str(head)) for part in header.parts)
        nbytes = sum(entry.nbytes for slices in parts for entry in slices if entry.operator)
        found[header.step] = nbytes, None if header.facts.window is None else header.facts.window.start
    return found


def chains(
    lives: Mapping[str, Life], kills: Sequence[tuple[int, float]], tell: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """All programs, killed at each (step, portion of an iteration later), in turns; the last life only comes back.

    Before each turn the program without checkpoints runs for as many steps, in a process of its own.

    Raises:
        RuntimeError: A life ends by itself.
    """
    weights: dict[str, list[Left]] = {name: [] for name in lives}
    bare: list[float] = []
    last = 0
    for number, (step, part) in enumerate((*kills, (0, 0.0))):
        if step:
            tell(f"without checkpoints: turn {number + 1}")
            home = f"{next(iter(lives.values())).home}_none_{number}"
            os.makedirs(home)
            alone = replace(next(iter(lives.values())), policy=("none", 0), home=home)
            _killed_at(alone, step - last, 0.0)
            bare.append(_iteration_secs(lives_of(alone.log)))
            last = step
        for name, life in lives.items():
            tell(f"{name}: life {number + 1} of {len(kills) + 1}")
            _killed_at(life, max(step, _reached(life.log) + 1), bare[-1] * part)
            if step:
                weights[name].append(left_bytes(life.memory))
    found = {name: facts(lives_of(life.log), weights[name], life.policy, bare) for name, life in lives.items()}
    return {"none": {"iteration_secs": median(bare)}, **found}


def _iteration_secs(lives: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    taken, reached = [], 0
    for life in lives:
        steps = [line for line in life if line["event"] == "step"]
        taken += [b["at"] - a["at"] for a, b in pairwise(steps) if a["step"] > reached]
        reached = max([reached, *(line["step"] for line in steps)])
    return median(taken) if taken else 0.1


def facts(
    lives: Sequence[Sequence[Mapping[str, Any]]],
    weights: Sequence[Left],
    policy: tuple[str, int],
    bare: Sequence[float],
) -> dict[str, Any]:
    """What a contestant costs. Iterations under way when a kill came had not been made, and are not counted.

    Args:
        lives: The events of each.
        weights: What each but the last left.
        policy: Of ``Life``.
        bare: Seconds of an iteration without checkpoints, before each of these.
    """
    slower = [_iteration_secs(lives[at : at + 1]) / secs for at, secs in enumerate(bare)]
    again, secs, loading, stalls, held, reached = [], [], [], [], [], 0
    for number, life in enumerate(lives):
        steps = {line["step"]: line for line in life if line["event"] == "step"}
        loaded = next(line for line in life if line["event"] == "loaded")
        if number:
            begin = life[0]["at"]
            back = steps[reached]["at"] if loaded["step"] < reached else loaded["at"]
            again.append(reached - loaded["step"])
            secs.append(back - begin)
            loading.append(loaded["at"] - begin)
        stalls += [line["stall"] for step, line in steps.items() if "stall" in line and step > reached + 2]
        held += [line["held"] for line in steps.values() if "held" in line]
        reached = max([reached, *steps])
    kind, number = policy
    steady = [per_step(kind, number, each) for each in weights]
    return {
        "again": again,
        "back_secs": secs,
        "loading_secs": loading,
        "iteration_secs": _iteration_secs(lives),
        "slower": slower,
        "stall_secs": mean(stalls) if stalls else 0.0,
        "held_bytes": max(held, default=0.0),
        "step_bytes": [each for each in steady if each is not None],
    }


def per_step(kind: str, number: int, left: Left) -> float | None:
    """Bytes per iteration of what a kill left: of a round, a whole window, or a dense checkpoint; None without one."""
    if not left:
        return None
    if kind == "dense":
        return left[max(left)][0] / number
    steps = sorted(left)[-number:]
    if kind == "windows":
        starts = {start for _, start in left.values()}
        whole = [those for start in starts if len(those := [s for s in left if left[s][1] == start]) == number]
        steps = max(whole, default=[])
    return mean(left[step][0] for step in steps) if len(steps) == number else None


def measure(order: argparse.Namespace, home: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """All contestants: facts by name, beside what was measured on."""
    rng, step, kills = random.Random(order.seed), 0, []
    for _ in range(order.kills):
        step += order.interval // 2 + 2 * order.window + rng.randrange(order.interval)
        kills.append((step, rng.random()))
    config, batch = SIZES[order.size]
    parameters = sum(parameter.numel() for parameter in workload(config).parameters())
    lives = {}
    for kind in ("log", "log, bf16", "windows", "dense"):
        where = home / kind.replace(", ", "_")
        where.joinpath("memory").mkdir(parents=True)
        number = order.interval if kind == "dense" else order.window
        lives[kind] = Life((kind, number), str(where), order.size, order.batch or batch, order.threads)
    found = chains(lives, kills, tell)
    told = {name: getattr(order, name) for name in ("size", "batch", "window", "interval", "seed", "threads")}
    return {"machine": report.machine(), "order": told, "kills": kills, "parameters": parameters, "found": found}


def formula(kind: str, order: Mapping[str, Any]) -> float:
    """Bytes per parameter and step, with fp32 weights, AdamW's two moments, and gradients of 4 or 2 bytes."""
    window, interval = order["window"], order["interval"]
    found: dict[str, float] = {
        "log": bytes_per_parameter(window, 4.0),
        "log, bf16": bytes_per_parameter(window, 2.0),
        "windows": windows_bytes(window, 12.0, 4.0),
        "dense": 12.0 / interval,
    }
    return found[kind]


def windows_bytes(window: int, full: float, compute: float) -> float:
    """MoEvement's, mean of a window: each operator in full once, and as compute weights in the steps before that."""
    return (full + compute * (window - 1) / 2) / window


_NAMES = {
    "log": "gradient log, W = {window}",
    "log, bf16": "gradient log, W = {window}, gradients rounded to bf16",
    "windows": "MoEvement, W = {window}",
    "dense": "dense, every {interval}",
}
_COLUMNS = (
    *("", "bytes per parameter and step", "formula", "stall", "slowdown (least to most)"),
    *("computed again, mean (most)", "back after a kill", "of that loading", "memory held per parameter"),
)


def rows(told: Mapping[str, Any]) -> list[list[str]]:
    """The table."""
    base = told["found"]["none"]["iteration_secs"]
    made = []
    for kind, name in _NAMES.items():
        each = told["found"][kind]
        nbytes = [one / told["parameters"] for one in each["step_bytes"]]
        made.append(
            [
                name.format(**told["order"]),
                f"{mean(nbytes):.2f}" if nbytes else "-",
                f"{formula(kind, told['order']):.2f}",
                f"{each['stall_secs'] / base:.1%}",
                f"{median(each['slower']) - 1:.0%} ({min(each['slower']) - 1:.0%} to {max(each['slower']) - 1:.0%})",
                f"{mean(each['again']):.1f} ({max(each['again'])})",
                f"{median(each['back_secs']) / base:.1f} iterations",
                f"{median(each['loading_secs']) / base:.1f}",
                f"{each['held_bytes'] / told['parameters']:.0f} B",
            ]
        )
    return made


def markdown(told: Mapping[str, Any]) -> str:
    """The table of docs/gradient_log.md."""
    rule = ["---"] * len(_COLUMNS)
    return "\n".join(f"| {' | '.join(row)} |" for row in ([*_COLUMNS], rule, *rows(told)))


RESULTS = Path(__file__).parent / "results" / "gradient_log_runs.json"


def main(argv: list[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--batch", type=int, default=0, help="sequences in a batch; 0: as of the size")
    parser.add_argument("--window", type=int, default=5, help="W of the log and of the windows")
    parser.add_argument("--interval", type=int, default=10, help="iterations between dense checkpoints")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--markdown", action="store_true", help="print the table of the results that were written")
    order = parser.parse_args(argv)
    if order.markdown:
        print(markdown(json.loads(RESULTS.read_text())))
        return 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as home:
        told = measure(order, Path(home), lambda what: print(what, file=sys.stderr, flush=True))
    if order.write:
        RESULTS.write_text(json.dumps(told, indent=2) + "\n")
    print(markdown(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
