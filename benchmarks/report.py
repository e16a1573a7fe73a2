"""From measurements to a table, a JSON file and a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.measuring import Measurements, Sample

MIB = 1 << 20
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One contestant, over all rounds. Seconds and bytes; medians of the rounds' medians.

    stall, low, high: median, lowest and highest round of (iteration with checkpoint - iteration without).
    hook: time on the training thread inside the contestant's hooks, per checkpointed iteration.
    idle_hook: the same in iterations without a checkpoint.
    extra_cpu: processor time of the training thread beyond that of the reference iteration, hooks included.
    per_memcpy, hook_per_memcpy: stall and hook over a warm memcpy of the whole state (that of the quietest round).
    per_iteration: stall over the reference iteration.
    saved: share of the checkpoints asked for that are on storage.
    """

    name: str
    durable: bool
    iteration: float
    stall: float
    low: float
    high: float
    hook: float
    idle_hook: float
    extra_cpu: float
    per_memcpy: float
    hook_per_memcpy: float
    per_iteration: float
    nbytes: int
    saved: float
    drain: float


def rows(measurements: Measurements, durable: Mapping[str, bool]) -> list[Row]:
    """One row per contestant, in the order of ``durable``."""
    if not measurements.samples:
        return []
    memcpy = min(measurements.memcpy)  # the least disturbed one: other programs only ever make it longer
    table_rows = []
    for name, is_durable in durable.items():
        samples = [s for s in measurements.samples if s.contestant == name]
        if samples:
            table_rows.append(_row(name, is_durable, samples, memcpy))
    return table_rows


def _row(name: str, durable: bool, samples: Sequence[Sample], memcpy: float) -> Row:
    stalls = [s.stall for s in samples]
    hook = median(median(s.hooks) for s in samples)
    return Row(
        name=name,
        durable=durable,
        iteration=median(median(s.reference) for s in samples),
        stall=median(stalls),
        low=min(stalls),
        high=max(stalls),
        hook=hook,
        idle_hook=median(median(s.idle_hooks) for s in samples),
        extra_cpu=median(s.extra_cpu for s in samples),
        per_memcpy=median(stalls) / memcpy,
        hook_per_memcpy=hook / memcpy,
        per_iteration=median(s.stall / median(s.reference) for s in samples),
        nbytes=int(median(s.nbytes for s in samples)),
        saved=sum(s.kept for s in samples) / sum(s.asked for s in samples),
        drain=median(s.drain for s in samples),
    )


def table(table_rows: Sequence[Row], failed: Iterable[str], title: str) -> Table:
    """For the terminal. A contestant that failed in its first turn has a line without numbers."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("per iteration with a checkpoint", no_wrap=True)
    columns = ("hooks ms", "x memcpy", "CPU ms", "slower by ms", "(rounds)", "% of iteration")
    for column in (*columns, "MiB written", "saved", "drain ms"):
        shown.add_column(column, justify="right")
    for row in table_rows:
        shown.add_row(
            row.name if row.durable else f"{row.name} *",
            f"{row.hook * 1e3:.1f}",
            f"{row.hook_per_memcpy:.2f}",
            f"{row.extra_cpu * 1e3:.0f}",
            f"{row.stall * 1e3:.0f}",
            f"{row.low * 1e3:.0f}..{row.high * 1e3:.0f}",
            f"{row.per_iteration:.0%}",
            f"{row.nbytes / MIB:.1f}",
            f"{row.saved:.0%}" if row.nbytes else "-",
            f"{row.drain * 1e3:.0f}",
        )
    for name in failed:
        numbers = next((row for row in table_rows if row.name == name), None)
        shown.add_row(f"{name}, later" if numbers else name, "failed", *["-"] * (len(shown.columns) - 2))
    return shown


def machine() -> dict[str, Any]:
    """What the numbers depend on, without names."""
    import lightning

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 30)),
        "gpus": torch.cuda.device_count(),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def as_dict(
    measurements: Measurements, table_rows: Sequence[Row], absent: Mapping[str, str], **facts: Any
) -> dict[str, Any]:
    """JSON-ready: facts, rows, and every single measurement (milliseconds)."""
    return {
        **facts,
        "state_nbytes": measurements.state_nbytes,
        "memcpy_ms": [_ms(t) for t in measurements.memcpy],
        "rows": [asdict(row) for row in table_rows],
        "not_run": dict(absent),
        "failed": dict(measurements.failed.reasons),
        "samples": [
            {
                "contestant": s.contestant,
                "reference_ms": [_ms(t) for t in s.reference],
                "saved_ms": [_ms(t) for t in s.saved],
                "hooks_ms": [_ms(t) for t in s.hooks],
                "reference_thread_cpu_ms": [_ms(t) for t in s.reference_thread_cpu],
                "thread_cpu_ms": [_ms(t) for t in s.thread_cpu],
                "drain_ms": _ms(s.drain),
                "nbytes": s.nbytes,
                "kept": s.kept,
                "asked": s.asked,
            }
            for s in measurements.samples
        ],
    }


def _ms(secs: float) -> float:
    return round(secs * 1e3, 2)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces the file at once: one that is written anew after every contestant is never half there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(path)


def plot(path: Path, runs: Mapping[str, Sequence[Row]], memcpy_ms: float) -> bool:
    """Bars of stall and hook time per contestant, one panel per storage; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(runs), figsize=(6.2 * len(runs) + 1, 4.6), sharey=True, squeeze=False)
    for panel, (storage, made) in zip(panels[0], runs.items(), strict=True):
        places = range(len(made))
        stalls = [row.stall * 1e3 for row in made]
        spread = [[(r.stall - r.low) * 1e3 for r in made], [(r.high - r.stall) * 1e3 for r in made]]
        panel.barh([p + 0.2 for p in places], [row.hook * 1e3 for row in made], 0.38, label="in hooks", color="#4878a8")
        panel.barh(
            [p - 0.2 for p in places],
            stalls,
            0.38,
            xerr=spread,
            label="iteration slower by (median and range of rounds)",
            color="#e0903c",
            error_kw={"elinewidth": 1, "capsize": 2},
        )
        panel.axvline(memcpy_ms, color="black", linestyle=":", linewidth=1, label="one warm memcpy of the state")
        panel.set_yticks(list(places), [row.name for row in made])
        panel.invert_yaxis()
        panel.set_xlabel("ms per iteration with a checkpoint")
        panel.set_title(f"checkpoints on {storage}", fontsize=10)
        panel.grid(axis="x", linewidth=0.3)
    panels[0][-1].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def show(
    console: Console, table_rows: Sequence[Row], measurements: Measurements, absent: Mapping[str, str], title: str
) -> None:
    """Print the table and what is needed to read it."""
    console.print(table(table_rows, measurements.failed.reasons, title))
    if measurements.memcpy:
        secs = min(measurements.memcpy)
        console.print(f"warm memcpy of the {measurements.state_nbytes / MIB:.0f} MiB of state: {secs * 1e3:.0f} ms")
    console.print("* does not sync what it wrote to the disk")
    for line in (*(f"not run: {name}: {reason}" for name, reason in absent.items()), *measurements.failed.lines()):
        console.print(line, markup=False, soft_wrap=True)
