"""What a checkpoint at every step costs an iteration, on tensors so tiny that only Python counts.

A GPT-MoE of Qwen3-MoE's shape with hidden sizes of 4, AdamW (foreach), under the real Lightning Trainer: on one rank,
on 4 gloo ranks under DDP and FSDP2 (the CPU is then rank 0's); and one rank of Megatron-Core, whose experts are always
listed (``step_megatron.py``). Each case (layout, kind of experts, layers x experts) is a process of its own, one per
rank, in which the policies take turns, each round beginning with another one; "none" is the iteration without
checkpoints that the others are compared with. ``when_busy="wait"``: no checkpoint is left out, and one that cannot be
written in time holds training up. Storage is in memory where there is some.

"longer by" is the difference of the medians of iterations, "aim" what it is to be at most. CPU is that of the whole
process, user and system, so threads that compete with training for Python's lock are counted; "threads" is the part of
what is added that other threads than training's used. "in hooks" is the CPU of the training thread in our hooks (the
median), and "aim" behind it what that is to be at most under a plan that comes again: not all of these do. On a busy
machine only CPU means anything. Not counted as ours is that the C library puts in order what the update freed, 1 to 3
ms that the next large allocation takes, with checkpoints or without (``step_fits.py``).

Under Megatron "in hooks" is not what ``megatron_prepare.py`` finds. Here the precision is fp32 and no optimizer is
distributed, so that what is no expert is divided over the ranks anew for each plan, and each parameter has tensors of
its own; there it is bf16, and the distributed optimizer says who writes what. Here our other threads run beside the
hooks and garbage is collected whenever Python does so; there both wait.

The old figures are of one rank, before commit and engine were made anew, of another tiny model; "before" is what this
benchmark found then with stacked experts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.report import machine, write_json

_EXAMPLE = """example:
  python benchmarks/step_scale.py --layouts lightning --shapes 24x64 --policies none,moc
  python benchmarks/step_scale.py --layouts ddp,fsdp2 --shapes 12x32 --rounds 1
  python benchmarks/step_scale.py --json step_scale.json              # everything; half an hour on an idle machine
"""
ROOT = Path(__file__).resolve().parents[1]
POLICIES = ("none", "moc", "moetion", "moevement", "dense")
KINDS = ("stacked", "listed")
SHAPES = {
    "lightning": ("12x32", "24x64", "48x128"),
    "ddp": ("12x32",),
    "fsdp2": ("12x32",),
    "megatron": ("24x64", "61x256"),
}
"""Layout -> what is measured unless ``--shapes`` says otherwise."""
RANKS = {"ddp": 4, "fsdp2": 4}
ALONE, EP = 48 * 128, 8
"""Megatron: so many experts in all are on one rank; of more, one of so many ranks is measured, the others acted."""
OLD_MS = {
    "24x64": {"none": 81.0, "moc": 344.0, "moevement": 1148.0, "dense": 4367.0},
    "48x128": {"none": 226.0, "moc": 844.0},
}
"""Shape -> policy -> an iteration, as it was before engine and commit were made anew."""
BEFORE_CPU_MS = {
    "12x32": {"moc": 74.0, "moetion": 134.0, "moevement": 244.0, "dense": 761.0},
    "24x64": {"moc": 189.0, "moetion": 464.0, "moevement": 1339.0, "dense": 4252.0},
    "48x128": {"moc": 553.0, "moetion": 2248.0, "moevement": 10650.0},
}
"""Shape -> policy -> what this benchmark found then as "more CPU", on one rank with stacked experts."""
AIM_MS = {"24x64": 20.0, "48x128": 50.0}
"""Shape -> by how much an iteration may become longer; three times that under Dense."""
HOOKS_AIM_MS = {("lightning", "48x128"): 10.0, ("megatron", "61x256"): 5.0}
"""(layout, shape) -> processor time of the training thread in our hooks, of a plan that comes again."""
_FREE_BYTES = 2 << 30
_WORDS = {"moc": "MoC k=1", "moetion": "MoEtion E/6", "moevement": "MoEvement W=4", "dense": "Dense"}


@dataclass(frozen=True)
class Case:
    """kind: of ``KINDS``, how the experts' parameters lie."""

    layout: str
    kind: str
    layers: int
    experts: int

    @property
    def shape(self) -> str:
        return f"{self.layers}x{self.experts}"

    def __str__(self) -> str:
        return f"{self.layout}, {self.kind}, {self.shape}"


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(
        prog="step_scale.py", description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    item = "; ".join(f"{layout} {','.join(shapes)}" for layout, shapes in SHAPES.items())
    command_line.add_argument(
        "--shapes", type=words, default=None, metavar="LxE,...", help=f"layers x experts; by default {item}"
    )
    command_line.add_argument("--layouts", type=words, default=tuple(SHAPES), help=f"default: {','.join(SHAPES)}")
    command_line.add_argument("--policies", type=words, default=POLICIES, help=f"default: {','.join(POLICIES)}")
    command_line.add_argument(
        "--experts", type=words, default=("stacked",), help="stacked, listed, or both (default stacked)"
    )
    command_line.add_argument("--rounds", type=int, default=2, help="turns of every policy (default 2)")
    command_line.add_argument("--steps", type=int, default=24, help="counted iterations of a turn (default 24)")
    command_line.add_argument(
        "--secs", type=float, default=20.0, help="fewer, once a turn has taken so long (default 20)"
    )
    command_line.add_argument(
        "--warm", type=int, default=8, help="iterations before them that are not counted (default 8)"
    )
    command_line.add_argument(
        "--timeout", type=float, default=1800.0, help="seconds that a case may take (default 1800)"
    )
    command_line.add_argument(
        "--dir", type=Path, default=None, help="where checkpoints are written (default: /dev/shm)"
    )
    command_line.add_argument("--json", type=Path, default=None, help="keep every single measurement in this file")
    return command_line


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.replace(" ", ",").split(",") if word)


