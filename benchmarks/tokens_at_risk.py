"""Tokens at risk under MoEtion: popular experts first beside taking turns, with equally many saved.

The paper's figure 11 (arXiv 2412.15411 v1) without training: the library's policy and ledger are driven by
drawn routing counts (moc_sim.py). Tokens at risk are what a recovery from the newest checkpoint would lose, as a
portion of the tokens routed so far, mean over layers (``core.tokens.tokens_at_risk``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.lost_tokens import Workload, skewness
from benchmarks.moc_sim import SimulatedRun, catalog
from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import Counts, TokenBook, tokens_at_risk
from moe_ckpt.policies import MoEtion, Policy, moetion

SKEWNESS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.6)
SHAPES = ((8, 2, 1), (16, 4, 1), (16, 6, 1), (64, 16, 1), (64, 16, 16))
"""(experts, experts saved per layer, ranks); the paper saves 25 to 40 % of E. With 16 ranks each has capacity for its
share only."""
_EXAMPLE = "example: python benchmarks/tokens_at_risk.py --seeds 2    (about 10 seconds)"


def risks(policy: Policy, work: Workload, seed: int) -> tuple[np.ndarray, float]:
    """Tokens at risk after each step since the first checkpoint, and the skewness drawn."""
    result = skewness(work.popularity(np.random.default_rng(seed)))
    run = SimulatedRun(policy, catalog(work.layers, work.experts), work.ranks)
    series = []
    for counts in _routed(work, np.random.default_rng(seed)):
        run.step(counts)
        if run.store:
            newest = TokenBook.from_dict(run.store[-1].tokens, work.layers, work.experts)
            series.append(tokens_at_risk(newest.unsaved(Tier.STORAGE), run.run_ledger.tokens.applied))
    return np.array(series), result


class InTurn(MoEtion):
    """The baseline of MoEtion's paper: each layer gets the same share, and the oldest experts come first."""

    stale_rounds = 10**9

    def _chosen(self, context: Any, *args: Any) -> Any:
        blind = replace(context.tokens, expected_unsaved={})
        return super()._chosen(replace(context, tokens=blind), *args)


def _routed(work: Workload, rng: np.random.Generator) -> Iterator[Counts]:
    """``[L, E]`` of each step: shares that drift by swaps."""
    shares = work.popularity(rng)
    for step in range(work.steps):
        if step and step % work.swap_steps == 0:
            for row in shares:
                pair = rng.choice(work.experts, 2, replace=False)
                row[pair] = row[pair[::-1]]
        yield rng.multinomial(work.tokens, shares)


def selected_again(experts: int, saved: int, skewed: float = 0.1, seeds: int = 2) -> float:
    """Portion of the experts that popular selection saves which it has saved one iteration before, after the first.

    Args:
        experts: Of a layer.
        saved: Of them, per layer on average.
        skewed: Skewness S of the drawn load, which drifts.
        seeds: Runs to take the mean of.
    """
    again = chosen = 0
    for seed in range(seeds):
        work = Workload(4, experts, 1, skewed, steps=100)
        before: set[str] = set()
        run = SimulatedRun(MoEtion(experts=saved), catalog(work.layers, experts), work.ranks)
        for counts in _routed(work, np.random.default_rng(seed)):
            now = {op for op in run.step(counts).full if op.startswith("expert/")}
            if len(now) < work.layers * experts:  # not the dense one that a run begins with
                again, chosen = again + len(now & before), chosen + len(now)
            before = now
    return again / chosen if chosen else 1.0


def compare(shapes: Sequence[tuple[int, int, int]], steps: int, seeds: int) -> list[dict[str, Any]]:
    """One row per shape and skewness: mean and highest tokens at risk of both selections."""
    rows = []
    for experts, saved, ranks in shapes:
        for target in SKEWNESS:
            work = Workload(4, experts, ranks, target, steps=steps)
            runs: dict[str, list[tuple[np.ndarray, float]]] = {
                how: [risks(kind(experts=saved), work, seed) for seed in range(seeds)]
                for how, kind in (("round_robin", InTurn), ("popular", MoEtion))
            }
            mean = {how: float(np.mean([series.mean() for series, _ in of])) for how, of in runs.items()}
            rows.append(
                {
                    "experts": experts, "saved_per_layer": saved, "ranks": ranks, "wanted_skewness": target,
                    "skewness": round(float(np.mean([result for _, result in runs["popular"]])), 4),
                    "mean": {how: round(value, 5) for how, value in mean.items()},
                    "highest": {how: round(float(max(s.max() for s, _ in of)), 5) for how, of in runs.items()},
                    "popular_over_round_robin": round(mean["popular"] / mean["round_robin"], 4),
                }
            )  # fmt: skip
    return rows


LIMITED = ((16, 4, 1), (64, 16, 1))
"""Shapes that are tried without the limit, too."""


def without_limit(steps: int, seeds: int, target: float = 0.3) -> list[dict[str, Any]]:
    """Highest tokens at risk if overdue experts might take a whole checkpoint, beside half of it, for each seed."""
    rows = []
    for experts, saved, ranks in LIMITED:
        work = Workload(4, experts, ranks, target, steps=steps)
        highest = {}
        for name, limit in (("half", moetion.most_overdue), ("all", int)):
            with mock.patch.object(moetion, "most_overdue", limit):
                result = (risks(MoEtion(experts=saved), work, seed)[0] for seed in range(seeds))
                # The beginning is left out: it is what the first rounds have at risk in any case.
                highest[name] = [round(float(series[steps // 3 :].max()), 5) for series in result]
        rows.append({"experts": experts, "saved_per_layer": saved, "wanted_skewness": target, "highest": highest})
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="tokens at risk, mean over iterations and seeds", title_justify="left")
    for column in ("E", "saved", "ranks", "skewness S", "round robin", "popular", "popular / round robin"):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(
            str(row["experts"]), str(row["saved_per_layer"]), str(row["ranks"]), f"{row['skewness']:.3f}",
            f"{row['mean']['round_robin']:.2%}", f"{row['mean']['popular']:.2%}",
            f"{row['popular_over_round_robin']:.2f}",
        )  # fmt: skip
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="iterations per run; the paper shows 100")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--write", action="store_true", help="keep the JSON in results/")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args(argv)
    rows = compare(SHAPES[: options.shapes], options.steps, options.seeds)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(_table(rows))
    unlimited = without_limit(options.steps, options.seeds)
    for row in unlimited:
        half, whole = row["highest"]["half"], row["highest"]["all"]
        times = ", ".join(f"{b / a:.1f}" if a else "-" for a, b in zip(half, whole, strict=True))
        shape = f"{row['experts']} experts, {row['saved_per_layer']} saved, after {options.steps // 3} iterations"
        console.print(f"{shape}: highest tokens at risk {times} times as high without a limit for overdue experts")
    if options.write:
        facts = {"layers": 4, "steps": options.steps, "seeds": options.seeds}
        report.write_json(options.out / "tokens_at_risk.json", {**facts, "rows": rows, "without_limit": unlimited})
    return 0


if __name__ == "__main__":
    sys.exit(main())
