"""What the diaries of a run's ranks say: the numbers of the demo's table, and whether two runs ended alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.demonstrating import Verdict, human_bytes, kills_in
from recipes.gpt_moe_megatron.runlog import read

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class RunSummary:
    """ranks: the diary of each. Bytes are of all ranks together, stalls of the slowest.

    Iterations that were computed more than once count each time; replays are those that bring a sparse window back,
    at which nothing is saved.
    """

    title: str
    ranks: tuple[Rows, ...]
    kills: int
    wall_secs: float = 0.0

    @property
    def steps(self) -> int:
        return max((row["iteration"] for row in self._iterations(0)), default=0)

    @property
    def recomputed(self) -> int:
        rows = self._iterations(0)
        return len(rows) - len({row["iteration"] for row in rows})

    @property
    def replayed(self) -> int:
        return sum(bool(row.get("moe_ckpt/replayed")) for row in self._iterations(0))

    @property
    def nbytes(self) -> list[int]:
        """Of each executed iteration that could save."""
        return [sum(row["moe_ckpt/nbytes"] for row in rows) for rows in self._together()]

    @property
    def stalls_ms(self) -> list[float]:
        return [1e3 * max(row["moe_ckpt/stall_secs"] for row in rows) for rows in self._together()]

    @property
    def lost_tokens(self) -> int:
        return int(self._last("moe_ckpt/lost_tokens"))

    @property
    def plt(self) -> float:
        return float(self._last("moe_ckpt/plt"))

    @property
    def mlt_worst(self) -> float:
        """Momentary lost tokens of the failure that lost most (MLT); 0 where none did."""
        return max((row.get("moe_ckpt/mlt_worst") or 0.0 for row in self._iterations(0)), default=0.0)

    @property
    def losses(self) -> dict[int, set[float]]:
        """Iteration -> its loss, or losses if it came out differently on another rank or when it was computed again."""
        results: dict[int, set[float]] = {}
        for rank in range(len(self.ranks)):
            for row in self._iterations(rank):
                if row["loss"] is not None:
                    results.setdefault(row["iteration"], set()).add(row["loss"])
        return results

    @property
    def parameters(self) -> tuple[str | None, ...]:
        """Each rank's digest at the end; None while it has not finished."""
        ends = ([row for row in rows if row.get("event") == "finished"] for rows in self.ranks)
        return tuple(end[-1]["parameters"] if end else None for end in ends)

    @property
    def final_loss(self) -> float | None:
        return max(self.losses[self.steps]) if self.steps in self.losses else None

    def _iterations(self, rank: int) -> Rows:
        return [row for row in self.ranks[rank] if "iteration" in row and "event" not in row] if self.ranks else []

    def _together(self) -> list[Rows]:
        """The rows of all ranks of each executed iteration that all of them wrote down, replays left out."""
        results: dict[tuple[int, int], Rows] = {}
        for rank in range(len(self.ranks)):
            for row in self._iterations(rank):
                if "moe_ckpt/nbytes" in row and not row["moe_ckpt/replayed"]:
                    results.setdefault((row["generation"], row["iteration"]), []).append(row)
        return [rows for rows in results.values() if len(rows) == len(self.ranks)]

    def _last(self, name: str) -> float:
        return next((row[name] for row in reversed(self._iterations(0)) if name in row), 0)


def summarise(title: str, run_dir: Path, wall_secs: float = 0.0) -> RunSummary:
    paths = sorted(run_dir.glob("log.rank*.jsonl"), key=lambda path: int(path.name.split(".")[1][4:]))
    return RunSummary(title, tuple(read(path) for path in paths), len(kills_in(run_dir)), wall_secs)


ROWS = (
    "processes killed",
    "iterations",
    "computed again",
    "of these, replays",
    "written per iteration",
    "most in one iteration",
    "stall per iteration, mean / worst",
    "lost tokens (PLT)",
    "MLT, at most",
    "loss of the last iteration",
    "losses as without failures",
    "parameters as without failures",
    "wall time",
)


def table_cells(run: RunSummary, baseline: RunSummary) -> tuple[str, ...]:
    """The cells of one run, in the order of ``ROWS``. baseline: the run that never failed."""
    nbytes, stalls = run.nbytes, run.stalls_ms
    same_losses = sum(run.losses.get(step) == losses for step, losses in baseline.losses.items())
    same_ranks = sum(a == b and a is not None for a, b in zip(run.parameters, baseline.parameters, strict=False))
    return (
        str(run.kills),
        str(run.steps),
        str(run.recomputed),
        str(run.replayed),
        human_bytes(sum(nbytes) / len(nbytes)) if nbytes else "-",
        human_bytes(max(nbytes)) if nbytes else "-",
        f"{sum(stalls) / len(stalls):.1f} / {max(stalls):.0f} ms" if stalls else "-",
        f"{run.lost_tokens:,} ({run.plt:.2%})",
        f"{run.mlt_worst:.2%}",
        "not finished" if run.final_loss is None else f"{run.final_loss:.6f}",
        "-" if run is baseline else f"{same_losses} of {len(baseline.losses)}",
        "-" if run is baseline else f"on {same_ranks} of {len(baseline.parameters)} ranks",
        f"{run.wall_secs:.0f} s",
    )


def verdicts(baseline: RunSummary, failing: RunSummary, *, kills: int) -> tuple[Verdict, ...]:
    """What the demo promises, checked on what was measured."""
    survived = failing.kills == kills and None not in failing.parameters and failing.steps == baseline.steps
    return (
        Verdict(
            survived,
            f"{failing.title}: lost a process to kill -9 {kills} times and came back by itself."
            if survived
            else f"{failing.title}: NOT as planned: {failing.kills} kills instead of {kills}, or it did not finish.",
        ),
        _alike(baseline, failing),
    )


def _alike(baseline: RunSummary, failing: RunSummary) -> Verdict:
    """A partial policy does not promise equal bits: it must say what it lost."""
    parameters = failing.parameters == baseline.parameters and None not in baseline.parameters
    losses: Mapping[int, set[float]] = failing.losses
    if parameters and losses == baseline.losses and not failing.lost_tokens:
        return Verdict(
            True,
            f"{failing.title}: every loss, and the parameters on all {len(baseline.parameters)} ranks, equal those of "
            "the run that never failed, bit for bit; no token lost.",
        )
    if failing.lost_tokens:
        return Verdict(
            True,
            f"{failing.title}: {failing.lost_tokens:,} tokens lost (PLT {failing.plt:.2%}), so it is another run than "
            "the one that never failed; its last loss is "
            f"{abs((failing.final_loss or 0) - (baseline.final_loss or 0)):.4f} away.",
        )
    return Verdict(
        False,
        f"{failing.title}: DIFFERS from the run that never failed, though no token was lost (parameters equal: "
        f"{parameters}, losses equal: {losses == baseline.losses}).",
    )