def cases(options: argparse.Namespace) -> list[Case]:
    """Raises ``SystemExit`` for a word that is none of those that there are, and a shape not written ``LxE``."""
    for option, known in (("layouts", tuple(SHAPES)), ("policies", POLICIES), ("experts", KINDS)):
        for word in getattr(options, option):
            if word not in known:
                raise SystemExit(f"--{option} {word}: there is no such thing; choose from {', '.join(known)}")
    results = []
    for layout in options.layouts:
        for kind in ("listed",) if layout == "megatron" else options.experts:
            for shape in options.shapes or SHAPES[layout]:
                try:
                    layers, experts = map(int, shape.split("x"))
                except ValueError:
                    raise SystemExit(f"--shapes {shape}: write layers x experts like 48x128") from None
                results.append(Case(layout, kind, layers, experts))
    return results


Tell = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    command = " ".join(["python benchmarks/step_scale.py", *(sys.argv[1:] if argv is None else argv)])
    head = {"command": command, "machine": machine(), "old_ms": OLD_MS, "aim_ms": AIM_MS}
    runs = [partial(_run, case, options) for case in cases(options)]
    return run_all(runs, 1 + options.rounds * len(options.policies), table, head, options.json)


def run_all(
    runs: Sequence[Callable[[Tell], dict[str, Any]]],
    parts: int,
    table: Callable[[Sequence[dict[str, Any]]], Table],
    head: Mapping[str, Any],
    json_file: Path | None,
) -> int:
    """Run one case after the other; the table comes whatever fails. Returns the exit status.

    Args:
        runs: Each runs one case and returns what it found, with "name" and, by what failed, "failed".
        parts: That each tells of.
        table: Of what was found.
        head: Goes into ``json_file`` before the cases.
        json_file: Of all measurements, written anew after each case; None for none.
    """
    console = Console(width=None if sys.stdout.isatty() else 150)
    began, result = time.monotonic(), list[dict[str, Any]]()
    try:
        with progress(console, len(runs) * parts) as tell:
            for run in runs:
                result.append(run(tell))
                if json_file:
                    write_json(json_file, {**head, "took_secs": round(time.monotonic() - began), "cases": result})
    finally:
        console.print(table(result))
        for case in result:
            for name, why in case["failed"].items():
                console.print(f"failed: {case['name']}: {name}: {why}", markup=False, soft_wrap=True)
    return 1 if any(case["failed"] for case in result) else 0


