"""`make demo-megatron`: the same Megatron-Core run twice, killed in one of them, and whether both end alike.

Four processes on the CPU (two pipeline stages, two expert-parallel ranks) train with the real Megatron-Core: first
without checkpoints and failures, then with kills and a part of a sparse window (MoEvement) at every iteration. Nothing
restarts by hand: torchrun starts the processes again, and they find their checkpoint.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a script, from any directory

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from recipes.demonstrating import KillNews, ended, last_words, prepare, stopped_by_sigterm  # noqa: E402
from recipes.gpt_moe_megatron.summary import ROWS, RunSummary, summarise, table_cells, verdicts  # noqa: E402

WINDOWS = ("moe_ckpt/policy=moevement", "moe_ckpt.policy.window=3")


@dataclass
class Settings:
    """extra: more Hydra overrides, for both runs. policy: of the failing one."""

    steps: int = 40
    kills: int = 2
    seed: int = 1
    out: Path = field(default_factory=lambda: Path("runs/demo-megatron"))
    policy: tuple[str, ...] = WINDOWS
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    overrides: tuple[str, ...]


def scenarios(settings: Settings) -> tuple[Scenario, Scenario]:
    title = "MoEvement W=3" if settings.policy == WINDOWS else " ".join(settings.policy)
    kills = ("faults=seeded", f"faults.kills={settings.kills}", f"faults.seed={settings.seed}")
    return (
        Scenario("never_failing", "never failing", ("~moe_ckpt",)),
        Scenario("failing", title, (*settings.policy, *kills)),
    )


def command(scenario: Scenario, settings: Settings) -> list[str]:
    """What a user would type."""
    return [
        str(ROOT / "recipes/launch/torchrun.sh"),
        "recipes/gpt_moe_megatron/train.py",
        *scenario.overrides,
        f"trainer.train_iters={settings.steps}",
        f"run_dir={(settings.out / scenario.name).absolute()}",
        *settings.extra,
    ]


def run_scenario(scenario: Scenario, settings: Settings, console: Console) -> RunSummary:
    """Run one scenario to its end. Raises ``RuntimeError`` with the end of its output when it fails."""
    run_dir = settings.out / scenario.name
    run_dir.mkdir(parents=True)
    output = run_dir / "output.log"
    environment = {**os.environ, "PYTHON": sys.executable, "MAX_RESTARTS": str(settings.kills + 2)}
    kills, began, shown = KillNews(), time.monotonic(), 0
    console.print(f"{scenario.title}: started; its output: {output}", soft_wrap=True)
    with (
        output.open("wb") as file,
        ended(
            subprocess.Popen(
                command(scenario, settings), cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        ) as process,
    ):
        while process.poll() is None:
            time.sleep(0.3)
            for line in kills.lines(run_dir):
                console.print(f"{scenario.title}: {line}", soft_wrap=True)
            reached = summarise(scenario.title, run_dir).steps
            if reached >= shown + 10:
                shown = reached
                console.print(f"{scenario.title}: iteration {reached} of {settings.steps}")
    if process.returncode:
        raise RuntimeError(last_words(scenario.title, process.returncode, output))
    return summarise(scenario.title, run_dir, time.monotonic() - began)


def table(runs: Sequence[RunSummary]) -> Table:
    grid = Table(title="What it cost", title_justify="left")
    grid.add_column("")
    for run in runs:
        grid.add_column(run.title, justify="right")
    for title, *cells in zip(ROWS, *(table_cells(run, runs[0]) for run in runs), strict=True):
        grid.add_row(title, *cells)
    return grid


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(argv)
    console = Console()
    prepare(settings.out)
    console.print(
        f"A GPT-MoE with Megatron-Core on 4 processes (PP 2 x EP 2), {settings.steps} iterations, twice: without "
        f"failures, and with {settings.kills} kills (kill -9, on purpose)."
    )
    try:
        runs = [run_scenario(scenario, settings, console) for scenario in scenarios(settings)]
    except RuntimeError as error:
        console.print(Text(str(error), style="red"))
        return 1
    console.print(table(runs))
    checks = verdicts(*runs, kills=settings.kills)
    for check in checks:
        console.print(Text(("yes  " if check.passed else "NO   ") + check.sentence, "green" if check.passed else "red"))
    return 0 if all(check.passed for check in checks) else 1


def parse(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="demo",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="example: python recipes/gpt_moe_megatron/demo.py --kills 3 --policy moe_ckpt/policy=dense "
        "moe_ckpt.policy.every_n_steps=5 -- trainer.precision=bf16",
    )
    parser.add_argument("--steps", type=int, default=Settings.steps, help="iterations per run (default %(default)s)")
    parser.add_argument("--kills", type=int, default=Settings.kills, help="kills (default %(default)s)")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of the kills (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo-megatron"), help="directory (default %(default)s)")
    parser.add_argument("--policy", nargs="+", default=WINDOWS, help="of the failing run; overrides of moe_ckpt")
    parser.add_argument("overrides", nargs="*", help="more Hydra overrides, for both runs")
    args = parser.parse_args(argv)
    if args.kills < 1:
        parser.error("--kills: at least 1, or there is nothing to see")
    out = args.out.absolute()
    return Settings(args.steps, args.kills, args.seed, out, tuple(args.policy), tuple(args.overrides))


if __name__ == "__main__":
    with stopped_by_sigterm():
        sys.exit(main())
