"""One stage of a real Megatron pipeline is lost: what coming back costs if all ranks go back, one stage, or nobody.

Four gloo processes, one pipeline stage each (1F1B), and each a node of its own, train a small GPT-MoE on an accelerator
that is acted by sleeping, which leaves cores free, as on a GPU host. Rank 1 is killed, the others keep what they have,
and the job starts again: under MoEvement without upstream logs, with them, and under Dense with a checkpoint in memory
at every iteration. Beside it, the time of an iteration with and without a log, in turns in one run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.localized_rank import BLOCK, KILLED, ORDER, WAYS
from benchmarks.ranks import gathered

_EXAMPLE = "example: python benchmarks/localized.py --rounds 2 --json"
_RANK = "benchmarks.localized_rank"
STAGES, VICTIM = 4, 1
SIZES = ("microbatches", "width", "experts", "window")
LOGGED = "one stage goes back"
_TIMEOUT_SECS = 600.0


def recovery(scratch: Path, order: Mapping[str, Any], way: str) -> dict[str, float]:
    """One death and the start after it. Seconds count from the kill, so that they hold what survivors seal, and the
    start of all processes."""
    with tempfile.TemporaryDirectory(dir=scratch) as root:
        full_order = {**order, "root": root, "way": way}
        gathered(_RANK, {**full_order, "what": "die"}, STAGES, scratch, _TIMEOUT_SECS, killed=True)
        killed = float(Path(root, KILLED).read_text())
        _, ranks = gathered(_RANK, {**full_order, "what": "come back"}, STAGES, scratch, _TIMEOUT_SECS)
    started, resumed, new = (max(rank[name] for rank in ranks) for name in ("started", "resumed", "new"))
    return {
        "start_secs": started - killed,
        "load_secs": resumed - started,
        "again_secs": new - resumed,
        "secs": new - killed,
        "again": sum(rank["again"] for rank in ranks),
        "again_victim": ranks[VICTIM]["again"],
    }


def logging_cost(scratch: Path, order: Mapping[str, Any]) -> dict[str, Any]:
    """Of an iteration: with a log over without, by the slowest rank, and bytes of each rank's log."""
    _, ranks = gathered(_RANK, {**order, "way": LOGGED, "what": "overhead"}, STAGES, scratch, _TIMEOUT_SECS)
    walls: dict[bool, list[float]] = {False: [], True: []}
    for pair in zip(*(rank["iterations"] for rank in ranks), strict=True):
        walls[pair[0][0]].append(max(secs for _, secs in pair))
    return {
        "ms": {str(logged): 1e3 * median(result) for logged, result in walls.items()},
        "of_none": median(walls[True]) / median(walls[False]),
        "nbytes": [rank["nbytes"] for rank in ranks],
    }


def formula(order: Mapping[str, Any]) -> list[int]:
    """Bytes of activations and gradients that each stage sends in an iteration: docs/localized.md. In fp32, seq 16."""
    one = 16 * 2 * order["width"] * 4
    return [one * order["microbatches"] * ((stage < STAGES - 1) + (stage > 0)) for stage in range(STAGES)]


def table(facts: Mapping[str, Any]) -> Table:
    """One row for each way: medians of the rounds."""
    title = f"PP{STAGES}, W={facts['window']}, rank {VICTIM} killed in iteration {facts['done'] + 1}"
    grid = Table(title=title, title_justify="left")
    for heading in ("", "rank-iterations again", "start s", "load s", "replay s", "from the kill s", "of all"):
        grid.add_column(heading, justify="right" if heading else "left")
    whole = median(item["secs"] for item in facts["found"][next(iter(WAYS))])
    for way, rounds in facts["found"].items():
        again, secs = (median(each[name] for each in rounds) for name in ("again", "secs"))
        phases = (median(each[name] for each in rounds) for name in ("start_secs", "load_secs", "again_secs"))
        cells = [f"{again:.0f}", *(f"{phase:.2f}" for phase in phases), f"{secs:.2f}", f"{secs / whole:.2f}"]
        grid.add_row(way, *cells)
    log = facts["log"]
    grid.caption = (
        f"an iteration with a log takes {log['of_none']:.3f} of one without; it has "
        f"{sum(log['nbytes']) / 1024:.0f} KiB in all, {sum(log['nbytes']) / sum(facts['formula']):.3f} of the formula's"
    )
    return grid


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="of an iteration (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=8, help="of each layer (default: %(default)s)")
    parser.add_argument("--window", type=int, default=4, help="W of MoEvement (default: %(default)s)")
    parser.add_argument("--act-ms", type=float, default=10.0, help="of an acted forward pass (default: %(default)s)")
    cycle = BLOCK * len(ORDER)
    parser.add_argument("--cycles", type=int, default=2, help=f"of {cycle} iterations (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for memory and store")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON, and no table")
    parser.add_argument("--write", action="store_true", help="keep every measurement in --out")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    order: dict[str, Any] = {name: getattr(args, name) for name in (*SIZES, "cycles")}
    order |= {"stages": STAGES, "victim": VICTIM, "act_secs": args.act_ms / 1e3, "log_bytes": 1 << 28}
    order["done"] = 3 * args.window + args.window - 1  # the window under way lacks a step
    facts: dict[str, Any] = {"machine": report.machine(), **order, "found": {way: [] for way in WAYS}}
    facts["formula"] = formula(order)
    console = Console(width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="localized_") as scratch:
        for _ in range(args.rounds):
            for way in WAYS:
                facts["found"][way].append(recovery(Path(scratch), order, way))
        facts["log"] = logging_cost(Path(scratch), order)
    if args.json:
        print(json.dumps(facts))
    else:
        console.print(table(facts))
    if args.write:
        report.write_json(args.out / "localized.json", facts)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what lies in memory is removed then, too
    sys.exit(main())
