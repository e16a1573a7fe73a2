"""What sparse windows (MoEvement) cost and save: bytes and stalls per iteration, and recovery.

Two measurements of one model. Cost: dense checkpoints at every iteration, MoC and MoEvement in turns, beside
iterations without checkpoints. Recovery: runs killed by kill -9 under dense checkpoints every few iterations and under
MoEvement. Prints the tables of docs/moevement.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import windows_cost, windows_recovery, windows_report
from benchmarks.failing import Failures
from benchmarks.report import RESULTS, machine, write_json
from benchmarks.stall import quiet
from benchmarks.windowed import workload
from benchmarks.workload import SIZES

_EXAMPLE = """example:
  python benchmarks/moevement.py --size small --rounds 1 --kills 2
  python benchmarks/moevement.py --write                # eight minutes on 2 cores, otherwise idle
  python benchmarks/moevement.py --only recovery --kills 20
"""
PARTS = ("cost", "recovery")
RESULT = "moevement.json"


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(
        prog="moevement.py", description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_line.add_argument(
        "--size", choices=sorted(SIZES), default="default", help="model (default: 412 MiB of state)"
    )
    command_line.add_argument(
        "--batch", type=int, default=None, help="sequences per iteration: the length of an iteration"
    )
    command_line.add_argument("--window", type=int, default=3, help="W (default 3)")
    command_line.add_argument(
        "--interval", type=int, default=10, help="iterations between dense checkpoints (default 10)"
    )
    command_line.add_argument("--rounds", type=int, default=2, help="turns of every contestant (default 2)")
    command_line.add_argument("--iterations", type=int, default=6, help="counted iterations with a checkpoint per turn")
    command_line.add_argument("--kills", type=int, default=6, help="kill -9 per run (default 6)")
    command_line.add_argument("--seed", type=int, default=1, help="when it is killed (default 1)")
    command_line.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the three measurements")
    command_line.add_argument("--storage", choices=("memory", "disk"), default="memory", help="where to write")
    command_line.add_argument(
        "--dir", type=Path, default=None, help="write below this directory, not the default of --storage"
    )
    command_line.add_argument(
        "--threads",
        type=int,
        default=max(1, len(os.sched_getaffinity(0)) - 1),
        help="compute threads; by default one core is left over, as on a node whose accelerator does the work",
    )
    command_line.add_argument(
        "--write", action="store_true", help="keep JSON in results/ and the picture in docs/images/"
    )
    command_line.add_argument("--out", type=Path, default=RESULTS, help="another directory for --write")
    return command_line


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    before, began = torch.get_num_threads(), time.monotonic()
    torch.set_num_threads(options.threads)
    directory = options.dir or (Path("/dev/shm") if options.storage == "memory" else None)
    words = sys.argv[1:] if argv is None else argv
    results: dict[str, Any] = {"facts": _facts(options, " ".join(["python benchmarks/moevement.py", *words]))}
    failed = Failures()

    def keep() -> None:
        results["facts"]["took_secs"] = round(time.monotonic() - began)
        results["failed"] = failed.reasons
        if options.write:
            write_json(options.out / RESULT, results)

    try:
        with (
            tempfile.TemporaryDirectory(prefix="moe_ckpt_windows_", dir=directory, ignore_cleanup_errors=True) as home,
            _progress(console, _steps(options)) as tell,
        ):
            _measure(results, options, Path(home), tell, failed, keep)
    finally:
        torch.set_num_threads(before)
        for line in windows_report.lines(results):
            print(line)
    if options.write:
        drawn = windows_report.plot((options.out / RESULT).with_suffix(".png"), results)
        console.print(f"written to {os.path.relpath(options.out)}" + ("" if drawn else "; no picture"))
    return 1 if failed.reasons else 0


def _facts(options: argparse.Namespace, command: str) -> dict[str, Any]:
    config, batch = SIZES[options.size]
    return {
        "machine": machine(),
        "size": options.size,
        "tokens_per_iteration": (options.batch or batch) * config.context,
        "threads": options.threads,
        "storage": options.storage if options.dir is None else "--dir",
        "window": options.window,
        "interval": options.interval,
        "rounds": options.rounds,
        "kills": options.kills,
        "seed": options.seed,
        "command": command,
    }


def _measure(
    results: dict[str, Any],
    options: argparse.Namespace,
    home: Path,
    tell: Callable[[str], None],
    failed: Failures,
    keep: Callable[[], None],
) -> None:
    """Adds "cost" and "recovery" as asked for, JSON-ready, and calls ``keep`` after each."""
    config, batch = SIZES[options.size]
    batch = options.batch or batch
    if "cost" in options.only:
        shape = windows_cost.Shape(saved=options.iterations)
        module = workload(config)
        fits = windows_cost.measure(module, options.window, batch, shape, options.rounds, home, tell, failed)
        state = sum(t.nbytes for t in module.state_tensors())
        rows = windows_cost.rows(fits)
        if rows:
            results["cost"] = {"state_bytes": state, "rows": rows, "fits": [asdict(fit) for fit in fits]}
        keep()
    if "recovery" in options.only:
        plan = (options.window, options.interval, options.size, batch, options.kills, options.seed, options.threads)
        recovery = windows_recovery.measure(*plan, home, tell, failed)
        if recovery:
            results["recovery"] = recovery
        keep()


def _steps(options: argparse.Namespace) -> int:
    """How often ``_measure`` tells what it does."""
    contestants = len(windows_cost.contestants(options.window))
    counts = {
        "cost": 1 + contestants * options.rounds,
        "recovery": 2 * (options.kills + 1),
    }
    return sum(counts[part] for part in set(options.only))


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    columns = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def tell(what: str) -> None:
            progress.update(task, description=what, advance=1)
            if not console.is_terminal:
                console.print(what)

        yield tell


if __name__ == "__main__":
    quiet()
    sys.exit(main())
