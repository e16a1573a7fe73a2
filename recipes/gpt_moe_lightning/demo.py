"""`make demo`: the same GPT-MoE trained several times, killed in all runs but one, and what that cost.

Two processes under torchrun train on real English. First without failures; then with kills under several policies: a
full checkpoint now and then (Dense), a part of the experts at every iteration (MoC), a full checkpoint spread over
three iterations (MoEvement), and a full one at every iteration in the memory of a peer (Gemini), where the last kill
takes its node's memory along. Nothing restarts by hand: torchrun starts the processes again, and they find their
checkpoint. Processes are forks of one that has imported everything (``warm.py``), which makes their start short.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a script, from any directory

from rich.console import Console, Group  # noqa: E402
from rich.live import Live  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from recipes.demonstrating import KillNews, ended, last_words, prepare, stopped_by_sigterm  # noqa: E402
from recipes.gpt_moe_lightning import at_scale  # noqa: E402
from recipes.gpt_moe_lightning.at_scale import AtScale  # noqa: E402
from recipes.gpt_moe_lightning.report import write_report  # noqa: E402
from recipes.gpt_moe_lightning.summary import COLUMNS, RunSummary, short_cells, summarise  # noqa: E402
from recipes.gpt_moe_lightning.verdicts import verdicts  # noqa: E402


@dataclass(frozen=True)
class Scenario:
    """One run.

    exact: Its policy promises to come back exactly.
    on_peers: Each process is a node, with a memory directory of its own, and one of them is lost.
    more: Only with ``--all``.
    """

    title: str
    overrides: tuple[str, ...]
    failing: bool = True
    exact: bool = True
    on_peers: bool = False
    more: bool = False

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "_", self.title).lower()


DENSE = ("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=10")
MOC = ("moe_ckpt/policy=moc", "moe_ckpt.policy.k=1")
SCENARIOS = (
    Scenario("never failing", DENSE, failing=False),
    Scenario("Dense every 10", DENSE),
    Scenario("MoC k=1 in turn", MOC, exact=False),
    Scenario("MoEvement W=3", ("moe_ckpt/policy=moevement", "moe_ckpt.policy.window=3")),
    Scenario(
        "Gemini on peers",
        (
            "moe_ckpt/policy=gemini",
            "moe_ckpt.policy.every_n_steps=1",
            "moe_ckpt/memory=replicated",
            "moe_ckpt.memory.storage_every=20",
        ),
        on_peers=True,
    ),
    Scenario("CheckFreq", ("moe_ckpt/policy=checkfreq",), more=True),
    Scenario(
        "GradientLog W=4",
        (
            "moe_ckpt/policy=gradient_log",
            "moe_ckpt.policy.window=4",
            "moe_ckpt/memory=local",
            "moe_ckpt.memory.storage_every=20",
        ),
        more=True,
    ),
    Scenario("MoC k=1 by load", (*MOC, "moe_ckpt.policy.selector=load_aware"), exact=False, more=True),
    Scenario("MoEtion", ("moe_ckpt/policy=moetion", "moe_ckpt.policy.experts=1"), exact=False, more=True),
)
TMPFS = Path("/dev/shm")


@dataclass
class Settings:
    """memory: below it each process that plays a node has its memory directory. all: every policy, and all pictures."""

    steps: int = 50
    kills: int = 2
    seed: int = 34
    ranks: int = 2
    out: Path = field(default_factory=lambda: Path("runs/demo"))
    extra: tuple[str, ...] = ()
    memory: Path = TMPFS
    all: bool = False

    @property
    def scenarios(self) -> tuple[Scenario, ...]:
        return tuple(scenario for scenario in SCENARIOS if self.all or not scenario.more)


def command(scenario: Scenario, settings: Settings, run_dir: Path) -> list[str]:
    """The words after ``torchrun`` of one run: what a user would type. They are printed in the report."""
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
        "--standalone", f"--nproc-per-node={settings.ranks}",
        f"--max-restarts={settings.kills + 2}", "--monitor-interval=0.1",
        "-m", "recipes.gpt_moe_lightning.train", *overrides,
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
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self.tasks = {
            s.name: self.progress.add_task(s.title, total=settings.steps, start=False, status="")
            for s in settings.scenarios
        }
        self.line = Text("")
        self._kills = {scenario.name: KillNews() for scenario in settings.scenarios}
        self._back: dict[str, int] = {}

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
        for recovery in run.recoveries[self._back.get(scenario.name, 0) :]:
            self.progress.console.print(
                f"{scenario.title}: back at iteration {recovery.step} after {recovery.secs:.1f} s", soft_wrap=True
            )
        self._back[scenario.name] = len(run.recoveries)

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


class Starter:
    """The process whose forks train."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def start(self, words: Sequence[str], output: Path) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([words, str(output)]).encode() + b"\n")
        self._process.stdin.flush()

    def exit_code(self, secs: float) -> int | None:
        """The exit code of the run that was started last; None if it has none after ``secs``."""
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], secs)[0]:
            return None
        return int(stdout.readline() or 1)


