"""How well small checkpoints tell what copying adds to an iteration, by how much iterations differ anyway.

Times are drawn, and go through ``run.meter``: each iteration is longer by its share of what copying adds beside
a large checkpoint, and differs at random besides. See docs/moetion.md.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, write_json
from moe_ckpt.core.cadence import BLOCK, is_small
from moe_ckpt.run.meter import COMPARED, Lap, secs_per_byte

ADDED = (0.0, 0.03, 0.05, 0.08)
DIFFER = (0.005, 0.01, 0.02, 0.05)
LARGE, SMALL = 1000, 300
"""Bytes of a checkpoint."""
CHECKPOINTS = BLOCK * (COMPARED + 2)
_EXAMPLE = "example: python benchmarks/interference.py --runs 200"


def told(added: float, differ: float, rng: random.Random) -> float:
    """What one run takes copying to add, as a portion of an iteration."""
    sizes = [SMALL if is_small(number) else LARGE for number in range(CHECKPOINTS)]
    laps = [Lap((1 + added * size / LARGE) * (1 + rng.gauss(0, differ)), size) for size in sizes]
    return LARGE * (secs_per_byte(laps) or 0.0)


def row(added: float, differ: float, runs: int) -> dict[str, Any]:
    """Of so many runs: how many count it at all, and what they take it for."""
    rng = random.Random(1)
    results = [told(added, differ, rng) for _ in range(runs)]
    tenths = quantiles(results, n=10)
    return {
        "added": added,
        "differ": differ,
        "counted": round(sum(item > 0 for item in results) / runs, 3),
        "mean": round(mean(results), 4),
        "median": round(median(results), 4),
        "tenth": round(tenths[0], 4),
        "nine_tenths": round(tenths[-1], 4),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--runs", type=int, default=1500, help="drawn for each line (default 1500)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in results/")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    rows = [row(added, differ, options.runs) for added in ADDED for differ in DIFFER]
    shown = Table(title=f"{CHECKPOINTS} checkpoints, {options.runs} runs each", title_justify="left")
    for column in ("copying adds", "iterations differ by", "counted in", "taken for", "10 % to 90 %", "mean"):
        shown.add_column(column, justify="right")
    for each in rows:
        cells = (each["added"], each["differ"], each["counted"], each["median"])
        between = f"{each['tenth']:.1%} to {each['nine_tenths']:.1%}"
        shown.add_row(*(f"{cell:.1%}" for cell in cells), between, f"{each['mean']:.1%}")
    Console(width=None if sys.stdout.isatty() else 110).print(shown)
    if options.write:
        facts = {"checkpoints": CHECKPOINTS, "small_over_large": SMALL / LARGE, "runs": options.runs}
        write_json(options.out / "interference.json", {**facts, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
