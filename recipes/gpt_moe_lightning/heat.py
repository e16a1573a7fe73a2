"""Which experts a failure would throw back how far, over the whole run: as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipes.gpt_moe_lightning.summary import RunSummary


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


def top_of(runs: Sequence[RunSummary], panel: Panel) -> int:
    """The largest number of a panel in any of the runs."""
    return max((int(run.tables(panel.name)[1].max()) for run in runs), default=1) or 1


def draw_heat(figure: Any, runs: Sequence[RunSummary], panels: Sequence[Panel] = PANELS) -> None:
    """A row per run and a column per panel; the colours of a column mean the same in all its rows."""
    from moe_ckpt.metrics import draw_over_time  # imports torch

    partial = partial_runs(runs)
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
