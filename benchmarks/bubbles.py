"""Copies and sends in the bubbles of a real Megatron pipeline: interference, stalls, bytes, with gating on and off.

Four gloo processes, one pipeline stage each (1F1B), and each a node of its own, train a small GPT-MoE and take a
MoEtion checkpoint into memory at every iteration, with a copy on a peer. Saving and gating are switched on and off
within one run, block by block, so that what else the machine does hits all alike. It is done twice: with the compute of
these processes, which share the machine's cores, so that a bubble of one rank is another's compute; and with an
accelerator that is acted by sleeping, which leaves a core free, as on a GPU host. Bytes in bubbles do not depend on how
fast the machine is.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.bubbles_rank import BLOCK, NONE, OFF, ON, ORDER, WARM, Iteration
from benchmarks.ranks import gathered

_EXAMPLE = "example: python benchmarks/bubbles.py --rounds 2 --json"
STAGES = 4
SIZES = ("rounds", "cycles", "microbatches", "width", "experts", "saved")
COMPUTE, ACTED = "real compute", "acted accelerator"
_TIMEOUT_SECS = 900.0

WAYS = (NONE, OFF, ON)
Blocks = dict[str, list[list[list[Iteration]]]]
"""Way -> of each round, all iterations, by rank."""


def measure(scratch: Path, args: argparse.Namespace, act_secs: float) -> Blocks:
    """Starts the ranks, and gathers what they found."""
    order: dict[str, Any] = {name: getattr(args, name) for name in SIZES}
    order |= {"stages": STAGES, "act_secs": act_secs}
    _, ranks = gathered("benchmarks.bubbles_rank", order, STAGES, scratch, _TIMEOUT_SECS)
    results: Blocks = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way in WAYS:
            alike = zip(*(rank[number] for rank in ranks), strict=True)
            results[way].append([list(item) for item in alike if item[0]["way"] == way])
    return results


def wall(ranks: Sequence[Iteration]) -> float:
    """Of an iteration, seconds of the slowest rank: each waits for it."""
    return float(max(rank["wall"] for rank in ranks))


def stall(ranks: Sequence[Iteration]) -> float:
    """Of the rank that waits most."""
    return float(max(rank["stall"] for rank in ranks))


def cpu(ranks: Sequence[Iteration]) -> float:
    """Seconds of all processes."""
    return float(sum(rank["cpu"] for rank in ranks))


def share(iterations: Sequence[Sequence[Iteration]], what: str, rank: int | None = None) -> float:
    """Portion of the bytes that went in bubbles. what: "copied" or "sent"; rank: None for all."""
    chosen = [item for ranks in iterations for item in (ranks if rank is None else [ranks[rank]])]
    whole = sum(item[what] for item in chosen)
    return float(sum(item[f"{what}_in_bubbles"] for item in chosen) / whole) if whole else 0.0


def ratios(results: Blocks, of: Callable[[Sequence[Iteration]], float], over: str, under: str) -> list[float]:
    """Of two ways, in each cycle of each round; medians over the cycle's iterations."""
    rows = []
    for one, other in zip(results[over], results[under], strict=True):
        for cycle in sorted({ranks[0]["cycle"] for ranks in one}):
            above, below = (median(of(ranks) for ranks in item if ranks[0]["cycle"] == cycle) for item in (one, other))
            rows.append(above / below)
    return rows


def summary(results: Blocks) -> dict[str, Any]:
    """JSON-ready: a row for each way, and on over off of each cycle."""
    rows = []
    for way in WAYS:
        every = [ranks for item in results[way] for ranks in item]
        rows.append(
            {
                "way": way,
                "iteration_ms": 1e3 * median(map(wall, every)),
                "of_none": median(ratios(results, wall, way, NONE)),
                "stall_ms": 1e3 * median(map(stall, every)),
                "cpu_ms": 1e3 * median(map(cpu, every)),
                "cpu_of_none": median(ratios(results, cpu, way, NONE)),
                "copied_mib": median(sum(rank["copied"] for rank in ranks) for ranks in every) / report.MIB,
                "sent_mib": median(sum(rank["sent"] for rank in ranks) for ranks in every) / report.MIB,
                "copied_in_bubbles": share(every, "copied"),
                "sent_in_bubbles": share(every, "sent"),
                "by_stage": [{what: share(every, what, at) for what in ("copied", "sent")} for at in range(STAGES)],
            }
        )
    return {"rows": rows, "on_over_off": {"wall": ratios(results, wall, ON, OFF), "cpu": ratios(results, cpu, ON, OFF)}}


def table(title: str, results: Mapping[str, Any]) -> Table:
    """One row for each way; by stage: copied/sent."""
    grid = Table(title=title, title_justify="left")
    grid.add_column(no_wrap=True)
    for heading in ("iteration ms", "of none", "stall ms", "CPU of none", "copied in bubbles", "sent", "by stage"):
        grid.add_column(heading, justify="right")
    for row in results["rows"]:
        stages = " ".join(f"{item['copied']:.0%}/{item['sent']:.0%}" for item in row["by_stage"])
        cells = [f"{row['of_none']:.2f}", f"{row['stall_ms']:.1f}", f"{row['cpu_of_none']:.2f}"]
        cells += [f"{row['copied_in_bubbles']:.0%}", f"{row['sent_in_bubbles']:.0%}", stages]
        grid.add_row(row["way"], f"{row['iteration_ms']:.0f}", *(cells if row["way"] != NONE else ["-"] * len(cells)))
    compared = (f"{name} {spread(item)}" for name, item in results["on_over_off"].items())
    grid.caption = "gating on over off, median and quartiles of cycles: " + ", ".join(compared)
    return grid


def spread(values: Sequence[float]) -> str:
    """The median, and between which quartiles."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    iterations = BLOCK * len(ORDER)
    parser.add_argument(
        "--cycles", type=int, default=5, help=f"of {iterations} iterations in each round (default: %(default)s)"
    )
    parser.add_argument("--microbatches", type=int, default=8, help="of an iteration (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=16, help="of each layer (default: %(default)s)")
    parser.add_argument("--saved", type=int, default=6, help="experts per layer and checkpoint (default: %(default)s)")
    parser.add_argument("--act-ms", type=float, default=8.0, help="of an acted forward pass (default: %(default)s)")
    parser.add_argument("--only", choices=(COMPUTE, ACTED), help="one of the two")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for memory and store")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON, and no table")
    parser.add_argument("--write", action="store_true", help="keep every measurement in --out")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    facts: dict[str, Any] = {"machine": report.machine(), **{name: getattr(args, name) for name in (*SIZES, "act_ms")}}
    facts |= {"stages": STAGES, "warm": WARM, "found": {}}
    bubbles = (STAGES - 1) / (args.microbatches + STAGES - 1)
    console = Console(width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bubbles_") as scratch:
        for kind in (COMPUTE, ACTED) if args.only is None else (args.only,):
            result = measure(Path(scratch), args, args.act_ms / 1e3 if kind == ACTED else 0.0)
            facts["found"][kind] = summary(result)
            if not args.json:
                item = facts["found"][kind]["rows"][WAYS.index(ON)]["copied_mib"]
                title = f"{kind}: PP{STAGES}, {args.microbatches} micro-batches (bubbles by formula {bubbles:.0%}), "
                title += f"{item:.0f} MiB copied per iteration by all ranks"
                console.print(table(title, facts["found"][kind]))
    if args.json:
        print(json.dumps(facts))
    if args.write:
        report.write_json(args.out / "bubbles.json", facts)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what lies in memory is removed then, too
    sys.exit(main())
