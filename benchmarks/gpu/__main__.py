"""What checkpoints cost on one GPU: rates, iterations, restarts, exactness. It prints tables, and can write JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import costs, lives, rates
from benchmarks.gpu.training import Training
from moe_ckpt.memory.limits import cores

_EXAMPLE = """example:
  python -m benchmarks.gpu --minutes 14 --out gpu.json
  python -m benchmarks.gpu --minutes 7 --half first --out first.json    # rates and iterations
  python -m benchmarks.gpu --minutes 7 --half second --out second.json  # restarts and exactness
  python -m benchmarks.gpu --device cpu --minutes 5                     # the same, small, without a GPU
"""
_FIRST_SHARE = 0.65
"""Of the time, for the first half, where both are run."""
_SIZES = {"cuda": (4 << 30, 20, 20), "cpu": (64 << 20, 4, 6)}
"""Per device: bytes that rates are measured with; first iterations, and warm ones."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command_line = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_argument("--minutes", type=float, default=8.0, help="nothing new is begun later (default 8)")
    command_line.add_argument(
        "--half", choices=("first", "second"), help="rates and iterations, or restarts and exactness"
    )
    command_line.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    command_line.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="on a tmpfs (default /dev/shm)")
    command_line.add_argument("--out", type=Path, help="write the results there, as JSON")
    return command_line


def machine(device: str, directory: Path) -> dict[str, Any]:
    """Returns the hardware and the versions that figures are of."""
    name = torch.cuda.get_device_name() if device == "cuda" else "none"
    tmpfs, memory = shutil.disk_usage(directory), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {"memory GB": round(memory / 1e9), "tmpfs GB": round(tmpfs.total / 1e9), "cores": cores()}
    return {"gpu": name, **sizes, "torch": torch.__version__, "cuda": torch.version.cuda}


class Results:
    """What was measured so far: written as it comes, so that a run that is cut off leaves what it had.

    Args:
        path: Of the JSON; None to write none.
        console: Shows what goes wrong.
    """

    def __init__(self, path: Path | None, console: Console) -> None:
        self.values: dict[str, Any] = {}
        self._path, self._console = path, console

    def add(self, name: str, value: Any) -> None:
        """Adds a value, to a list if there is one of the name."""
        if isinstance(self.values.get(name), list):
            self.values[name].append(value)
        else:
            self.values[name] = value
        if self._path is not None:
            partial = self._path.with_name(f"{self._path.name}.partial")
            partial.write_text(json.dumps(self.values, indent=1) + "\n")
            partial.replace(self._path)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Does one part, whose error does not end the others."""
        try:
            yield
        except Exception as error:
            self._console.print(f"{name}: {type(error).__name__}: {error}", style="red", markup=False)
            self.values.setdefault("problems", [])
            self.add("problems", f"{name}: {type(error).__name__}: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Measures, shows and writes.

    Returns:
        The exit code: 1 if a killed run ended with other bits, CUDA graphs changed counts of tokens, or a part failed.
    """
    chosen = parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    began, secs = time.monotonic(), 60 * chosen.minutes
    results = Results(chosen.out, console)
    results.add("machine", machine(chosen.device, chosen.dir))
    console.print(results.values["machine"])
    if chosen.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=chosen.dir, prefix="moe_ckpt_gpu_", ignore_cleanup_errors=True) as directory:
        if chosen.half != "second":
            until = began + secs * (1 if chosen.half else _FIRST_SHARE)
            _first_half(chosen.device, Path(directory), until, results, console)
        if chosen.half != "first":
            _second_half(chosen.device, Path(directory), began + secs, results, console)
    differing = ("tensors that differ", "token counts that differ")
    differs = any(case.get(key) for case in results.values.get("exact", ()) for key in differing)
    return int(differs or "problems" in results.values)


def _first_half(device: str, directory: Path, until: float, results: Results, console: Console) -> None:
    nbytes, first, warm = _SIZES[device]
    with results.part("rates"):
        measured = rates.measure(device, directory, nbytes)
        results.add("rates", measured)
        table = Table("rate", "GB/s", title="This machine")
        for name, rate in measured.items():
            table.add_row(name, f"{rate:.1f}")
        console.print(table)
    with results.part("costs"):
        training = Training(device)
        results.add("state_bytes", training.state_nbytes)
        console.print(f"the state has {training.state_nbytes / 2**30:.2f} GiB")
        results.values["costs"], rows = [], list[costs.Cost]()

        def note(cost: costs.Cost) -> None:
            rows.append(cost)
            results.add("costs", cost.to_dict())
            ratio = f"{cost.inflation:.3f} times an iteration of {cost.reference_ms:.1f} ms"
            console.print(f"{cost.name}: {cost.problem or ratio}", markup=False)

        try:
            costs.measure(training, directory, until, (first, warm), note)
        finally:
            console.print(_costs_table(rows))


def _costs_table(rows: Sequence[costs.Cost]) -> Table:
    table = Table(
        *("checkpoints", "iteration", "warm", "longest of the first", "hooks", "begun", "left out", "behind", "sealed"),
        title="Whole iterations, against those without checkpoints",
    )
    for row in rows:
        if row.problem:
            table.add_row(row.name, row.problem)
            continue
        behind = "" if row.behind_steps is None else str(row.behind_steps)
        sealed = "" if row.sealed_secs is None else f"{row.sealed_secs:.2f} s"
        times = (f"{row.reference_ms:.1f} ms", f"x {row.inflation:.3f}", f"x {row.worst_first:.1f}")
        table.add_row(row.name, *times, f"{row.hooks_ms:.2f} ms", str(row.begun), str(row.left_out), behind, sealed)
    return table


def _second_half(device: str, directory: Path, until: float, results: Results, console: Console) -> None:
    starts: dict[str, dict[str, float]] = {}
    for source in lives.SOURCES:
        with results.part(f"restart from {source}"):
            if time.monotonic() > until:
                raise TimeoutError("no time was left")
            marks = lives.restart(device, directory / "restart", source)
            starts[source] = {name: mark for name, mark in marks.items() if name != "digests"}
            results.add("restart", starts)
        shutil.rmtree(directory / "restart", ignore_errors=True)
    names = ("imports", "model", "resumed", "first step")
    table = Table("seconds since the start of the process", *names, title="From kill -9 to the first new step")
    for source, marks in starts.items():
        table.add_row(source, *(f"{marks[name]:.2f}" for name in names))
    console.print(table)
    with results.part("exactness"):
        results.values["exact"] = []

        def note(case: dict[str, Any], text: str) -> None:
            results.add("exact", case)
            console.print(text, markup=False)

        lives.exact(device, directory, until, note)


if __name__ == "__main__":
    sys.exit(main())
