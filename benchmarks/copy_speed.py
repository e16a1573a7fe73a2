"""Where the engine's time goes: copy speed, the training thread's share of a snapshot, checksums and writing.

Everything in one process, alternating, as ratios against a plain warm memcpy of the same bytes. The last
part, on 2 processes, is the price of agreement per step.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import torch
import xxhash
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.agreement import agreement_secs
from benchmarks.failing import Failures
from benchmarks.synthetic import LiveState, synthetic
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.step import Contents
from moe_ckpt.format.shard import seal_of
from moe_ckpt.modeling.training_state import specs_of
from moe_ckpt.ports import StateTensor
from moe_ckpt.slices.checksums import checksums_of
from moe_ckpt.slices.compiling import CompiledPlan, PlanCompiler
from moe_ckpt.slices.copying import Move, run_copy_steps
from moe_ckpt.storage.local import LocalStorage

_GRIDS = ((6, 8), (12, 16), (24, 64), (48, 128))
_EXAMPLE = "example: python benchmarks/copy_speed.py --mib 128 --write"


@dataclass(frozen=True)
class Prepared:
    """A snapshot of ``state``, ready to copy: layout, sources, and a warm buffer."""

    state: LiveState
    moves: list[Move]
    buffer: torch.Tensor
    nbytes: int


def prepare(state: LiveState) -> Prepared:
    catalog = state.catalog
    tensors = state.tensors()
    plan, buffer = compiled(catalog, tensors)
    return Prepared(state, moves_of(plan, buffer), buffer, sum(part.nbytes for _, part in plan.parts))


def compiled(catalog: Catalog, tensors: Sequence[StateTensor]) -> tuple[CompiledPlan, torch.Tensor]:
    """The plan of a dense checkpoint on one rank, and a warm buffer for it."""
    compiler = PlanCompiler(catalog, everywhere(catalog.layers, 1), 0, 1)
    plan = compiler.compile(Contents(catalog.everything), tensors, specs_of(tensors), ())
    return plan, torch.zeros(plan.nbytes, dtype=torch.uint8)


def moves_of(plan: CompiledPlan, buffer: torch.Tensor) -> list[Move]:
    return [(step, buffer[at : at + part.nbytes]) for at, part in plan.parts for step in part.copies.steps]


def timed(
    actions: Mapping[str, Callable[[], object]], repeats: int, failed: Failures | None = None
) -> dict[str, list[float]]:
    """Seconds of each action, the actions taking turns; the first turn is not counted.

    With ``failed``, an action that raises is named there and gets no further turn; if none of its turns counted, it is
    left out.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats + 1):
        for name, action in actions.items():
            if failed is not None and name in failed:
                continue
            with nullcontext() if failed is None else failed.of(name):
                began = time.perf_counter()
                result = action()
                times[name].append(time.perf_counter() - began)
                del result
    return {name: taken[1:] for name, taken in times.items() if len(taken) > 1}


