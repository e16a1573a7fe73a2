"""`make demo`: the same GPT-MoE run six times, killed in five of them, and what that cost.

Two processes under torchrun train on real English. Never failing; then with a full checkpoint every 10
iterations (Dense) and kills; then with a partial checkpoint at every iteration (MoC, k = 1) and the same
kills, twice: with the experts in turn, and with those that have most to lose; then with sparse windows
(MoEvement): a part at every iteration, and exact. Its window is fixed at three iterations, so that what the
demo shows does not depend on how fast the machine is; and at last with a full checkpoint at every iteration in the
memory of peers (Gemini), where the last kill takes its node's memory along. Nothing restarts by hand: torchrun
starts the processes again, and they find their checkpoint.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a script, from any directory

from rich.console import Console, Group  # noqa: E402
from rich.live import Live  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from recipes.demonstrating import KillNews, ended, last_words, prepare, stopped_by_sigterm  # noqa: E402
from recipes.gpt_moe_lightning import at_scale, recoveries  # noqa: E402
from recipes.gpt_moe_lightning.at_scale import AtScale  # noqa: E402
from recipes.gpt_moe_lightning.heat import heat_text  # noqa: E402
from recipes.gpt_moe_lightning.report import write_report  # noqa: E402
from recipes.gpt_moe_lightning.summary import ROWS, RunSummary, summarise, table_cells  # noqa: E402
from recipes.gpt_moe_lightning.verdicts import verdicts  # noqa: E402


@dataclass(frozen=True)
class Scenario:
    """One run. on_peers: each process is a node, with a memory directory of its own, and one of them is lost."""

    name: str
    title: str
    overrides: tuple[str, ...]
    failing: bool = True
    on_peers: bool = False


SCENARIOS = (
    Scenario("never_failing", "never failing", ("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=10"), False),
    Scenario("dense", "Dense every 10", ("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=10")),
    Scenario("moc", "MoC k=1 in turn", ("moe_ckpt/policy=moc", "moe_ckpt.policy.k=1")),
    Scenario(
        "moc_load_aware",
        "MoC k=1 by load",
        ("moe_ckpt/policy=moc", "moe_ckpt.policy.k=1", "moe_ckpt.policy.selector=load_aware"),
    ),
    Scenario("moevement", "MoEvement W=3", ("moe_ckpt/policy=moevement", "moe_ckpt.policy.window=3")),
    Scenario(
        "gemini",
        "Gemini on peers",
        (
            "moe_ckpt/policy=gemini",
            "moe_ckpt.policy.every_n_steps=1",
            "moe_ckpt/memory=replicated",
            "moe_ckpt.memory.storage_every_n_steps=50",
        ),
        on_peers=True,
    ),
)
TMPFS = Path("/dev/shm")


@dataclass
class Settings:
    """memory: below it each process that plays a node has its memory directory."""

    steps: int = 140
    kills: int = 3
    seed: int = 7
    ranks: int = 2
    out: Path = field(default_factory=lambda: Path("runs/demo"))
    extra: tuple[str, ...] = ()
    memory: Path = TMPFS


def command(scenario: Scenario, settings: Settings, run_dir: Path) -> list[str]:
    """The torchrun command of one run. It is what a user would type, and it is printed in the report."""
    overrides = [
        "experiment=demo",
        *scenario.overrides,
        f"trainer.max_steps={settings.steps}",
        f"run_dir={run_dir}",
        *settings.extra,
    ]
    if scenario.failing:
        overrides += ["faults=seeded", f"faults.kills={settings.kills}", f"faults.seed={settings.seed}"]
    if scenario.on_peers:
        overrides += [f"moe_ckpt.memory.directory={settings.memory}/node_${{oc.env:RANK}}", "faults.nodes=1"]
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.ranks}",
        f"--max-restarts={settings.kills + 2}", "--monitor-interval=0.1",
        "-m", "moe_ckpt.cli.train", f"--config-dir={ROOT / 'conf'}", *overrides,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """One thread per process. The second variable: without it about every second restart reads stale addresses."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "COLUMNS": "120"}


