"""What lost tokens do to the model: the tiny GPT-MoE, killed four times, with the PLT budget kept and broken.

Three seeds of a run that never fails say how much the validation loss differs by chance. Then the same seeds
with ``kill -9``, under MoC within its budget, and under MoC that saves so little that the budget breaks. A
second comparison leaves the router unbalanced and counts what sequential and load-aware selection lose under
the same kills. A third one runs MoEtion with few experts per checkpoint, with and without the capacity boost, and
"mlt", which is not among those run by default, does that for a range of tokens lost per failure (the paper's table 1).
See docs/moc.md and docs/moetion.md.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.failing import Failures
from benchmarks.report import RESULTS, machine, write_json
from recipes.gpt_moe_lightning.summary import RunSummary, summarise

_EXAMPLE = """example:
  python benchmarks/quality.py --steps 120 --seeds 1
  python benchmarks/quality.py --write
"""
ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "quality.png"
_UNBALANCED = "model.aux_loss=0"


@dataclass(frozen=True)
class Arm:
    """One way to run: policy overrides, and whether it is killed."""

    name: str
    overrides: tuple[str, ...]
    failing: bool = True


QUALITY = (
    Arm("never failing", ("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=100"), failing=False),
    Arm("MoC k=1, budget 5 %", ("moe_ckpt/policy=moc", "moe_ckpt.policy.plt_budget=default")),
    Arm("MoC k=1, budget broken", ("moe_ckpt/policy=moc", "moe_ckpt.policy.every_n_steps=75")),
)
SELECTION = (
    Arm("sequential", ("moe_ckpt/policy=moc", "moe_ckpt.policy.selector=sequential", _UNBALANCED)),
    Arm("load-aware", ("moe_ckpt/policy=moc", "moe_ckpt.policy.selector=load_aware", _UNBALANCED)),
)

_FEW = ("moe_ckpt/policy=moetion", "moe_ckpt.policy.experts=1", "moe_ckpt.policy.every_n_steps=5")
BOOST = (
    Arm("MoEtion, 1 expert, no boost", (*_FEW, "moe_ckpt.policy.capacity_boost=null")),
    Arm("MoEtion, 1 expert, boost", _FEW),
)
_LOSSES = ((2, 1), (1, 1), (1, 2), (1, 4))
"""Experts per checkpoint and its interval: at 300 steps a failure loses about 1, 2, 4 and 7 % of the tokens (MLT)."""


def _losing(experts: int, every: int, *, boost: bool) -> Arm:
    given = ("moe_ckpt/policy=moetion", f"moe_ckpt.policy.experts={experts}", f"moe_ckpt.policy.every_n_steps={every}")
    off = () if boost else ("moe_ckpt.policy.capacity_boost=null",)
    return Arm(f"MoEtion, {experts} of 8 every {every}, {'boost' if boost else 'no boost'}", (*given, *off))


MLT = tuple(_losing(*each, boost=boost) for each in _LOSSES for boost in (False, True))
COMPARISONS = {
    "quality": QUALITY,
    "selection": SELECTION,
    "boost": (QUALITY[0], *BOOST),
    "mlt": (QUALITY[0], *MLT),
}


@dataclass
class Options:
    steps: int = 600
    seeds: int = 3
    kills: int = 4
    jobs: int = 2
    extra: tuple[str, ...] = field(default_factory=tuple)


def command(arm: Arm, seed: int, options: Options, run_dir: Path) -> list[str]:
    """The torchrun command of one run; torchrun starts a killed process again."""
    overrides = [*arm.overrides, f"seed={seed}", f"trainer.max_steps={options.steps}", f"run_dir={run_dir}"]
    overrides += ["trainer.progress_bar=false", *options.extra]
    if arm.failing:
        overrides += ["faults=seeded", f"faults.kills={options.kills}", f"faults.seed={seed}", "faults.after=0.5"]
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1",
        f"--max-restarts={options.kills + 2}", "--monitor-interval=0.1",
        "-m", "recipes.gpt_moe_lightning.train", *overrides,
    ]  # fmt: skip


def run(arm: Arm, seed: int, options: Options, home: Path) -> RunSummary:
    """One run to its end. Raises ``RuntimeError`` with the end of its output when it fails."""
    run_dir = home / re.sub(r"\W+", "_", f"{arm.name} {seed}")
    run_dir.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    output = run_dir / "output.log"
    with output.open("wb") as file:
        words = command(arm, seed, options, run_dir)
        done = subprocess.run(words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        tail = "\n".join(output.read_text(errors="replace").splitlines()[-60:])
        raise RuntimeError(f"{arm.name}, seed {seed}, ended with code {done.returncode}:\n{tail}")
    return summarise(arm.name, run_dir)


def run_all(
    arms: Sequence[Arm], options: Options, home: Path, console: Console, failed: Failures
) -> dict[str, list[RunSummary]]:
    """Every arm with every seed, ``options.jobs`` at a time. An arm with a failed run is left out and named."""
    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(options.jobs) as pool:
        task = progress.add_task("runs", total=len(arms) * options.seeds)
        seeds = range(1, options.seeds + 1)
        jobs = {arm.name: [pool.submit(run, arm, seed, options, home) for seed in seeds] for arm in arms}
        for job in (job for each in jobs.values() for job in each):
            job.add_done_callback(lambda _: progress.advance(task))
        found = {}
        for name, each in jobs.items():
            with failed.of(name):
                found[name] = [job.result() for job in each]
        return found


def noise(runs: Sequence[RunSummary]) -> float:
    """Standard deviation of the final validation loss over seeds; 0 for one seed."""
    losses = [r.val_loss for r in runs if r.val_loss is not None]
    return stdev(losses) if len(losses) > 1 else 0.0


def facts(found: dict[str, list[RunSummary]]) -> dict[str, list[dict[str, Any]]]:
    """Per arm and seed: what the run's diary says."""
    return {
        name: [
            {
                "seed": seed,
                "val_loss": r.val_loss,
                "plt": r.plt,
                "mlt_worst": _newest(r, "moe_ckpt/mlt_worst"),
                "owed_tokens": _newest(r, "moe_ckpt/owed_tokens"),
                "lost_tokens": r.lost_tokens,
                "kills": r.kills,
                "recomputed": r.recomputed,
                "bytes_per_checkpoint": r.bytes_per_checkpoint,
                "skewness": _average(r, "moe_ckpt/skewness"),
            }
            for seed, r in enumerate(runs, start=1)
        ]
        for name, runs in found.items()
    }


