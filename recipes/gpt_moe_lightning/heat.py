"""Which experts a failure would throw back how far, over the whole run: as a picture, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_ckpt.metrics.plotting import draw_over_time
from recipes.gpt_moe_lightning.summary import RunSummary, Tables

SHADES = " ░▒▓█"
NEVER = "·"
MAX_ROWS = 32
LABEL_WIDTH = 8
MAX_COLUMNS = 60


@dataclass(frozen=True)
class Panel:
    """name: of the tables in the diary."""

    name: str
    title: str
    unit: str


PANELS = (
    Panel("ages", "iterations since saved", "iterations"),
    Panel("unsaved", "unsaved tokens", "tokens"),
)


def partial_runs(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Those that save some experts at a time; with the others all experts are alike."""
    return [run for run in runs if run.experts_per_layer and run.tables("ages")[0]]


# --- text ---


def heat_text(runs: Sequence[RunSummary], width: int) -> RenderableType:
    """For each run that saves some experts both panels side by side, a row per expert, a column per few steps.

    A shade means the same in all runs. width: of the terminal, in characters.
    """
    partial = partial_runs(runs)
    tops = [top_of(partial, panel) for panel in PANELS]
    return Group(*(_run_text(run, tops, width) for run in partial))


def top_of(runs: Sequence[RunSummary], panel: Panel) -> int:
    """The largest number of a panel in any of the runs."""
    return max((int(run.tables(panel.name)[1].max()) for run in runs), default=1) or 1


def _run_text(run: RunSummary, tops: Sequence[int], width: int) -> RenderableType:
    steps, ages = run.tables("ages")
    columns = min(len(steps), MAX_COLUMNS, max(10, (width - LABEL_WIDTH) // len(PANELS) - 2))
    grid = Table.grid(padding=(0, 1))
    marks = kill_marks(steps, run.restart_steps, columns)
    headings = [Text(f"{panel.title}, █ = {top:,}\n{marks}") for panel, top in zip(PANELS, tops, strict=True)]
    bodies = [
        Text("\n".join(shaded(run.tables(panel.name)[1], columns, top)), style="cyan")
        for panel, top in zip(PANELS, tops, strict=True)
    ]
    grid.add_row(Text("layer/\nexpert", style="dim"), *headings)
    grid.add_row(Text("\n".join(row_labels(*ages.shape[1:])), style="dim"), *bodies)
    return Group(Text(f"\n{run.title} (▾ = kill)", style="bold"), grid)


def _per_row(experts: int, layers: int) -> int:
    """Experts that share a row, so that the rows fit on a screen."""
    return min(experts, ceil(layers * experts / MAX_ROWS))


def row_labels(layers: int, experts: int) -> list[str]:
    together = _per_row(experts, layers)
    labels = [(first, min(first + together, experts) - 1) for first in range(0, experts, together)]
    return [f"{layer} / {a}" + (f"-{b}" if b > a else "") for layer in range(layers) for a, b in labels]


def shaded(tables: Tables, columns: int, top: int) -> list[str]:
    """A line per row and a sign per column, of the largest value in it. tables: ``[T, L, E]``; ``top`` is black."""
    _, layers, experts = tables.shape
    together = _per_row(experts, layers)
    starts = range(0, experts, together)
    rows = np.concatenate([np.maximum.reduceat(tables[:, layer], starts, axis=1) for layer in range(layers)], axis=1)
    cells = np.array([part.max(axis=0) for part in np.array_split(rows, columns)])
    return ["".join(_shade(int(value), top) for value in row) for row in cells.T]


def _shade(value: int, top: int) -> str:
    return NEVER if value < 0 else SHADES[ceil(value / top * (len(SHADES) - 1))]


def kill_marks(steps: Sequence[int], kills: Sequence[int], columns: int) -> str:
    """A line with a mark above the column of the last step before each kill."""
    parts = np.array_split(np.asarray(steps), columns)
    return "".join("▾" if any(part[0] <= kill <= part[-1] for kill in kills) else " " for part in parts)


# --- picture ---


def draw_heat(figure: Any, runs: Sequence[RunSummary], panels: Sequence[Panel] = PANELS) -> None:
    """A row per run and a column per panel; the colours of a column mean the same in all its rows."""
    partial = partial_runs(runs)
    if not partial:
        return
    grid = figure.subplots(len(partial), len(panels), squeeze=False)
    for column, panel in enumerate(panels):
        top = top_of(partial, panel)
        for axes, run in zip(grid[:, column], partial, strict=True):
            steps, tables = run.tables(panel.name)
            draw_over_time(axes, tables, panel.unit, steps=steps, vmax=top)
            for step in run.restart_steps:
                axes.axvline(step, color="white", linewidth=1, linestyle=":")
            axes.set_title(f"{run.title}: {panel.title}", loc="left", fontsize=10)
            axes.set_xlabel("iteration")
