"""What a checkpoint at every iteration costs a Lightning run, beside other checkpointers.

One process, one model, one optimizer; each contestant gets fits in which iterations with and without
checkpoints alternate, and the contestants take turns. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import contestants, peers, report
from benchmarks.measuring import Measurements, Shape, measure
from benchmarks.workload import SHAPES, SIZES, Model, workload_of

_EXAMPLE = """example:
  python benchmarks/stall.py --size small --rounds 1
  python benchmarks/stall.py --storage disk memory --write
  python benchmarks/stall.py --only moe_ckpt dcp --dir /mnt/scratch
  python benchmarks/stall.py --size 48x128-listed --storage memory --threads 1     # tiny tensors: only Python counts
"""


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(
        prog="stall.py", description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [*sorted(SIZES), *SHAPES]
    command_line.add_argument("--size", choices=sizes, default="default", help="model (default: 412 MiB of state)")
    command_line.add_argument("--rounds", type=int, default=3, help="turns of every contestant (default 3)")
    command_line.add_argument("--iterations", type=int, default=5, help="counted iterations with a checkpoint per turn")
    command_line.add_argument(
        "--storage", nargs="+", choices=("disk", "memory"), default=["disk"], help="where to write"
    )
    command_line.add_argument(
        "--dir", type=Path, default=None, help="write below this directory, not the default of --storage"
    )
    command_line.add_argument("--only", nargs="+", metavar="TEXT", help="contestants whose name contains one of these")
    command_line.add_argument(
        "--batch", type=int, default=None, help="sequences per iteration: the length of an iteration"
    )
    command_line.add_argument(
        "--threads",
        type=int,
        default=max(1, len(os.sched_getaffinity(0)) - 1),
        help="compute threads; by default one core is left over, as on a node whose accelerator does the work",
    )
    command_line.add_argument("--write", action="store_true", help=f"keep JSON and picture in {report.RESULTS.name}/")
    command_line.add_argument("--out", type=Path, default=report.RESULTS, help="another directory for --write")
    return command_line


def quiet() -> None:
    """Keep the contestants' chatter out of the terminal."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    torch.manual_seed(0)
    module, batch = workload_of(options.size)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        return _compare(options, module, batch, console)
    finally:
        torch.set_num_threads(threads)


def _compare(options: argparse.Namespace, module: Model, batch: int, console: Console) -> int:
    """Measure on each storage, show, and keep what was asked for; the exit code."""
    runs: dict[str, tuple[list[report.Row], Measurements]] = {}
    for storage in options.storage:
        runs[storage] = _on(storage, options, module, batch, console)
    if options.write:
        memcpy = min(secs for _, result in runs.values() for secs in result.memcpy)
        picture = options.out / f"stall{_ending(options.size)}.png"
        drawn = report.plot(picture, {s: made for s, (made, _) in runs.items()}, memcpy * 1e3)
        remark = "" if drawn else "; no picture: matplotlib is missing"
        console.print(f"written to {os.path.relpath(options.out)}{remark}")
    return 1 if any(result.failed.reasons for _, result in runs.values()) else 0


def _on(
    storage: str, options: argparse.Namespace, module: Model, batch: int, console: Console
) -> tuple[list[report.Row], Measurements]:
    """All contestants on one storage. The JSON is written after each fit; the table is shown however it ends."""
    batch = options.batch or batch
    facts = {
        "machine": report.machine(),
        "storage": storage,
        "size": options.size,
        "tokens_per_iteration": batch * module.config.context,
        "threads": torch.get_num_threads(),
    }
    measurements = Measurements()
    # What a failed contestant is still writing must not keep the others' results from being shown.
    scratch = tempfile.TemporaryDirectory(
        prefix="moe_ckpt_bench_", dir=_place(options.dir, storage), ignore_cleanup_errors=True
    )
    with scratch as home, _progress(console) as progress:
        field, absent = _field(Path(home), options.only)
        durable = {contestant.name: contestant.durable for contestant in field}
        task = progress.add_task(storage, total=options.rounds * len(field) + 1)
        told: set[str] = set()

        def tell(what: str) -> None:
            progress.update(task, description=f"{storage}, {what}", advance=1)
            if not progress.console.is_terminal:
                progress.console.print(f"{storage}, {what}")

        def keep() -> None:
            for name in measurements.failed.reasons.keys() - told:
                progress.console.print(
                    f"failed: {name}: {measurements.failed.reasons[name]}", markup=False, soft_wrap=True
                )
                told.add(name)
            if options.write:
                content = report.as_dict(measurements, report.rows(measurements, durable), absent, **facts)
                report.write_json(options.out / f"stall_{storage}{_ending(options.size)}.json", content)

        try:
            shape = Shape(saved=options.iterations)
            measure(measurements, field, module, batch, shape, options.rounds, Path(home), tell, keep)
        finally:
            progress.stop()
            made = report.rows(measurements, durable)
            report.show(console, made, measurements, absent, f"checkpoints on {storage}")
            _close(field, measurements)
            keep()  # one may have failed in closing
    return made, measurements


def _ending(size: str) -> str:
    """Of the names of results, so that those of the default size stay."""
    return "" if size == "default" else f"_{size}"


def _close(field: list[contestants.Contestant], measurements: Measurements) -> None:
    """Those that failed are closed already."""
    for contestant in field:
        if contestant.name not in measurements.failed:
            with measurements.failed.of(contestant.name):
                contestant.close()


def _place(given: Path | None, storage: str) -> Path | None:
    """Raises ``SystemExit`` for a directory that is not there."""
    if given is not None and not given.is_dir():
        raise SystemExit(f"--dir {given}: there is no such directory")
    return given or (Path("/dev/shm") if storage == "memory" else None)


def _field(home: Path, only: list[str] | None) -> tuple[list[contestants.Contestant], dict[str, str]]:
    others, absent = peers.available(home, lambda name: _wanted(name, only))
    field = [c for c in [*contestants.own(), *others] if _wanted(c.name, only)]
    if not field:
        raise SystemExit(f"--only {' '.join(only or [])}: no contestant has such a name")
    return field, absent


def _wanted(name: str, only: list[str] | None) -> bool:
    return not only or any(text.lower() in name.lower() for text in only)


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)


if __name__ == "__main__":
    quiet()
    sys.exit(main())