class Watch:
    """What is on the screen while the runs go on."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self.settings = settings
        self.progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self.tasks = {
            s.name: self.progress.add_task(s.title, total=settings.steps, start=False, status="") for s in SCENARIOS
        }
        self.line = Text("")
        self._kills = {scenario.name: KillNews() for scenario in SCENARIOS}

    def show(self, scenario: Scenario, run: RunSummary) -> None:
        last = next((r for r in reversed(run.records) if "train/loss" in r), None)
        reached = int(last["step"]) if last else 0
        loss = f"loss {last['train/loss']:.3f}" if last else "starting"
        killed = f"  kills {run.kills}/{self.settings.kills}" if scenario.failing else ""
        again = f"  recomputed {run.recomputed}" if run.recomputed else ""
        self.progress.update(self.tasks[scenario.name], completed=reached, status=f"{loss}{killed}{again}")
        self.line = Text(self._news(run), style="dim")
        for line in self._kills[scenario.name].lines(self.settings.out / scenario.name):
            self.progress.console.print(f"{scenario.title}: {line}", soft_wrap=True)

    @staticmethod
    def _news(run: RunSummary) -> str:
        last = run.records[-1] if run.records else {}
        if last.get("event") in ("process_start", "corpus") and run.restarts:
            return f"a process was killed on purpose after iteration {run.restart_steps[-1]}; starting again ..."
        if last.get("event") == "training" and run.restarts:
            return f"back at iteration {last['from_step']}"
        return ""

    def __rich__(self) -> Group:
        return Group(self.progress, self.line)


def run_scenario(scenario: Scenario, settings: Settings, watch: Watch) -> RunSummary:
    """Run one scenario to its end. Raises ``RuntimeError`` with the end of its output when it fails."""
    run_dir = (settings.out / scenario.name).absolute()
    run_dir.mkdir(parents=True)
    output = run_dir / "output.log"
    watch.progress.start_task(watch.tasks[scenario.name])
    if not watch.progress.console.is_terminal:  # no moving picture there, so say at least where it is
        watch.progress.console.print(f"{scenario.title}: started")
    began = time.monotonic()
    with (
        output.open("wb") as file,
        ended(
            subprocess.Popen(
                command(scenario, settings, run_dir), cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT
            )
        ) as process,
    ):
        while process.poll() is None:
            time.sleep(0.3)
            watch.show(scenario, summarise(scenario.title, run_dir))
    run = summarise(scenario.title, run_dir, time.monotonic() - began)
    watch.show(scenario, run)
    watch.progress.stop_task(watch.tasks[scenario.name])
    if process.returncode:
        raise RuntimeError(last_words(scenario.title, process.returncode, output))
    return run


@contextmanager
def nodes_memory(settings: Settings) -> Iterator[None]:
    """A directory for the nodes' memory, on a tmpfs where there is one; removed, with what a run left in it."""
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_demo_", dir=TMPFS if os.access(TMPFS, os.W_OK) else None) as path:
        settings.memory = Path(path)
        yield


def facts(settings: Settings, runs: Sequence[RunSummary]) -> Iterator[str]:
    """What somebody needs to repeat the report."""
    import torch

    corpus = next((r for r in runs[0].records if r.get("event") == "corpus"), {})
    yield f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs, {platform.machine()}."
    yield f"Text: {corpus.get('source')}, sha256 {str(corpus.get('sha256'))[:16]}; loss on files held out of training."
    yield "Loss of rank 0, bytes of all ranks, stall of the slowest; of a step computed twice the last values."
    yield (
        "MoEvement's window is fixed at W = 3 iterations, so that it does not depend on the speed of this machine; "
        "without that it measures, and takes the shortest window that fits beside an iteration."
    )
    yield (
        "In no figure: the whole state that MoEvement writes before the first iteration, and every run after the last."
    )
    yield f"Simulated: {shlex.join(['python', *at_scale.command()[1:]])}"
    for scenario in SCENARIOS:
        words = command(scenario, settings, settings.out / scenario.name)
        yield f"{scenario.title}: {shlex.join(['python', *words[1:]])}"


