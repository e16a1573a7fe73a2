"""What Megatron's replayed iteration takes with and without work on what is frozen: one rank, gradients and update.

The frozen operators are those of each slot of a window of W: experts first, then everything else, in equal shares of
bytes, as docs/moevement.md says. An iteration is Megatron's own schedule, reduction
and optimizer step; ratios of CPU time to one in which nothing is frozen, in turns. ``--write`` keeps what is found in
results/megatron_replay.json.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import torch

from benchmarks.report import RESULTS, machine, write_json

megatron_gpt: Any = importlib.import_module("tests.support.megatron_gpt")


RESULT = "megatron_replay.json"


@dataclass(frozen=True)
class _Window:
    """What ``Sparing`` asks of a replay."""

    names: frozenset[str]
    upcoming_path: str = ""

    def frozen_parameters(self) -> frozenset[str]:
        return self.names


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/megatron_replay.py --window 4 --rounds 3",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--hidden", type=int, default=256)
    made.add_argument("--window", type=int, default=3, help="W (default 3)")
    made.add_argument("--rounds", type=int, default=7, help="(default 7)")
    made.add_argument("--write", action="store_true", help="keep JSON in results/")
    made.add_argument("--out", type=Path, default=RESULTS, help="another directory for --write")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    os.environ["MASTER_PORT"] = str(_free_port())
    facts = {"machine": machine(), "hidden": options.hidden, "window": options.window, "rounds": options.rounds}
    rows = [row for grouped in (False, True) for row in _measure(options, grouped)]
    for row in rows:
        print(line(row, options.window))
    if options.write:
        write_json(options.out / RESULT, facts | {"rows": rows})
    return 0


def line(row: Mapping[str, Any], window: int) -> str:
    """A row as docs/moevement.md has it."""
    step = f"step {row['step']} of {window}"
    ratios = row["ratios"]
    cells = [f"Megatron, {row['experts']}, {step}", f"{row['frozen']:.0%}", f"{median(ratios):.2f}"]
    return f"| {' | '.join(cells)} | {min(ratios):.2f} to {max(ratios):.2f} |"


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def _measure(options: argparse.Namespace, grouped: bool) -> list[dict[str, Any]]:
    """A row for each replayed step of a window but the first, which is loaded."""
    size = options.hidden
    setup = megatron_gpt.Setup(
        layers=4, hidden=size, heads=4, ffn=4 * size, experts=8, seq=128, vocab=1024, num_microbatches=2,
        precision="bf16" if grouped else "fp32", grouped=grouped,
    )  # fmt: skip
    built = megatron_gpt.build(setup, 1)
    from moe_ckpt.megatron.inventory import take_inventory
    from moe_ckpt.megatron.sparing import FACTS, GradientFacts, Sparing

    inventory, facts = take_inventory(built.chunks), GradientFacts(built.optimizer)

    def iteration() -> float:
        facts.begin()
        began = time.process_time()
        megatron_gpt.train_step(built, 1)
        return time.process_time() - began

    iteration()
    slots = _slots(inventory, options.window)
    frozen = [frozenset().union(*slots[at:]) for at in range(1, options.window)]
    times: dict[int, list[float]] = {at: [] for at in range(-1, len(frozen))}
    recorded = {FACTS: {"norms": [1.0], "overflows": []}}
    for _ in range(options.rounds):
        times[-1].append(iteration())
        for at, names in enumerate(frozen):
            sparing = Sparing(built.chunks, inventory, built.optimizer, facts)
            sparing.prepare(_Window(names), recorded)  # type: ignore[arg-type]
            times[at].append(iteration())
            sparing.close()
    facts.close()
    kind = "GroupedMLP, bf16" if grouped else "SequentialMLP, fp32"
    whole, made = sum(each.parameter.numel() for each in inventory.parameters), []
    for at, names in enumerate(frozen):
        sizes = [p.parameter.numel() for p in inventory.parameters if all(part.name in names for part in p.parts)]
        ratios = [one / other for one, other in zip(times[at], times[-1], strict=True)]
        made.append({"experts": kind, "step": at + 2, "frozen": sum(sizes) / whole, "ratios": ratios})
    return made


def _slots(inventory: Any, window: int) -> list[frozenset[str]]:
    """Names by slot: experts in turn of their number, then all others, in equal shares of elements."""
    parts = [(part, live) for live in inventory.parameters for part in live.parts]
    number: Callable[[str], int] = lambda name: int(name.split(".experts.")[1].split(".")[0])  # noqa: E731
    experts = sorted((part.name for part, live in parts if ".experts." in part.name), key=number)
    others = [part.name for part, live in parts if ".experts." not in part.name]
    sizes = {part.name: torch.Size(part.global_shape).numel() for part, _ in parts}
    share, filled = sum(sizes.values()) / window, 0.0
    found: list[set[str]] = [set() for _ in range(window)]
    for name in [*experts, *others]:
        found[min(window - 1, int(filled / share))].add(name)
        filled += sizes[name]
    return [frozenset(each) for each in found]


if __name__ == "__main__":
    raise SystemExit(main())
