"""What preparing a checkpoint costs the training thread of one Megatron rank, before the asynchronous part begins.

A grid of MoE layers x experts at EP 8, and EP 2 to 16 at one of them; fp32, and bf16 with the distributed optimizer.
Each case is a process of its own that is one rank of a world whose other ranks are only acted (``megatron_world.py``):
so one rank's work is done and measured, on tiny tensors (hidden 8, ffn 8), since what grows with layers and experts is
the describing, not the bytes.

ours: ``MegatronCheckpoint.after_step`` until it returns: counting tokens, planning, describing, laying out, starting
the copy. Not in it: agreeing with the peers (``agreement.py``), the copy, which is joined outside of the clock, and
writing, which is waited for. Wall time; cpu is the processor time of the training thread, to judge a busy machine by.
Where it goes is told in wall time: what follows on "start copy" shares Python's lock with the thread that copies.
``step_scale.py`` measures "in hooks" under other conditions, and says why that is more.

the peer: Megatron-Core's ``dist_checkpointing`` on the same model in the same process. ``megatron_peer.py`` says what
of its work is included, and what a fake group leaves out, all of it in its favour. Its least ways of doing it are
there too; the ratio is to the quickest of them.

Garbage is collected between steps, outside of the clock, for both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console

from benchmarks import megatron_report
from benchmarks.report import RESULTS, machine, write_json

_EXAMPLE = """example:
  python benchmarks/megatron_prepare.py --quick              # two small cases, half a minute
  python benchmarks/megatron_prepare.py --write              # everything; 10 minutes on an idle machine
  python benchmarks/megatron_prepare.py --grid 61x256 --ep 8 --precision bf16 --peer-saves 0
"""
ROOT = Path(__file__).resolve().parents[1]
GRIDS = ("4x8", "12x32", "24x64", "48x128", "61x256")
EPS = (2, 4, 8, 16)
_GRID_EP, _EPS_GRID = 8, "48x128"


@dataclass(frozen=True)
class Asked:
    """One case; the fields are those of ``megatron_world.Case``, which this process must not import."""

    layers: int
    experts: int
    ep: int
    precision: str

    def __str__(self) -> str:
        return f"{self.layers} x {self.experts}, EP {self.ep}, {self.precision}"


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(
        prog="megatron_prepare.py",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_argument("--grid", nargs="+", default=GRIDS, metavar="LxE", help=f"default: {' '.join(GRIDS)}")
    command_line.add_argument(
        "--ep", nargs="+", type=int, default=None, help=f"of every grid; default: 8, and {EPS} of {_EPS_GRID}"
    )
    command_line.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    command_line.add_argument("--steps", type=int, default=12, help="counted steps of each policy (default 12)")
    command_line.add_argument(
        "--peer-saves", type=int, default=10, help="counted saves of the peer, 0 for none (default 10)"
    )
    command_line.add_argument("--peer-secs", type=float, default=60.0, help="fewer of them after so long (default 60)")
    command_line.add_argument(
        "--memory-gib",
        type=int,
        default=14,
        help="address space of a rank, beside what is reserved for checkpoints (default 14)",
    )
    command_line.add_argument("--quick", action="store_true", help="4x8 only, few steps: to see that it runs")
    command_line.add_argument(
        "--dir", type=Path, default=None, help="where checkpoints are written (default: /dev/shm)"
    )
    command_line.add_argument("--write", action="store_true", help="keep JSON, tables and the picture in results/")
    command_line.add_argument("--out", type=Path, default=RESULTS, help="another directory for --write")
    return command_line


def cases(options: argparse.Namespace) -> list[Asked]:
    """Raises ``SystemExit`` for a grid that is not written ``LxE``, or experts that EP does not divide."""
    results = []
    for grid in ("4x8",) if options.quick else options.grid:
        try:
            layers, experts = map(int, grid.split("x"))
        except ValueError:
            raise SystemExit(f"--grid {grid}: write layers x experts like 48x128") from None
        for ep in options.ep or (EPS if grid == _EPS_GRID and not options.quick else (_GRID_EP,)):
            if ep < 2 or experts % ep:
                raise SystemExit(f"--ep {ep}: of at least 2, and a divisor of the experts of --grid {grid}")
            results += [Asked(layers, experts, ep, precision) for precision in options.precision]
    return results


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.quick:
        options.steps, options.peer_saves = min(options.steps, 3), min(options.peer_saves, 1)
    asked = cases(options)
    console = Console(width=None if sys.stdout.isatty() else 150)
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    words = sys.argv[1:] if argv is None else argv
    content: dict[str, Any] = {
        "command": " ".join(["python benchmarks/megatron_prepare.py", *words]),
        "machine": machine(),
    }
    with _progress(console, len(asked)) as tell, tempfile.TemporaryDirectory(prefix="moe_ckpt_bench_") as told:
        for number, case in enumerate(asked):
            tell(str(case))
            results.append(run(case, options, Path(told) / f"{number}.json"))
            content |= {"took_secs": round(time.monotonic() - began), "cases": results}
            if options.write:
                write_json(options.out / "megatron_prepare.json", content)
    lines = megatron_report.lines(results)
    print("\n".join(lines))
    if options.write:
        facts = f"`{content['command']}`, {content['machine']}"
        (options.out / "megatron_prepare.md").write_text("\n".join([*lines, "", facts, ""]))
        drawn = megatron_report.plot(options.out / "megatron_prepare.png", results)
        console.print(f"written to {os.path.relpath(options.out)}" + ("" if drawn else "; no picture"))
    return 1 if any("failed" in case for case in results) else 0


def run(case: Asked, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """What the process of one case found; with "failed", how it ended, if it did not end well."""
    memory = Path("/dev/shm")
    directory = options.dir or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
    order = {
        "case": asdict(case),
        "steps": options.steps,
        "peer_saves": options.peer_saves,
        "peer_secs": options.peer_secs,
        "memory_gib": options.memory_gib,
        "dir": str(directory),
    }
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.megatron_rank", json.dumps(order), str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"case": asdict(case)}
    if done.returncode:
        message = (done.stderr.strip() or "(it said nothing)").splitlines()
        result["failed"] = f"exit code {done.returncode}: {message[-1]}"
    return result


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    began = time.monotonic()
    numbers = iter(range(1, total + 1))

    def tell(what: str) -> None:
        console.print(f"[{next(numbers)}/{total}] {what} ({time.monotonic() - began:.0f} s)", markup=False)

    yield tell


if __name__ == "__main__":
    sys.exit(main())