def _average(run: RunSummary, metric: str) -> float | None:
    values = run.curve(metric)[1]
    return mean(values) if values else None


def _newest(run: RunSummary, metric: str) -> float | None:
    values = run.curve(metric)[1]
    return values[-1] if values else None


def show(console: Console, told: dict[str, list[dict[str, Any]]]) -> None:
    table = Table(title="Each cell: one seed after the other", title_justify="left")
    for title in ("", "validation loss", "PLT", "lost tokens", "kills", "load skewness"):
        table.add_column(title, justify="right" if title else "left")
    for name, runs in told.items():
        table.add_row(
            name,
            "  ".join(f"{r['val_loss']:.4f}" for r in runs),
            "  ".join(f"{r['plt']:.2%}" for r in runs),
            "  ".join(f"{r['lost_tokens']:,}" for r in runs),
            "  ".join(str(r["kills"]) for r in runs),
            "  ".join("-" if r["skewness"] is None else f"{r['skewness']:.3f}" for r in runs),
        )
    console.print(table)


def sentences(found: dict[str, list[RunSummary]]) -> list[str]:
    """The comparison in words: distances from the run of the same seed that never failed, against chance."""
    told = []
    base = found.get(QUALITY[0].name)
    if base:
        told.append(f"Chance: {noise(base):.4f} (standard deviation of the loss over {len(base)} seeds).")
        for arm in (arm for arm in (*QUALITY[1:], *BOOST, *MLT) if arm.name in found):
            gaps = [(r.val_loss or 0) - (b.val_loss or 0) for r, b in zip(found[arm.name], base, strict=True)]
            of_pairs = "" if len(gaps) < 2 else f" (paired t = {paired_t(gaps):.1f}, {len(gaps)} seeds)"
            told.append(f"{arm.name}: {mean(gaps):+.4f} from the same seed without failures{of_pairs}.")
    sequential, aware = (sum(r.lost_tokens for r in found.get(arm.name, ())) for arm in SELECTION)
    if sequential and all(arm.name in found for arm in SELECTION):
        told.append(f"Load-aware lost {aware / sequential:.2f} of the tokens that sequential lost, same kills.")
    return told


