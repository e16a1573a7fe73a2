"""Tokens lost by partial checkpoints: load-aware selection beside taking turns, and Dynamic-K at work.

No model is trained: the library's policies and ledgers are driven by drawn routing counts and failures (moc_sim.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.moc_sim import SimulatedRun, catalog
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.tokens import Counts
from moe_ckpt.policies import MoC, Policy
from moe_ckpt.policies.selectors import SELECTORS

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "lost_tokens.png"
SKEWNESS = (0.001, 0.01, 0.05, 0.1, 0.3, 0.6)
SHAPES = ((4, 8, 1, 1), (4, 8, 1, 4), (4, 8, 2, 1), (4, 8, 4, 1), (4, 64, 1, 1), (4, 64, 1, 4), (4, 64, 4, 1))
"""(layers, experts, K, ranks). With 4 ranks every rank's capacity is used up at each checkpoint."""
PLANNED = ((24, 64, 8), (48, 128, 16))
_EXAMPLE = "example: python benchmarks/lost_tokens.py --seeds 2 --steps 400 --shapes 2    (about a minute)"


@dataclass(frozen=True)
class Workload:
    """What is routed, and how often it fails.

    skewness: wanted normalised HHI of a layer's routing, S = (sum p^2 - 1/E) / (1 - 1/E) (MoEvement, appendix D).
    tokens: assignments per layer and step. swap_steps: every so many steps, two experts of each layer swap their
    popularity (drift that leaves S as it is). mtbf_steps: mean steps between failures.
    """

    layers: int = 4
    experts: int = 8
    ranks: int = 1
    skewness: float = 0.1
    tokens: int = 4096
    steps: int = 1000
    mtbf_steps: int = 50
    swap_steps: int = 50

    def popularity(self, rng: np.random.Generator) -> np.ndarray:
        """``[L, E]`` from a symmetric Dirichlet: of its mean S is 1 / (alpha*E + 1)."""
        alpha = (1 / self.skewness - 1) / self.experts
        return rng.dirichlet(np.full(self.experts, alpha), self.layers)


@dataclass(frozen=True)
class Outcome:
    """history: (iteration, PLT, K) of every iteration. saved_per_layer: experts per layer and checkpoint, mean."""

    skewness: float
    lost_tokens: int
    plt: float
    faults: int
    history: tuple[tuple[int, float, int], ...]
    saved_per_layer: float


def skewness(popularity: np.ndarray) -> float:
    """Normalised HHI, mean over layers."""
    experts = popularity.shape[-1]
    return float(((popularity**2).sum(-1) - 1 / experts).mean() / (1 - 1 / experts))


def simulate(policy: Policy, work: Workload, seed: int) -> Outcome:
    """One run; the same seed gives the same routing and the same failures, whatever the policy."""
    rng = np.random.default_rng(seed)
    shares = work.popularity(rng)
    result = skewness(shares)
    run = SimulatedRun(policy, catalog(work.layers, work.experts), work.ranks)
    history, saved = [], 0
    for step in range(work.steps):
        if step and step % work.swap_steps == 0:
            for row in shares:
                pair = rng.choice(work.experts, 2, replace=False)
                row[pair] = row[pair[::-1]]
        plan = run.step(rng.multinomial(work.tokens, shares))
        saved += sum(op.startswith("expert/") for op in plan.full)
        if rng.random() < 1 / work.mtbf_steps:
            run.fail()
        history.append((step, run.run_ledger.tokens.plt, plan.k or 0))
    tokens = run.run_ledger.tokens
    return Outcome(
        result, tokens.lost_tokens, tokens.plt, len(tokens.faults), tuple(history), saved / work.steps / work.layers
    )


