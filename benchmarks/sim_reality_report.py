"""What the comparison found: a table, JSON, and the same in Markdown."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.table import Table

from benchmarks.sim_reality_compare import NEARBY_SECS, Comparison, Told

ROWS = (
    ("ETTR", "ettr", "{:.4f}", 1.0),
    ("iterations that remain", "steps", "{:.0f}", 1.0),
    ("down, s", "down", "{:.1f}", 1.0),
    ("lost, s", "lost", "{:.1f}", 1.0),
    ("slowed, s", "slowed", "{:.1f}", 1.0),
    ("snapshots, MB", "snapshot_bytes", "{:.0f}", 1e6),
    ("PLT, %", "plt", "{:.3f}", 0.01),
    ("rank-iterations again", "again", "{:.0f}", 1.0),
    ("log of messages, KB per iteration", "logged", "{:.0f}", 1e3),
    ("log of messages held, MB", "log_held", "{:.2f}", 1e6),
    ("log brought, KB per iteration again", "brought", "{:.0f}", 1e3),
)


def cells(told: Told) -> list[str]:
    """As in ``ROWS``."""
    return [form.format(getattr(told, name) / unit) for _, name, form, unit in ROWS]


def table(results: Sequence[Comparison]) -> Iterator[Table | str]:
    """For the terminal: measured and simulated side by side."""
    grid = Table(title="Measured | simulated from the run's own profile, same kills", title_justify="left")
    grid.add_column("")
    for one in results:
        grid.add_column(one.title, justify="right")
        grid.add_column("simulated", justify="right")
    both = [column for one in results for column in (cells(one.real), cells(one.simulated))]
    for (title, *_), *row in zip(ROWS, *both, strict=True):
        grid.add_row(title, *row)
    yield grid
    for one in results:
        yield summary(one)


def summary(one: Comparison) -> str:
    """In a line: the difference, and what other failures of the same mean would do."""
    parts = ", ".join(f"{name} {part:+.2%}" for name, part in one.parts.items())
    anew = "" if one.anew is None else f"; simulated with new processes after each kill, the ETTR is {one.anew:.4f}"
    return (
        f"{one.title}: simulated ETTR {one.difference:+.2%} of the measured one ({parts}); {len(one.kills)} kills, "
        f"restarts {min(one.restarts, default=0):.1f} to {max(one.restarts, default=0):.1f} s. Simulated with each "
        f"kill up to {NEARBY_SECS:g} s sooner or later {_spread(one.nearby)}; with other kills of the same mean "
        f"{_spread(one.spread)}. Waits measured {one.stall_secs:.2f} s; an iteration without checkpoints and failures "
        f"takes {one.clean_secs * 1e3:.1f} ms{anew}"
    )


def _spread(ettrs: Sequence[float]) -> str:
    if len(ettrs) < 2:
        return "not at all, a restart takes longer than that"
    return f"{mean(ettrs):.4f} ± {stdev(ettrs):.4f} ({ettrs[0]:.3f} to {ettrs[-1]:.3f})"


def write(path: Path, results: Sequence[Comparison], settings: Mapping[str, Any]) -> None:
    """``path`` and the .md beside it. Names no path of this machine."""
    known = ("minutes", "mtbf", "policies", "seed", "calibration")
    body = {
        "kind": "sim_reality",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": {name: settings[name] for name in known},
        "runs": [{**asdict(one), "difference": one.difference, "parts": one.parts} for one in results],
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(_markdown(results, body)) + "\n")


def machine() -> dict[str, Any]:
    """Of what the figures were taken on. load: of the last quarter of an hour, other programs included. nice: the
    benchmark's own; below 0 it goes before them."""
    return {
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "load": round(os.getloadavg()[2], 2),
        "nice": os.nice(0),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """Linux tells the model in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _markdown(results: Sequence[Comparison], body: Mapping[str, Any]) -> Iterator[str]:
    settings, host = body["settings"], body["machine"]
    policies = " ".join(settings["policies"])
    nice = f", with the benchmark at nice {host['nice']}" if host["nice"] else ""
    yield "# Simulator against reality"
    yield ""
    yield (
        f"Written by `python benchmarks/sim_reality.py --minutes {settings['minutes']:g} --mtbf {settings['mtbf']:g} "
        f"--seed {settings['seed']} --policies {policies}` on {host['cpus']} processors "
        f"({host['processor']}), Python {host['python']}, "
        f"torch {host['torch']}, load of the last 15 minutes {host['load']}{nice}. Each run was killed by SIGKILL "
        f"{len(results[0].kills)} times in {results[0].secs:.0f} s, and is simulated from the profile it wrote, with "
        "kills at the same moments."
    )
    yield ""
    yield "| | " + " | ".join(f"{one.title} | simulated" for one in results) + " |"
    yield "|---|" + "--:|" * (2 * len(results))
    both = [column for one in results for column in (cells(one.real), cells(one.simulated))]
    for (title, *_), *row in zip(ROWS, *both, strict=True):
        yield "| " + " | ".join([title, *row]) + " |"
    yield ""
    yield from (f"- {summary(one)}" for one in results)
    yield ""
    yield (
        "ETTR: iterations that are part of the state at the end, times the length of one without checkpoints and "
        "failures, over the time on the clock, which begins when the first iteration is done. Down: from a kill to an "
        "iteration of usual length, with loading and computing again. Lost: iterations that failures undid, and parts "
        "of iterations. Slowed: all other time, in which iterations waited or took longer than without checkpoints. "
        "Where between two checkpoints a kill falls is luck: kills that are moved a little show how much. Other kills "
        "are drawn without memory, of the same mean. ± is one standard deviation."
    )
    yield ""
    yield from _RATHER


_RATHER = (
    "What a simulation cannot know, by the part of the difference that it is in:",
    "",
    "- down: every restart takes as long as the mean of them. What a kill cuts short is cut short at another point; "
    "loading is reckoned from the rate at which snapshots are written, and a sparse window's replay from the share of "
    "weight gradients that it leaves out. That ranks agree on what to load takes longer than the bytes, by a tenth of "
    "a second to a whole one on a busy machine. A pipeline stage that goes back alone is reckoned without bubbles.",
    "- lost: where between two checkpoints a kill falls, for the simulation is a few iterations off by then. With n "
    "iterations between checkpoints, that is about n / sqrt(12) iterations per kill, in either direction. Likewise the "
    "iterations of all ranks that are computed again, those of a window included.",
    "- slowed: iterations and snapshots take their mean over the run. The profile lacks the last half second of a "
    "life; what other programs do to some lives only is not told apart.",
    "- PLT: the simulated router draws its load anew, as skewed as the run's. The real one's is uneven in another way, "
    "and moves while it learns.",
)