def copies(mib: int, repeats: int, directory: Path, failed: Failures) -> dict[str, list[float]]:
    """All ways to copy, check and write the same bytes: ``mib`` MiB of stacked experts with moments."""
    ready = prepare(synthetic(layers=4, experts=8, expert_elements=(mib << 20) // (4 * 8 * 3 * 4)))
    sources = [tensor.local for tensor in ready.state.tensors()]
    targets = [torch.zeros_like(source) for source in sources]
    state_dict = {str(i): source for i, source in enumerate(sources)}
    warm_stager = _stager()
    data = ready.buffer.numpy().data
    storage = LocalStorage(directory)
    numbers = iter(range(1 << 30))

    def write() -> None:
        name = f"file_{next(numbers)}"
        storage.write(name, [data])
        storage.delete(name)

    found = timed(
        {
            "memcpy, warm": lambda: _memmove(sources, targets),
            "moe_ckpt copy program": lambda: run_copy_steps(ready.moves),
            "torch clone": lambda: [source.clone() for source in sources],
            "torch copy_ (all threads)": lambda: [t.copy_(s) for t, s in zip(targets, sources, strict=True)],
            "dcp staging, as async_save does": lambda: _stager().stage(state_dict),
            "dcp staging, kept stager": lambda: warm_stager.stage(state_dict),
            "xxh3 checksum": lambda: xxhash.xxh3_64_hexdigest(data),
            "write + fsync": write,
        },
        repeats,
        failed,
    )
    warm_stager.close()
    return found


def _stager() -> Any:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(StagingOptions(False, False, False, False))


def _memmove(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def preparing(layers: int, experts: int, listed: bool, repeats: int) -> dict[str, list[float]]:
    """The steps of ``Pipeline.begin`` on the training thread, tiny tensors, everything saved."""
    state = synthetic(layers, experts, expert_elements=16, listed=listed)
    catalog = state.catalog
    tensors = state.tensors()
    specs = specs_of(tensors)
    compiler = PlanCompiler(catalog, everywhere(catalog.layers, 1), 0, 1)
    plan, buffer = compiled(catalog, tensors)
    moves = moves_of(plan, buffer)
    numbers = [checksums_of(part, buffer[at : at + part.nbytes]) for at, part in plan.parts]

    def headers() -> None:
        for (_, part), checksums in zip(plan.parts, numbers, strict=True):
            part.head("run", 0, 1)
            seal_of(1, 0, checksums)

    return timed(
        {
            "plan, new": lambda: compiled(catalog, tensors),
            "plan, as last time": lambda: compiler.compile(Contents(catalog.everything), tensors, specs, ()),
            "(copy thread) copy program": lambda: run_copy_steps(moves),
            "(persist thread) checksums": lambda: [
                checksums_of(part, buffer[at : at + part.nbytes]) for at, part in plan.parts
            ],
            "(persist thread) headers": headers,
        },
        repeats,
    )


def _show_copies(console: Console, found: Mapping[str, list[float]], failed: Failures, nbytes: int) -> None:
    shown = Table(title=f"the same {nbytes / report.MIB:.0f} MiB", title_justify="left")
    for column in ("", "ms", "x memcpy", "GB/s"):
        shown.add_column(column, justify="left" if not column else "right")
    base = median(found["memcpy, warm"])
    for name, times in found.items():
        t = median(times)
        shown.add_row(name, f"{t * 1e3:.1f}", f"{t / base:.2f}", f"{nbytes / t / 1e9:.1f}")
    for name in failed.reasons.keys() - found.keys():
        shown.add_row(name, "failed", "-", "-")
    console.print(shown)
    for line in failed.lines():
        console.print(line, markup=False, soft_wrap=True)


def _show_preparing(console: Console, found: Mapping[str, Mapping[str, list[float]]]) -> None:
    names = list(next(iter(found.values())))
    shown = Table(title="Pipeline.begin on the training thread, ms (weights and two moments)", title_justify="left")
    shown.add_column("layers x experts")
    for name in [*names, "sum on training thread"]:
        shown.add_column(name, justify="right")
    for grid, times in found.items():
        each = {name: median(t) * 1e3 for name, t in times.items()}
        total = sum(ms for name, ms in each.items() if not name.startswith("("))
        shown.add_row(grid, *(f"{ms:.1f}" for ms in each.values()), f"{total:.1f}")
    console.print(shown)


def main(argv: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    made.add_argument("--mib", type=int, default=384, help="bytes to copy, in MiB (default 384)")
    made.add_argument("--repeats", type=int, default=9)
    made.add_argument("--largest", type=int, default=len(_GRIDS), help="how many of the layer x expert grids")
    made.add_argument("--dir", type=Path, default=None, help="where to write for the storage line")
    made.add_argument("--alone", action="store_true", help="leave out the part that needs two processes")
    made.add_argument("--write", action="store_true", help="keep the JSON in results/")
    made.add_argument("--out", type=Path, default=report.RESULTS)
    options = made.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    directory = Path(tempfile.mkdtemp(prefix="moe_ckpt_bench_", dir=options.dir))
    failed = Failures()
    try:
        with console.status("copying"):
            found = copies(options.mib, options.repeats, directory, failed)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _show_copies(console, found, failed, options.mib << 20)
    content: dict[str, Any] = {
        "machine": report.machine(),
        "nbytes": options.mib << 20,
        "copies_ms": {name: [round(t * 1e3, 2) for t in times] for name, times in found.items()},
        "failed": failed.reasons,
    }

    def keep() -> None:
        if options.write:
            report.write_json(options.out / "copy_speed.json", content)

    keep()
    grids: dict[str, dict[str, list[float]]] = {}
    for layers, experts in _GRIDS[: options.largest]:
        for listed in (False, True):
            name = f"{layers} x {experts} {'listed' if listed else 'stacked'}"
            with console.status(name):
                grids[name] = preparing(layers, experts, listed, options.repeats)
    _show_preparing(console, grids)
    content["begin_ms"] = {g: {n: round(median(t) * 1e3, 3) for n, t in times.items()} for g, times in grids.items()}
    keep()
    if not options.alone:
        with console.status("agreement of 2 ranks"):
            agreed = agreement_secs(options.repeats)
        for name, secs in agreed.items():
            console.print(f"agreement of 2 gloo ranks, {name}: {secs * 1e3:.2f} ms per step")
        content["agreement_ms"] = {name: round(secs * 1e3, 3) for name, secs in agreed.items()}
        keep()
    return 1 if failed.reasons else 0


if __name__ == "__main__":
    sys.exit(main())