def compare(shapes: Sequence[tuple[int, int, int, int]], work: Mapping[str, Any], seeds: int) -> list[dict[str, Any]]:
    """One row per shape and skewness: lost tokens of every selector over those of ``sequential``."""
    rows = []
    for layers, experts, k, ranks in shapes:
        for target in SKEWNESS:
            load = Workload(layers, experts, ranks, target, **work)
            runs = {s: [simulate(MoC(k=k, selector=s), load, seed) for seed in range(seeds)] for s in SELECTORS}
            lost = {s: sum(o.lost_tokens for o in outcomes) for s, outcomes in runs.items()}
            base, others = runs["sequential"], [s for s in runs if s != "sequential"]
            item = {
                s: [o.lost_tokens / max(b.lost_tokens, 1) for o, b in zip(runs[s], base, strict=True)] for s in runs
            }
            rows.append(
                {
                    "layers": layers, "experts": experts, "k": k, "ranks": ranks, "wanted_skewness": target,
                    "skewness": round(float(np.mean([o.skewness for o in base])), 4),
                    "faults": [o.faults for o in base],
                    "plt": {s: round(float(np.mean([o.plt for o in runs[s]])), 5) for s in runs},
                    "lost_over_sequential": {s: round(lost[s] / max(lost["sequential"], 1), 4) for s in others},
                    "range_over_seeds": {s: [round(min(item[s]), 4), round(max(item[s]), 4)] for s in others},
                }
            )  # fmt: skip
    return rows


def planning_ms(repeats: int = 30) -> dict[str, dict[str, float]]:
    """Median milliseconds of processor time of ``plan`` alone, per ``layers x experts / ranks`` and kind of MoC.

    At the start of a run, when a budget makes checkpoints hold most experts.
    """
    results: dict[str, dict[str, float]] = {}
    for layers, experts, ranks in PLANNED:
        rng = np.random.default_rng(0)
        shares = rng.dirichlet(np.full(experts, 0.2), layers)
        kinds = {s: MoC(selector=s) for s in SELECTORS} | {
            f"{s}, snapshot_k=8, plt_budget": MoC(selector=s, snapshot_k=8, plt_budget=0.05) for s in SELECTORS
        }
        grid = results.setdefault(f"{layers} x {experts} / {ranks}", {})
        for name, policy in kinds.items():
            run = SimulatedRun(policy, catalog(layers, experts), ranks)
            times = []
            for _ in range(repeats):
                counts: Counts = rng.multinomial(4096, shares)
                run.step(counts)
                context = run.run_ledger.context(run.now + 1, everywhere(run.model.layers, ranks))
                began = time.thread_time()
                policy.plan(context)
                times.append((time.thread_time() - began) * 1e3)
            grid[name] = round(median(times[3:]), 3)
    return results


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table(title="lost tokens over those of sequential (lowest and highest seed)", title_justify="left")
    for column in ("L x E", "K", "ranks", "skewness S", "faults", "PLT sequential", *list(SELECTORS)[1:]):
        shown.add_column(column, justify="right")
    for row in rows:
        ratios = [
            f"{ratio:.2f} ({low:.2f}..{high:.2f})"
            for ratio, (low, high) in zip(
                row["lost_over_sequential"].values(), row["range_over_seeds"].values(), strict=True
            )
        ]
        shown.add_row(
            f"{row['layers']} x {row['experts']}", str(row["k"]), str(row["ranks"]), f"{row['skewness']:.3f}",
            f"{min(row['faults'])}-{max(row['faults'])}", f"{row['plt']['sequential']:.2%}", *ratios,
        )  # fmt: skip
    return shown


def dynamic(work: Mapping[str, Any], seed: int = 0) -> dict[str, Outcome]:
    """Longer runs that fail as often, with and without a budget."""
    load = Workload(4, 64, 1, 0.05, **{**work, "steps": 3 * work["steps"]})
    return {
        "K = 1, no budget": simulate(MoC(selector="load_aware"), load, seed),
        "plt_budget = 0.05": simulate(MoC(selector="load_aware", plt_budget=0.05), load, seed),
        "plt_budget = 0.0375": simulate(MoC(selector="load_aware", plt_budget=0.0375), load, seed),
    }


SPANS = ((1, 100), (300, 600), (1500, 2000))
"""First and last steps of the means below."""


def rare_storage(work: Mapping[str, Any], intervals: Sequence[int] = (1, 10, 50)) -> dict[str, list[float]]:
    """Experts that checkpoints hold per layer, means over ``SPANS``, by the steps from one on storage to the next.

    The budget bounds what storage lacks, while memory that outlives the process has a checkpoint of each step (MoC,
    ``plt_budget=0.05``, 8 experts, K = 1). Nothing fails.
    """
    results = {}
    for every in intervals:
        load = Workload(**work)
        rng = np.random.default_rng(0)
        shares, model = load.popularity(rng), catalog(load.layers, load.experts)
        run = SimulatedRun(MoC(plt_budget=0.05), model, storage_every=every)
        held = []
        for _ in range(SPANS[-1][1]):
            plan = run.step(rng.multinomial(load.tokens, shares))
            held.append(sum(op.startswith("expert/") for op in plan.full) / load.layers)
        results[str(every)] = [round(float(np.mean(held[first - 1 : last])), 2) for first, last in SPANS]
    return results


