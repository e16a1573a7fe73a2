"""One program, the same failures: a gradient log, MoEvement's windows, and a dense checkpoint every 10 iterations.

Each contestant trains the same model in a process that is killed (SIGKILL) at the same iterations and started again, in
processes forked from a server that has imported torch already. All keep their checkpoints in memory that outlives the
process. What a step weighs is counted in the slots that each kill leaves, and compared with the formula; of the log,
whose older gradients are gone by then, as each step is saved.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"


from benchmarks import report
from benchmarks.gradient_bytes import bytes_per_parameter
from benchmarks.killed_lives import Events, Life, iteration_secs, killed_at, lives_of, reached_in, restarts_in
from benchmarks.windowed import workload
from benchmarks.workload import SIZES
from moe_ckpt.core.window import OperatorBytes, balance
from moe_ckpt.memory.slot import Slot
from moe_ckpt.modeling.discover import build_catalog, find_moe_layers

_EXAMPLE = "example: python benchmarks/gradient_log_runs.py --size small --kills 4 --write"

Left = Mapping[int, tuple[int, int | None]]
"""Step -> bytes of the slices in its slot, and the first step of the window that it is of."""


def left_bytes(memory: str) -> Left:
    """What lies in the slots that a kill left; side tensors do not count."""
    results: dict[int, tuple[int, int | None]] = {}
    for head in Path(memory).rglob("*.head"):
        _, header = Slot.open(head.with_suffix(""))
        parts = (header.slices(part, str(head)) for part in header.parts)
        nbytes = sum(entry.nbytes for slices in parts for entry in slices if entry.operator)
        results[header.step] = nbytes, None if header.contents.window is None else header.contents.window.start
    return results


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
            killed_at(alone, step - last, 0.0)
            bare.append(iteration_secs(lives_of(alone.log)))
            last = step
        for name, life in lives.items():
            tell(f"{name}: life {number + 1} of {len(kills) + 1}")
            killed_at(life, max(step, reached_in(life.log) + 1), bare[-1] * part)
            if step:
                weights[name].append(left_bytes(life.memory))
    results = {name: facts(lives_of(life.log), weights[name], life.policy, bare) for name, life in lives.items()}
    return {"none": {"iteration_secs": median(bare)}, **results}


def facts(
    lives: Sequence[Events],
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
    slower = [iteration_secs(lives[at : at + 1]) / secs for at, secs in enumerate(bare)]
    stalls, held, reached = [], [], 0
    for life in lives:
        steps = {line["step"]: line for line in life if line["event"] == "step"}
        stalls += [line["stall"] for step, line in steps.items() if "stall" in line and step > reached + 2]
        held += [line["held"] for line in steps.values() if "held" in line]
        reached = max([reached, *steps])
    restarts = restarts_in(lives)
    kind, number = policy
    if kind.startswith("log"):
        steady = [of_a_round(number, life) for life in lives]
    else:
        steady = [per_step(kind, number, weight) for weight in weights]
    return {
        "again": [restart.recomputed for restart in restarts],
        "back_secs": [restart.secs for restart in restarts],
        "loading_secs": [restart.loading_secs for restart in restarts],
        "iteration_secs": iteration_secs(lives),
        "slower": slower,
        "stall_secs": mean(stalls) if stalls else 0.0,
        "held_bytes": max(held, default=0.0),
        "step_bytes": [item for item in steady if item is not None],
    }


def of_a_round(number: int, life: Events) -> float | None:
    """Bytes per iteration of the newest round of a log, of so many steps; None if the life was shorter."""
    saved = [line["saved"] for line in life if "saved" in line][1:]  # everything is saved first
    return mean(saved[-number:]) if len(saved) >= number else None


def per_step(kind: str, number: int, left: Left) -> float | None:
    """Bytes per iteration of what a kill left: of a whole window, or a dense checkpoint; None without one."""
    if not left:
        return None
    if kind == "dense":
        return left[max(left)][0] / number
    starts = {start for _, start in left.values()}
    whole = [selected for start in starts if len(selected := [s for s in left if left[s][1] == start]) == number]
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
        lives[kind] = Life((kind, number), str(where), order.size, order.batch or batch, order.threads, in_memory=True)
    result = chains(lives, kills, tell)
    summary = {name: getattr(order, name) for name in ("size", "batch", "window", "interval", "seed", "threads")}
    return {"machine": report.machine(), "order": summary, "kills": kills, "parameters": parameters, "found": result}


def formula(kind: str, order: Mapping[str, Any]) -> float:
    """Bytes per parameter and step, with fp32 weights, AdamW's two moments, and gradients of 4 or 2 bytes."""
    window, interval = order["window"], order["interval"]
    results: dict[str, float] = {
        "log": bytes_per_parameter(window, 4.0),
        "log, bf16": bytes_per_parameter(window, 2.0),
        "windows": windows_bytes(window, order["size"]),
        "dense": 12.0 / interval,
    }
    return results[kind]


@cache
def windows_bytes(window: int, size: str) -> float:
    """MoEvement's, mean of a window: each operator in full once, and as compute weights in the steps before that.

    Of this very model: operators weigh what they do, and what is no expert comes last, so that it is frozen longest.
    """
    module = workload(SIZES[size][0])
    catalog = build_catalog(module, find_moe_layers(module))
    elements = dict.fromkeys(catalog.by_id, 0)
    for op in catalog.operators:
        for span in op.spans:
            shape = catalog.parameters[span.parameter]
            start, stop = span.rows(shape)
            elements[op.id] += (stop - start) * prod(shape[1:])
    sizes = {op: OperatorBytes(12 * count, 4 * count) for op, count in elements.items()}
    experts = list(catalog.experts_in_order)
    slots = balance([*experts, *(op.id for op in catalog.always_saved)], sizes, window)
    frozen = (sizes[op].full + at * sizes[op].compute for at, slot in enumerate(slots) for op in slot)
    return sum(frozen) / len(slots) / sum(elements.values())


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


def rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """The table."""
    base = summary["found"]["none"]["iteration_secs"]
    table_rows = []
    for kind, name in _NAMES.items():
        item = summary["found"][kind]
        nbytes = [one / summary["parameters"] for one in item["step_bytes"]]
        table_rows.append(
            [
                name.format(**summary["order"]),
                f"{mean(nbytes):.2f}" if nbytes else "-",
                f"{formula(kind, summary['order']):.2f}",
                f"{item['stall_secs'] / base:.1%}",
                f"{median(item['slower']) - 1:.0%} ({min(item['slower']) - 1:.0%} to {max(item['slower']) - 1:.0%})",
                f"{mean(item['again']):.1f} ({max(item['again'])})",
                f"{median(item['back_secs']) / base:.1f} iterations",
                f"{median(item['loading_secs']) / base:.1f}",
                f"{item['held_bytes'] / summary['parameters']:.0f} B",
            ]
        )
    return table_rows


def markdown(summary: Mapping[str, Any]) -> str:
    """The table of docs/gradient_log.md."""
    rule = ["---"] * len(_COLUMNS)
    return "\n".join(f"| {' | '.join(row)} |" for row in ([*_COLUMNS], rule, *rows(summary)))


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
