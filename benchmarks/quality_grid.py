"""PEC's figure 2 (arXiv 2408.04307) with real runs: validation loss and PLT over K and the interval, one failure.

The tiny GPT-MoE, killed once by ``kill -9`` in its second half, under MoC with K of 8 experts at each interval, and
never, with the same seeds. ``sim_papers.py`` puts what is kept beside the paper's figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.table import Table

from benchmarks.failing import Failures
from benchmarks.quality import Arm, Options, noise, run_all
from benchmarks.report import RESULTS, machine, write_json
from recipes.gpt_moe_lightning.summary import RunSummary

_EXAMPLE = "example: python benchmarks/quality_grid.py --steps 120 --seeds 1 --k 1 --every 1 16"
NEVER = Arm("never failing", ("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=100"), failing=False)
RESULT = "quality_grid.json"


def arm(k: int, every: int) -> Arm:
    """MoC with that K at that interval, and no budget that would raise K."""
    overrides = ("moe_ckpt/policy=moc", f"moe_ckpt.policy.k={k}", f"moe_ckpt.policy.every_n_steps={every}")
    return Arm(f"K={k}, every {every}", overrides)


def cells(
    results: Mapping[str, Sequence[RunSummary]], ks: Sequence[int], intervals: Sequence[int]
) -> list[dict[str, Any]]:
    """One per K and interval: PLT, and the loss beyond that of the same seed without a failure, means over seeds."""
    base = results[NEVER.name]
    entries = []
    for k in ks:
        for every in intervals:
            runs = results.get(arm(k, every).name)
            if runs is None:
                continue
            gaps = [(run.val_loss or 0.0) - (never.val_loss or 0.0) for run, never in zip(runs, base, strict=True)]
            entries.append(
                {"k": k, "every": every, "plt": mean(run.plt for run in runs), "gap": mean(gaps), "gaps": gaps}
                | {"kills": [run.kills for run in runs], "losses": [run.val_loss for run in runs]}
            )
    return entries


def show(console: Console, summary: Sequence[Mapping[str, Any]], chance: float) -> None:
    """As a table."""
    table = Table(title=f"beyond the same seed without a failure; chance {chance:.4f}", title_justify="left")
    for title in ("K of 8", "every", "PLT", "loss", "of each seed", "kills"):
        table.add_column(title, justify="right")
    for cell in summary:
        item = "  ".join(f"{gap:+.4f}" for gap in cell["gaps"])
        kills = " ".join(map(str, cell["kills"]))
        table.add_row(str(cell["k"]), str(cell["every"]), f"{cell['plt']:.2%}", f"{cell['gap']:+.4f}", item, kills)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--steps", type=int, default=300, help="iterations per run (default 300)")
    parser.add_argument("--seeds", type=int, default=3, help="runs per cell (default 3)")
    parser.add_argument("--k", type=int, nargs="+", default=(1, 2, 4), help="experts per layer, of 8")
    parser.add_argument("--every", type=int, nargs="+", default=(1, 16, 64), help="iterations between checkpoints")
    parser.add_argument("--jobs", type=int, default=Options.jobs, help="runs at the same time (default 2)")
    parser.add_argument("--write", action="store_true", help="keep JSON in results/")
    parser.add_argument("--out", type=Path, default=RESULTS, help="another directory for --write")
    arguments = parser.parse_args(argv)
    options = Options(arguments.steps, arguments.seeds, 1, arguments.jobs)
    console = Console(width=None if sys.stdout.isatty() else 150)
    arms = [NEVER, *(arm(k, every) for k in arguments.k for every in arguments.every)]
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_grid_") as home:
        failed = Failures()
        result = run_all(arms, options, Path(home), console, failed)
    if NEVER.name in result:
        gaps_of_cells, chance = cells(result, arguments.k, arguments.every), noise(result[NEVER.name])
        show(console, gaps_of_cells, chance)
        if arguments.write:
            record = {"machine": machine(), "steps": options.steps, "seeds": options.seeds, "chance": chance}
            losses = [run.val_loss for run in result[NEVER.name]]
            write_json(
                arguments.out / RESULT, record | {"never": losses, "cells": gaps_of_cells, "failed": failed.reasons}
            )
    console.print(*failed.lines(), sep="\n", markup=False, soft_wrap=True)
    return 1 if failed.reasons else 0


if __name__ == "__main__":
    sys.exit(main())