def plot(path: Path, rows: Sequence[Mapping[str, Any]], runs: Mapping[str, Outcome]) -> bool:
    """Ratios by skewness, and PLT and K of the runs with a budget; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.8))
    shapes = list(dict.fromkeys((r["layers"], r["experts"], r["k"], r["ranks"]) for r in rows))
    colours = matplotlib.colormaps["tab10"]
    for number, shape in enumerate(shapes):
        mine = [r for r in rows if (r["layers"], r["experts"], r["k"], r["ranks"]) == shape]
        label = f"E={shape[1]}, K={shape[2]}" + (f", {shape[3]} ranks, no capacity to spare" if shape[3] > 1 else "")
        for selector, style in (("load_aware", "-o"), ("least_loss", ":^")):
            left.plot(
                [r["skewness"] for r in mine], [r["lost_over_sequential"][selector] for r in mine], style,
                color=colours(number), markersize=4, linewidth=1.2, label=label if selector == "load_aware" else None,
            )  # fmt: skip
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xscale("log")
    left.set_ylim(0)
    left.set_xlabel("skewness of routing S (normalised HHI)")
    left.set_ylabel("lost tokens / those of sequential")
    left.set_title("solid: load_aware (the paper's rule)    dotted: least_loss", fontsize=10)
    left.legend(fontsize=7)
    left.grid(linewidth=0.3)
    levels = right.twinx()
    for number, (name, run) in enumerate(runs.items()):
        steps, plts, ks = zip(*run.history, strict=True)
        right.plot(steps, [100 * plt for plt in plts], color=colours(number), linewidth=1.3, label=name)
        levels.step(steps, ks, color=colours(number), linewidth=0.9, linestyle="--", where="post")
    for budget, colour in ((5, 1), (3.75, 2)):
        right.axhline(budget, color=colours(colour), linewidth=0.7, linestyle=":")
    right.set_ylim(0, 15)
    levels.set_yscale("log", base=2)
    levels.set_ylim(0.9, 80)
    levels.set_ylabel("K (dashed)")
    right.set_xlabel("iterations, those done again included")
    right.set_ylabel("PLT in percent (solid), budgets (dotted)")
    right.set_title(f"Dynamic-K: 64 experts, {next(iter(runs.values())).faults} failures", fontsize=10)
    right.legend(fontsize=8, loc="upper right")
    right.grid(linewidth=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="iterations per run, those done again included")
    parser.add_argument("--mtbf-steps", type=int, default=50, help="mean iterations between failures")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument(
        "--write", action="store_true", help="keep the JSON in results/ and the picture in docs/images/"
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    work = {"steps": options.steps, "mtbf_steps": options.mtbf_steps}
    with console.status("selectors"):
        rows = compare(SHAPES[: options.shapes], work, options.seeds)
    console.print(_table(rows))
    with console.status("Dynamic-K"):
        runs = dynamic(work)
    for name, run in runs.items():
        console.print(f"{name}: PLT {run.plt:.2%} after {run.faults} failures, "
                      f"{run.saved_per_layer:.1f} experts saved per layer and checkpoint")  # fmt: skip
    rare = rare_storage(work)
    for every, means in rare.items():
        text = ", ".join(f"{mean:.1f} in steps {a} to {b}" for mean, (a, b) in zip(means, SPANS, strict=True))
        console.print(f"storage every {every} steps, memory at each: experts per layer and checkpoint {text}")
    planned = planning_ms()
    for grid, times in planned.items():
        for name, ms in times.items():
            console.print(f"plan, {grid} ranks, {name}: {ms:.2f} ms")
    if options.write:
        facts = {"machine": report.machine(), "work": asdict(Workload(**work)), "seeds": options.seeds}
        budgets = {
            name: {"plt": r.plt, "highest_plt": max(plt for _, plt, _ in r.history), "faults": r.faults}
            | {"saved_per_layer": r.saved_per_layer}
            for name, r in runs.items()
        }
        content = {**facts, "rows": rows, "dynamic_k": budgets, "rare_storage": rare, "plan_ms": planned}
        report.write_json(options.out / "lost_tokens.json", content)
        plot(options.picture, rows, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
