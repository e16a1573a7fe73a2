"""What checkpoints take of the training thread, at the number of slices of the model that is measured on a GPU.

Runs of each policy with memory. Without a device, with small tensors: processor time of the hooks, which is what Python
costs, since copies run on another thread. On a GPU that is only acted (``tests/support/acted_gpu.py``: page-locking
takes 0.4 s for each GB), also with large ones: what that thread locks, unlocks and touches for the first time, and
whether it waits for the device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.gpu.costs import ours
from benchmarks.gpu.training import SHAPES, Shape, Training
from moe_ckpt.gradient_log import edits
from moe_ckpt.memory import mapping
from moe_ckpt.policies import Dense, GradientLog, MoC, MoEvement
from moe_ckpt.policies.base import Policy
from moe_ckpt.stopwatch import Stopwatch
from tests.support.acted_gpu import ActedGPU, pages_touched

_EXAMPLE = "example: python benchmarks/training_thread.py --size slices --write"
SIZES = {
    "slices": Shape(hidden=32, layers=8, experts=64, ffn=24, sequence=16, batch=2),
    "bytes": Shape(hidden=384, layers=8, experts=64, ffn=128, sequence=16, batch=2),
}
"""Both with the layers and experts of ``SHAPES["cuda"]``: its tensors and slices, but small; and as many bytes as fit
into 3 GB together with two slots, gradients, and the copies that the acted device holds back."""
POLICIES: dict[str, Policy] = {
    "MoC(k=1)": MoC(k=1),
    "MoEvement(window=4)": MoEvement(window=4),
    "GradientLog()": GradientLog(),
    "Dense()": Dense(),
}


class Hooks:
    """Measures what runs inside of the library's stopwatch, which every hook starts and stops.

    Attributes:
        secs: Processor time since the last ``take``, on the hooks' thread.
        pages: Pages that were touched there for the first time. Operations of an acted device count in neither.
    """

    def __init__(self) -> None:
        self.secs, self.pages = 0.0, 0
        self._depth = 0
        self._began = 0.0, 0

    @contextlib.contextmanager
    def counted(self, gpu: ActedGPU | None = None) -> Iterator[Hooks]:
        """Counts while a ``with`` statement is open."""
        enter, leave = Stopwatch.__enter__, Stopwatch.__exit__

        def now() -> tuple[float, int]:
            secs, pages = (0.0, 0) if gpu is None else (gpu.secs, gpu.pages)
            return time.thread_time() - secs, pages_touched() - pages

        def begin(watch: Stopwatch) -> None:
            if not self._depth:
                self._began = now()
            self._depth += 1
            enter(watch)

        def end(watch: Stopwatch, *error: object) -> None:
            leave(watch, *error)
            self._depth -= 1
            if not self._depth:
                secs, pages = now()
                self.secs += secs - self._began[0]
                self.pages += pages - self._began[1]

        with mock.patch.multiple(Stopwatch, __enter__=begin, __exit__=end):
            yield self

    def take(self) -> tuple[float, int]:
        """Returns both, and begins anew."""
        counted, (self.secs, self.pages) = (self.secs, self.pages), (0.0, 0)
        return counted


@contextlib.contextmanager
def _memory_calls() -> Iterator[list[str]]:
    """Yields the names of calls of this thread that map, touch, grow or free memory of the arena, as they come."""
    mine, calls, library = threading.current_thread(), list[str](), mapping._LIBRARY

    def noted(owner: Any, name: str) -> Any:
        call = getattr(owner, name)

        def noting(*args: Any) -> Any:
            if threading.current_thread() is mine:
                calls.append(name)
            return call(*args)

        return noting

    with contextlib.ExitStack() as stack:
        for owner, names in ((library, ("mmap", "madvise", "munmap")), (os, ("ftruncate", "posix_fallocate"))):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, noted(owner, name)))
        yield calls


def run(policy: Policy, size: str, steps: int, directory: Path, *, acted: bool) -> dict[str, Any]:
    """Trains with checkpoints in memory, a step of which every policy wants to save, on this thread.

    Returns:
        Per step "cpu_ms", "wall_ms", "pages" and "begun" (``Hooks``). Of this thread, from the
        first step to the last: "calls" that map, grow or free memory, and with a device also "locked_bytes", "unlocked"
        (times) and "waits".
    """
    SHAPES[size] = SIZES[size]
    results: dict[str, Any] = {"cpu_ms": [], "wall_ms": [], "pages": [], "begun": []}
    gpu, device, hooks = ActedGPU() if acted else None, "cuda" if acted else "cpu", Hooks()
    gc.collect()
    with contextlib.ExitStack() as stack:
        if gpu is not None:
            stack.enter_context(gpu)
            stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
        else:  # a gradient log compares no values of a device
            stack.enter_context(mock.patch.object(edits, "_MOST_TENSORS", 0))
        training = Training(device, size, autocast=False)
        with hooks.counted(gpu), ours(training, policy, directory) as saver:
            calls = stack.enter_context(_memory_calls())
            hooks.take()
            for number in range(1, steps + 1):
                training.step(number)
                told = saver(number)
                secs, pages = hooks.take()
                for name, value in (("cpu_ms", 1e3 * secs), ("wall_ms", 1e3 * told["hooks_secs"]), ("pages", pages)):
                    results[name].append(value)
                results["begun"].append(told["begun"])
            results["calls"] = list(calls)
            if gpu is not None:
                mine = threading.current_thread().name
                results["locked_bytes"] = sum(nbytes for name, nbytes in gpu.lockers if name == mine)
                results["unlocked"] = gpu.unlockers.count(mine)
                results["waits"] = [f"{what} in {led[0]}" for what, led in gpu.waits]
        results["state_bytes"] = training.state_nbytes
    return results


def main(argv: list[str] | None = None) -> int:
    """Measures and shows; the exit code is 1 if the training thread has waited for the device."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--size", choices=sorted(SIZES), action="append", help="default: all")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="on a tmpfs (default /dev/shm)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in results/")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 150)
    results: dict[str, Any] = {"machine": report.machine(), "runs": {}}
    waited = False
    for size in chosen.size or SIZES:
        steps = chosen.steps if size == "slices" else min(chosen.steps, _STEPS_OF_LARGE)
        table = Table(
            *("policy", "CPU ms", "wall ms", "CPU ms at first", "checkpoints", "locked", "pages", "calls", "waits"),
            title=f"{size}: hooks of a step, medians behind the first {_WARM}; what all hooks did to memory",
        )
        for name, policy in POLICIES.items():
            summary = results["runs"][f"{name}, {size}"] = {}
            for kind in ("cpu", "acted") if size == "slices" else ("acted",):
                with tempfile.TemporaryDirectory(dir=chosen.dir, prefix="moe_ckpt_thread_") as directory:
                    summary[kind] = run(policy, size, steps, Path(directory), acted=kind == "acted")
            waited = waited or bool(summary["acted"]["waits"])
            table.add_row(name, *_times(summary.get("cpu")), *_memory(summary["acted"]))
        console.print(table)
    if chosen.write:
        report.write_json(chosen.out / "training_thread.json", results)
    return int(waited)


_WARM, _STEPS_OF_LARGE = 4, 10
"""Steps in which plans are made, and memory; and how many are made with large tensors, each of which takes a second."""


def _times(plain: dict[str, Any] | None) -> list[str]:
    if plain is None:
        return ["", "", ""]
    warm = [at for at in range(_WARM, len(plain["begun"])) if plain["begun"][at]]
    medians = [f"{median(plain[name][at] for at in warm):.1f}" for name in ("cpu_ms", "wall_ms")]
    return [*medians, f"{max(plain['cpu_ms'][:_WARM]):.0f}"]


def _memory(acted: dict[str, Any]) -> list[str]:
    begun, pages = acted["begun"], acted["pages"][1:]
    locked = f"{acted['locked_bytes'] / 1024:.0f} KiB"
    return [
        f"{sum(begun)} of {len(begun)}",
        locked,
        str(sum(pages)),
        str(len(acted["calls"])),
        str(len(acted["waits"])),
    ]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