@contextmanager
def starter(settings: Settings) -> Iterator[Starter]:
    """A process that imports what the runs need, while the first lines are read."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("warm.py"))],
        cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=(settings.out / "starter.log").open("wb"),
    )  # fmt: skip
    with ended(process):
        yield Starter(process)


def run_scenario(scenario: Scenario, settings: Settings, watch: Watch, starter: Starter) -> RunSummary:
    """Run one scenario to its end. Raises ``RuntimeError`` with the end of its output when it fails."""
    run_dir = (settings.out / scenario.name).absolute()
    run_dir.mkdir(parents=True)
    output = run_dir / "output.log"
    watch.progress.start_task(watch.tasks[scenario.name])
    if not watch.progress.console.is_terminal:  # no moving picture there, so say at least where it is
        watch.progress.console.print(f"{scenario.title}: started")
    began = time.monotonic()
    starter.start(command(scenario, settings, run_dir), output)
    while (code := starter.exit_code(0.5)) is None:
        watch.show(scenario, summarise(scenario.title, run_dir))
    run = summarise(scenario.title, run_dir, time.monotonic() - began)
    watch.show(scenario, run)
    watch.progress.stop_task(watch.tasks[scenario.name])
    if code:
        log = output if output.exists() else settings.out / "starter.log"
        raise RuntimeError(last_words(scenario.title, code, log))
    watch.progress.console.print(
        f"{scenario.title}: finished after {run.wall_secs:.0f} s, loss {run.val_loss or 0:.4f}"
    )
    return run


@contextmanager
def nodes_memory(settings: Settings) -> Iterator[None]:
    """A directory for the nodes' memory, on a tmpfs where there is one; removed, with what a run left in it."""
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_demo_", dir=TMPFS if os.access(TMPFS, os.W_OK) else None) as path:
        settings.memory = Path(path)
        yield


def facts(settings: Settings, runs: Sequence[RunSummary]) -> Iterator[str]:
    """What somebody needs to repeat the report."""
    corpus = next((r for r in runs[0].records if r.get("event") == "corpus"), {})
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}"
    yield f"Python {platform.python_version()}, torch {version('torch')}, {machine}."
    yield f"Text: {corpus.get('source')}, sha256 {str(corpus.get('sha256'))[:16]}; loss on files held out of training."
    yield "Loss of rank 0, bytes of all ranks, stall of the slowest; of a step computed twice the last values."
    yield (
        "In no figure: the whole state that MoEvement writes before the first iteration, and every run after the last."
    )
    yield "Processes are forks of one that has imported everything. Otherwise these commands do the same:"
    for scenario in settings.scenarios:
        words = command(scenario, settings, settings.out / scenario.name)
        yield f"{scenario.title}: {shlex.join(['torchrun', *words])}"
    if settings.all:
        yield f"Simulated: {shlex.join(['python', *at_scale.command()[1:]])}"


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


def print_table(console: Console, runs: Sequence[RunSummary]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, title in enumerate(COLUMNS):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for run in runs:
        table.add_row(*short_cells(run, runs[0]))
    console.print("", table, "")


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(argv)
    console = Console()
    prepare(settings.out)
    watch = Watch(console, settings)
    failing = [scenario for scenario in settings.scenarios if scenario.failing]
    console.print(
        f"A small GPT-MoE is trained {len(settings.scenarios)} times on {settings.ranks} processes: once without "
        f"failures, and under {len(failing)} policies with kills (kill -9, on purpose). The last kill of the run on "
        "peers takes the memory of its node along. torch is imported first."
    )
    try:
        with starter(settings) as starting, nodes_memory(settings), Live(watch, console=console, refresh_per_second=4):
            runs = [run_scenario(scenario, settings, watch, starting) for scenario in settings.scenarios]
    except RuntimeError as error:
        console.print(Text(str(error), style="red"))
        return 1
    checks = list(
        verdicts(
            runs[0],
            [(run, scenario.exact) for run, scenario in zip(runs, settings.scenarios, strict=True) if scenario.failing],
            kills=settings.kills,
        )
    )
    print_table(console, runs)
    scale = simulated(console) if settings.all else []
    report = write_report(settings.out / "report.html", runs, checks, list(facts(settings, runs)), scale)
    console.print(f"Pictures: {report}", soft_wrap=True)
    console.print(at_scale.PLAN)
    for check in checks:
        console.print(Text(("yes  " if check.passed else "NO   ") + check.sentence, "green" if check.passed else "red"))
    return 0 if all(check.passed for check in checks) and bool(scale) == settings.all else 1


def simulated(console: Console) -> list[AtScale]:
    """The same policies on a large model, with a table of it; empty if the simulator failed."""
    scale: list[AtScale] = []
    try:
        scale = at_scale.simulate()
    except RuntimeError as error:
        console.print(Text(str(error), style="red"))
    print_scale(console, scale)
    return scale


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
    parser.add_argument(
        "--all", action="store_true", help="more policies; and some of them simulated on a large cluster"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="directory (default %(default)s)")
    parser.add_argument("overrides", nargs="*", help="more Hydra overrides, for all runs")
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.kills < 1:
        parser.error(f"--ranks {args.ranks} --kills {args.kills}: a node is lost and comes back from another: 2, and 1")
    out, extra = args.out.absolute(), tuple(args.overrides)
    return Settings(args.steps, args.kills, args.seed, args.ranks, out, extra, all=args.all)


if __name__ == "__main__":
    with stopped_by_sigterm():
        sys.exit(main())