def print_scale(console: Console, scale: Sequence[AtScale]) -> None:
    """Why the table above does not say which policy to take, and what does."""
    console.print(Text("\n" + at_scale.sentence(scale)))
    if scale:
        table = Table(*at_scale.COLUMNS[:1])
        for title in at_scale.COLUMNS[1:]:
            table.add_column(title, justify="right")
        for row in scale:
            table.add_row(*row.cells())
        console.print(table)
    console.print(at_scale.PLAN)


def print_recoveries(console: Console, runs: Sequence[RunSummary]) -> None:
    """Of the runs whose checkpoints lie in memory, what came back from where."""
    for run in runs:
        if not run.memory_bytes:
            continue
        table = Table(title=f"{run.title}: {recoveries.TITLE.lower()}", title_justify="left")
        for column in recoveries.COLUMNS:
            table.add_column(column, justify="right")
        for recovery in run.recoveries:
            table.add_row(*recovery.cells())
        console.print(table)


def print_table(console: Console, runs: Sequence[RunSummary]) -> None:
    table = Table(title="What it cost", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.title, justify="right")
    for (title, _), *cells in zip(ROWS, *(table_cells(run, runs[0]) for run in runs), strict=True):
        table.add_row(title, *cells)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(argv)
    console = Console()
    prepare(settings.out)
    watch = Watch(console, settings)
    console.print(
        f"A GPT-MoE (2.7 M parameters, 8 experts) on {settings.ranks} processes, {settings.steps} iterations, "
        f"six times; {settings.kills} kills (kill -9, on purpose) in each of the last five. The last kill of the last "
        "run takes the memory of its node along."
    )
    try:
        with Live(watch, console=console, refresh_per_second=4), nodes_memory(settings):
            runs = [run_scenario(scenario, settings, watch) for scenario in SCENARIOS]
    except RuntimeError as error:
        console.print(Text(str(error), style="red"))
        return 1
    checks = verdicts(*runs, kills=settings.kills)
    print_table(console, runs)
    print_recoveries(console, runs)
    for check in checks:
        console.print(Text(("yes  " if check.passed else "NO   ") + check.sentence, "green" if check.passed else "red"))
    console.print(heat_text(runs, console.width))
    scale: list[AtScale] = []
    try:
        scale = at_scale.simulate()
    except RuntimeError as error:
        console.print(Text(str(error), style="red"))
    print_scale(console, scale)
    report = write_report(settings.out / "report.html", runs, checks, list(facts(settings, runs)), scale)
    console.print(f"Curves: {report}")
    return 0 if scale and all(check.passed for check in checks) else 1


def parse(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="demo",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="example: python recipes/gpt_moe_lightning/demo.py --steps 60 --kills 2 -- model.experts=4",
    )
    parser.add_argument("--steps", type=int, default=Settings.steps, help="iterations per run (default %(default)s)")
    parser.add_argument("--kills", type=int, default=Settings.kills, help="kills per failing run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of the kills (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=Settings.ranks, help="processes, at least 2 (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="directory (default %(default)s)")
    parser.add_argument("overrides", nargs="*", help="more Hydra overrides, for all runs")
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.kills < 1:
        parser.error(f"--ranks {args.ranks} --kills {args.kills}: a node is lost and comes back from another: 2, and 1")
    return Settings(args.steps, args.kills, args.seed, args.ranks, args.out.absolute(), tuple(args.overrides))


if __name__ == "__main__":
    with stopped_by_sigterm():
        sys.exit(main())
