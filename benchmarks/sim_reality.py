"""The simulator against reality: runs of the tiny recipe, really killed, beside simulations of the same.

One process trains the tiny GPT-MoE on the CPU and is killed with SIGKILL at moments drawn without memory, from a seed;
it is started again at once. Some runs have several processes, of which one is killed; the others seal what they hold.
These are two ranks under DDP, one without and one with copies on the other's node; four stages of a pipeline of
Megatron-Core, of which one goes back, or all; and two ranks that restart within their processes beside spares.
Each run writes its own profile. From that profile, and from the library's own policy, the simulator says what should
have come of the run: with the very same failures, and with others of the same mean.

ETTR is, on both sides, iterations that are part of the state at the end, times the median length of one without
checkpoints and failures (of a run of its own, or a failing one's clean iterations, whichever was less disturbed), over
the time on the clock.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.failing import Failures
from benchmarks.sim_reality_compare import Comparison, compare
from benchmarks.sim_reality_contestants import CONTESTANTS, NO_CHECKPOINTS, Contestant
from benchmarks.sim_reality_report import table, write
from benchmarks.sim_reality_runs import RealRun, kill_times, run
from moe_ckpt_sim.planner.profile import read_profile

RESULTS = Path(__file__).resolve().parent / "results" / "sim_reality.json"
LIMIT = 0.03
_EXAMPLE = "example: python benchmarks/sim_reality.py --minutes 1 --policies dense --results /tmp/dense.json"


class Watch:
    """Progress, one line per run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<18}"), BarColumn(bar_width=30), TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(), console=console,
        )  # fmt: skip

    def __enter__(self) -> Watch:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def run(self, contestant: Contestant, directory: Path, kills: Sequence[float], secs: float, seed: int) -> RealRun:
        """One real run, shown."""
        line = self._progress.add_task(contestant.title, total=secs, status="starting")
        if not self._console.is_terminal:
            self._console.print(f"{contestant.title}: {secs:.0f} s, {len(kills)} kills")

        def tell(at: float, killed: int) -> None:
            self._progress.update(line, completed=min(at, secs), status=f"kills {killed}/{len(kills)}")

        result = run(contestant, directory, kills, secs, seed, tell)
        self._progress.update(line, completed=secs, status=f"kills {len(result.kills)}/{len(kills)}")
        self._progress.stop_task(line)
        return result


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a difference is over the limit, or a run failed."""
    args = _parse(argv)
    console = Console()
    secs = args.minutes * 60.0
    failed = Failures()
    kills = kill_times(args.seed, args.mtbf, secs)
    chosen = [one for one in CONTESTANTS if one.name in args.policies]
    console.print(f"{len(chosen)} runs of {args.minutes:g} minutes, {len(kills)} kills in each, MTBF {args.mtbf:g} s")
    with _directory(args.keep) as directory:
        with Watch(console) as watch:
            clean: list[float] = []
            if any(one.ranks == 1 for one in chosen):
                bare = watch.run(NO_CHECKPOINTS, directory / "no_checkpoints", (), args.calibration, args.seed)
                clean.append(read_profile(bare.profile_path).pace.iteration_secs)
            runs: list[tuple[Contestant, RealRun]] = []
            for one in chosen:
                with failed.of(one.title):
                    runs.append((one, watch.run(one, directory / one.name, kills, secs, args.seed)))
        # An iteration of several ranks on the same cores is another one.
        own = {one.name: read_profile(real.profile_path).pace.iteration_secs for one, real in runs}
        # Other programs only ever make an iteration longer: the quietest run tells best what one takes.
        clean_secs = min([*clean, *(own[one.name] for one, _ in runs if one.ranks == 1)], default=0.0)
        measured = []
        for one, real in runs:
            with failed.of(one.title):
                measured.append(compare(one, real, clean_secs if one.ranks == 1 else own[one.name], args.mtbf))
    for line in failed.lines():
        console.print(line, markup=False, soft_wrap=True)
    if not measured:
        return 1
    for entry in table(measured):
        console.print(entry)
    if args.results is not None:
        write(args.results, measured, vars(args))
        console.print(f"Written: {args.results.name}, {args.results.with_suffix('.md').name}")
    return _verdict(console, measured) or bool(failed.reasons)


def _verdict(console: Console, results: Sequence[Comparison]) -> int:
    over = [one.title for one in results if abs(one.difference) > LIMIT]
    if over:
        console.print(f"[red]over {LIMIT:.0%}: {', '.join(over)}[/]")
    return 1 if over else 0


@contextmanager
def _directory(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="sim_reality_") as directory:
        yield Path(directory)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [one.name for one in CONTESTANTS]
    parser = argparse.ArgumentParser(prog="sim_reality", description=(__doc__ or "").split("\n\n")[0], epilog=_EXAMPLE)
    parser.add_argument("--minutes", type=float, default=3.5, help="of each run (default %(default)s)")
    parser.add_argument("--mtbf", type=float, default=18.0, help="seconds between kills, mean (default %(default)s)")
    parser.add_argument("--policies", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--seed", type=int, default=2, help="of the kills and of training (default %(default)s)")
    parser.add_argument("--calibration", type=float, default=30.0, help="seconds without checkpoints")
    parser.add_argument("--keep", type=Path, help="new directory for the runs; without it they are deleted")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON; the .md lies beside it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way is ended, too
    sys.exit(main())
