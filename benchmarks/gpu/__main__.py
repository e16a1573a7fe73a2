"""What checkpoints cost on one GPU: rates, iterations, restarts, exactness. It prints tables, and can write JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import costs, lives, rates
from benchmarks.gpu.training import Training

_EXAMPLE = """example:
  python -m benchmarks.gpu --minutes 8 --out gpu.json
  python -m benchmarks.gpu --minutes 7 --half first --out first.json    # rates and iterations
  python -m benchmarks.gpu --minutes 7 --half second --out second.json  # restarts and exactness
  python -m benchmarks.gpu --device cpu --minutes 2                     # the same, small, without a GPU
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


def machine(device: str) -> dict[str, Any]:
    """Returns the hardware and the versions that figures are of."""
    name = torch.cuda.get_device_name() if device == "cuda" else "none"
    return {"gpu": name, "cores": os.cpu_count(), "torch": torch.__version__, "cuda": torch.version.cuda}


def main(arguments: list[str] | None = None) -> int:
    """Measures, shows and writes; the exit code is 1 if a killed run ended with other bits."""
    chosen = parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    began, secs = time.monotonic(), 60 * chosen.minutes
    results: dict[str, Any] = {"machine": machine(chosen.device), "state_bytes": 0}
    console.print(results["machine"])
    if chosen.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=chosen.dir, prefix="moe_ckpt_gpu_") as directory:
        if chosen.half != "second":
            until = began + secs * (1 if chosen.half else _FIRST_SHARE)
            results |= _first_half(chosen.device, Path(directory), until, console)
        if chosen.half != "first":
            results |= _second_half(chosen.device, Path(directory), began + secs, console)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(case.get("tensors that differ") for case in results.get("exact", ())))


def _first_half(device: str, directory: Path, until: float, console: Console) -> dict[str, Any]:
    nbytes, first, warm = _SIZES[device]
    measured = rates.measure(device, directory, nbytes)
    table = Table("rate", "GB/s", title="This machine")
    for name, rate in measured.items():
        table.add_row(name, f"{rate:.1f}")
    console.print(table)
    training = Training(device)
    console.print(f"the state has {training.state_nbytes / 2**30:.2f} GiB")
    rows = costs.measure(training, directory, until, (first, warm), console.print)
    table = Table(
        *("checkpoints", "iteration", "warm", "longest of the first", "hooks", "begun", "left out", "behind", ""),
        title="Whole iterations, against those without checkpoints",
    )
    for row in rows:
        if row.problem:
            table.add_row(row.name, *[""] * 7, row.problem)
            continue
        behind = "" if row.behind_steps is None else str(row.behind_steps)
        times = (f"{row.reference_ms:.1f} ms", f"x {row.inflation:.3f}", f"x {row.worst_first:.1f}")
        table.add_row(row.name, *times, f"{row.hooks_ms:.2f} ms", str(row.begun), str(row.left_out), behind, "")
    console.print(table)
    return {"rates": measured, "state_bytes": training.state_nbytes, "costs": [row.to_dict() for row in rows]}


def _second_half(device: str, directory: Path, until: float, console: Console) -> dict[str, Any]:
    marks = lives.restart(device, directory / "restart")
    shutil.rmtree(directory / "restart")
    table = Table("since the start of the process", "s", title="From kill -9 to the first new step, from own memory")
    for name in ("imports", "model", "resumed", "first step"):
        table.add_row(name, f"{marks[name]:.2f}")
    console.print(table)
    cases = lives.exact(device, directory, until, console.print)
    return {"restart": {name: mark for name, mark in marks.items() if name != "digests"}, "exact": cases}


if __name__ == "__main__":
    sys.exit(main())
