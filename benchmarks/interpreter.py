"""How much longer checkpoints make the iterations of a loop that is bound by Python: transformers' Qwen3-MoE on a CPU.

Background threads that hold the interpreter lock delay such a loop, as they delay one that launches kernels. Iterations
are timed whole, in rounds: in each, every way to checkpoint gets its turn in the same process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import torch
from rich.console import Console
from rich.table import Table

import moe_ckpt
from benchmarks.report import RESULTS, machine, write_json
from moe_ckpt.policies import Dense, GradientLog, MoC, MoEvement
from moe_ckpt.policies.base import Policy

NEVER = 10**9
WAYS: dict[str, Policy | None] = {
    "none": None,
    "hooks": Dense(every_n_steps=NEVER),
    "MoC(k=1)": MoC(k=1),
    "Dense()": Dense(),
    "MoEvement(window=4)": MoEvement(window=4),
    "GradientLog()": GradientLog(),
}
_WARM = 6
"""Iterations of each turn that are not counted: the first ones save everything."""
_EXAMPLE = "example: python benchmarks/interpreter.py --rounds 5 --only none hooks 'MoC(k=1)' 'Dense()'"


class Loop:
    """A model with many small experts, its optimizer, and one batch."""

    def __init__(self, layers: int, experts: int) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"intermediate_size": 64, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "vocab_size": 256}
        sizes |= {"num_hidden_layers": layers, "num_experts": experts, "attn_implementation": "eager"}
        config = Qwen3MoeConfig(**sizes)
        self.model = Qwen3MoeForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._batch = torch.randint(256, (2, 16))

    def step(self) -> None:
        self.model(input_ids=self._batch, labels=self._batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def turn(loop: Loop, policy: Policy | None, directory: Path, steps: int) -> dict[str, Any]:
    """Milliseconds of each iteration, the processor time of all threads, and what became of the checkpoints."""
    if policy is None:
        return _timed(loop, steps, lambda step: None)
    memory = moe_ckpt.Memory(directory=directory, storage_every="1h", survivor_secs=0)
    options: dict[str, Any] = {"resume": "never", "save_last": False, "memory": memory}
    ckpt = moe_ckpt.attach(loop.model, loop.optimizer, policy=policy, dirpath=directory / "store", **options)
    try:
        ckpt.resume()
        return _timed(loop, steps, ckpt.after_step)
    finally:
        ckpt.close(10.0)


def _timed(loop: Loop, steps: int, after: Any) -> dict[str, Any]:
    laps, cpu, records = [], 0.0, []
    for step in range(1, _WARM + steps + 1):
        if step == _WARM + 1:
            cpu, thread = time.process_time(), time.thread_time()
        began = time.perf_counter()
        loop.step()
        record = after(step)
        if step > _WARM:
            laps.append(1e3 * (time.perf_counter() - began))
            records += [] if record is None else [record]
    training = time.thread_time() - thread
    cpu = time.process_time() - cpu
    return {
        "ms": laps,
        "training_cpu_ms": 1e3 * training / steps,
        "background_cpu_ms": 1e3 * (cpu - training) / steps,
        "hooks_ms": 1e3 * median(record.stall_secs for record in records) if records else 0.0,
        "begun": sum(record.begun for record in records),
        "left_out": sum(record.skipped for record in records),
    }


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    loop = Loop(options.layers, options.experts)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    turn(loop, None, Path(), options.steps)
    for number in range(options.rounds):
        for name in options.only:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                turns[name].append(turn(loop, WAYS[name], Path(directory), options.steps))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    rows = [{"way": name, **_summary(each)} for name, each in turns.items()]
    Console(width=None if sys.stdout.isatty() else 110).print(_table(rows, options))
    if options.write:
        facts = {"layers": options.layers, "experts": options.experts, "rounds": options.rounds, "steps": options.steps}
        write_json(options.out / "interpreter.json", {"machine": machine(), **facts, "rows": rows})
    return 0


def _summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all rounds: the median iteration, and means of the rest."""
    laps = [lap for turn in turns for lap in turn["ms"]]
    means = ("training_cpu_ms", "background_cpu_ms", "hooks_ms")
    return {
        "iteration_ms": round(median(laps), 2),
        "rounds_ms": [round(median(turn["ms"]), 2) for turn in turns],
        **{name: round(sum(turn[name] for turn in turns) / len(turns), 2) for name in means},
        "begun": sum(turn["begun"] for turn in turns),
        "left_out": sum(turn["left_out"] for turn in turns),
    }


def _table(rows: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    made = Table(title=f"Qwen3-MoE, {options.layers} x {options.experts} experts, one thread", title_justify="left")
    base = rows[0]["iteration_ms"]
    made.add_column("checkpoints")
    for column in ("iteration, ms", "adds", "in hooks", "CPU: training", "background", "begun", "left out"):
        made.add_column(column, justify="right")
    for row in rows:
        times = [f"{row[name]:.1f}" for name in ("hooks_ms", "training_cpu_ms", "background_cpu_ms")]
        counts = [str(row["begun"]), str(row["left_out"])]
        made.add_row(row["way"], f"{row['iteration_ms']:.1f}", f"{row['iteration_ms'] - base:+.1f}", *times, *counts)
    return made


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    made.add_argument("--layers", type=int, default=24)
    made.add_argument("--experts", type=int, default=64)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--steps", type=int, default=20, help="counted in each turn (default 20)")
    made.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help="the first is compared with")
    made.add_argument("--write", action="store_true", help="keep the JSON in results/")
    made.add_argument("--out", type=Path, default=RESULTS)
    return made


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(main())