def paired_t(gaps: Sequence[float]) -> float:
    """Mean of paired differences over its standard error: how the loss differs between seeds is not in it."""
    error = stdev(gaps) / len(gaps) ** 0.5
    return mean(gaps) / error if error else 0.0


def draw(found: dict[str, list[RunSummary]], path: Path, window: int = 15) -> None:
    """Training loss and final validation loss of the quality arms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=(3, 1.2), layout="constrained")
    for at, (arm, colour) in enumerate(zip(QUALITY, ("0.2", "tab:blue", "tab:red"), strict=True)):
        runs = found[arm.name]
        for number, each in enumerate(runs):
            steps, losses = each.curve("train/loss")
            smooth = [mean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]
            label = arm.name if not number else None
            left.plot(steps, smooth, color=colour, lw=1.2, alpha=0.8, label=label, zorder=3 - at)
            if arm.failing:
                for step in each.restart_steps:
                    left.plot([step], [smooth[min(step, len(smooth)) - 1]], "x", color=colour, ms=5)
        shares = [f"{each.plt:.1%}" for each in runs]
        right.plot([at] * len(runs), [each.val_loss for each in runs], "o", color=colour)
        right.annotate(f"PLT\n{min(shares)} to\n{max(shares)}", (at, 0.02), xycoords=("data", "axes fraction"),
                       ha="center", fontsize=7) if arm.failing else None  # fmt: skip
    left.set(xlabel="step", ylabel=f"training loss (mean of {window} steps)")
    left.legend(frameon=False)
    right.set_xticks(range(len(QUALITY)), ["never\nfailing", "budget\n5 %", "budget\nbroken"])
    right.set(ylabel="final validation loss", xlim=(-0.6, len(QUALITY) - 0.4))
    right.margins(y=0.35)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="quality.py", description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--steps", type=int, default=Options.steps, help="iterations per run (default 600)")
    made.add_argument("--seeds", type=int, default=Options.seeds, help="runs per arm (default 3)")
    made.add_argument("--kills", type=int, default=Options.kills, help="kill -9 per failing run (default 4)")
    made.add_argument("--jobs", type=int, default=Options.jobs, help="runs at the same time (default 2)")
    made.add_argument("--only", choices=tuple(COMPARISONS), help="one of the comparisons")
    made.add_argument("--dir", type=Path, default=None, help="run below this directory")
    made.add_argument("--write", action="store_true", help="keep JSON in results/ and the picture in docs/images/")
    made.add_argument("--out", type=Path, default=RESULTS, help="another directory for --write")
    made.add_argument("extra", nargs="*", metavar="KEY=VALUE", help="further overrides of the recipe")
    return made


def result_of(only: str | None) -> str:
    """Name of the file that ``--write`` makes: one for all that run by default, one for each other comparison."""
    return "quality.json" if only is None else f"quality_{only}.json"


def main(argv: Sequence[str] | None = None) -> int:
    given = parser().parse_args(argv)
    options = Options(given.steps, given.seeds, given.kills, given.jobs, tuple(given.extra))
    console = Console(width=None if sys.stdout.isatty() else 150)
    arms = COMPARISONS.get(given.only, QUALITY + SELECTION + BOOST)
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_quality_", dir=given.dir) as home:
        failed = Failures()
        found = run_all(arms, options, Path(home), console, failed)
    told = facts(found)
    show(console, told)
    for sentence in (*sentences(found), *failed.lines()):
        console.print(sentence, markup=False, soft_wrap=True)
    if given.write:
        record = {"machine": machine(), "steps": options.steps, "arms": told, "sentences": sentences(found)}
        write_json(given.out / result_of(given.only), record | {"failed": failed.reasons})
        if all(arm.name in found for arm in QUALITY):
            draw(found, PICTURE if given.out == RESULTS else given.out / PICTURE.name)
    return 1 if failed.reasons else 0


if __name__ == "__main__":
    sys.exit(main())