def _run(case: Case, options: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """What the processes of one case found, and in "failed" how they ended, if they did not end well."""
    with tempfile.TemporaryDirectory(
        prefix="moe_ckpt_step_", dir=place_of(options.dir), ignore_cleanup_errors=True
    ) as at:
        home = Path(at)
        ranks = RANKS.get(case.layout, 1)
        order = asdict(case) | {
            "policies": list(options.policies),
            "rounds": options.rounds,
            "ranks": ranks,
            "ep": 1 if case.layers * case.experts <= ALONE else EP,
            "turn": {"warm": options.warm, "counted": options.steps, "secs": options.secs},
            "home": at,
            "out": str(home / "found.json"),
        }
        command = [sys.executable, "-m", "benchmarks.step_rank", json.dumps(order)]
        commands = [[*command, str(rank)] for rank in range(ranks)]
        why = follow(commands, home, options.timeout, lambda text: tell(f"{case}: {text}"))
        out = home / "found.json"
        result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": [], "failed": {}}
    result |= {"name": str(case), "case": asdict(case) | {"shape": case.shape}, "ranks": ranks}
    if why is not None:
        result["failed"]["process"] = why
    return result


def follow(commands: Sequence[Sequence[str]], home: Path, timeout: float, tell: Tell) -> str | None:
    """Run one process per rank to its end, telling what the first one says after "> ".

    Returns:
        Why one ended badly; None if none did.
    """
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    running = []
    for rank, command in enumerate(commands):
        with (home / f"rank_{rank}.txt").open("w") as log:
            running.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log))
    deadline, heard = time.monotonic() + timeout, 0
    try:
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            if any(process.poll() for process in running):
                deadline = min(deadline, time.monotonic() + 20)  # the others wait for one that is gone
            time.sleep(0.2)
            lines = [line for line in (home / "rank_0.txt").read_text().splitlines() if line.startswith("> ")]
            for line in lines[heard:]:
                tell(line[2:])
            heard = len(lines)
        codes = [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    bad = sorted((rank for rank, code in enumerate(codes) if code != 0), key=lambda rank: codes[rank] is None)
    if not bad:
        return None
    words = (home / f"rank_{bad[0]}.txt").read_text().strip().splitlines() or ["(it said nothing)"]
    ended = f"not ready after {timeout:.0f} s" if codes[bad[0]] is None else f"exit code {codes[bad[0]]}"
    return f"rank {bad[0]}: {ended}: {words[-1]}"


def place_of(given: Path | None) -> Path | None:
    """In memory if there is room; None for the place of temporary files. Raises ``SystemExit``."""
    if given is not None and not given.is_dir():
        raise SystemExit(f"--dir {given}: there is no such directory")
    memory = Path("/dev/shm")
    if given is None and memory.is_dir() and os.access(memory, os.W_OK):
        room = os.statvfs(memory)
        if room.f_bavail * room.f_frsize >= _FREE_BYTES:
            return memory
    return given


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Also when cases or policies failed."""
    shown = Table(title="a checkpoint at every step, ms per iteration", title_justify="left")
    for column in ("layout, experts, shape", "policy"):
        shown.add_column(column, no_wrap=True)
    columns = (
        "iteration",
        "(mean)",
        "longer by",
        "aim",
        "CPU",
        "more CPU",
        "before",
        "of it threads",
        "in hooks",
        "aim",
        "KiB",
        "old iteration",
    )
    for column in (*columns, "old longer by"):
        shown.add_column(column, justify="right")
    for case in results:
        for row in case["rows"]:
            shown.add_row(*_cells(case, row))
        for name in case["failed"]:
            shown.add_row(case["name"], _WORDS.get(name, name), "failed", *["-"] * (len(shown.columns) - 3))
        shown.add_section()
    return shown


def _cells(case: dict[str, Any], row: dict[str, Any]) -> list[str]:
    name, shape = row["policy"], case["case"]["shape"]
    old = OLD_MS.get(shape, {}) if case["case"]["layout"] == "lightning" else {}
    aim = None if name == "none" or shape not in AIM_MS else AIM_MS[shape] * (3 if name == "dense" else 1)
    cpu, thread = row.get("extra_cpu_ms"), row.get("extra_thread_cpu_ms")
    saves = name != "none"
    alike = case["case"]["layout"] == "lightning" and case["case"]["kind"] == "stacked"
    before = BEFORE_CPU_MS.get(shape, {}).get(name) if alike else None
    return [
        case["name"],
        _WORDS.get(name, name),
        _number(row["iteration_ms"]),
        _number(row["mean_ms"]),
        _number(row.get("extra_iteration_ms") if saves else None),
        _number(aim),
        _number(row["cpu_ms"]),
        _number(cpu if saves else None),
        _number(before),
        _number(cpu - thread if saves and cpu is not None and thread is not None else None),
        _number(row["hook_cpu_ms"] if saves else None),
        _number(HOOKS_AIM_MS.get((case["case"]["layout"], shape)) if saves else None),
        _number(row["kib"] if saves else None),
        _number(old.get(name)),
        _number(old[name] - old["none"] if saves and name in old else None),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    columns = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def tell(what: str) -> None:
            progress.update(task, description=what, advance=1)
            if not console.is_terminal:
                console.print(what, markup=False)

        yield tell


if __name__ == "__main__":
    sys.exit(main())
