"""What a run's diary says: one number per question, one curve per plot. No plotting, no training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.gpt_moe_lightning.runlog import read_lines, read_runlog

Curve = tuple[list[float], list[float]]
Tables = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RunSummary:
    """One run, with everything that was computed twice counted but shown once.

    kills: of the schedule, as recorded by the processes just before they died.
    recomputed: finished iterations that a restart threw away and that were computed again.
    lost_tokens: token-expert assignments whose updates the restored experts lacked; plt: their portion.
    bytes_per_iteration, stall_ms_mean, stall_ms_max: over all executed iterations; bytes of
    all ranks together, stall of the slowest rank.
    """

    title: str
    records: tuple[Mapping[str, Any], ...]
    wall_secs: float = 0.0
    kills: int = 0

    @property
    def steps(self) -> int:
        return max((int(s) for s in self._by_step("train/loss")), default=0)

    @property
    def val_loss(self) -> float | None:
        return self._finished("val_loss")

    @property
    def parameters(self) -> str | None:
        """Hash of the final parameters, None while the run has not finished."""
        return self._finished("parameters")

    @property
    def restarts(self) -> int:
        return max(0, sum(r.get("event") == "process_start" for r in self.records) - 1)

    @property
    def recomputed(self) -> int:
        executed = sum("train/loss" in r for r in self.records)
        return executed - len(self._by_step("train/loss"))

    @property
    def restart_steps(self) -> list[int]:
        """The last finished step before each restart."""
        found, reached = [], 0
        for record in self.records:
            if "train/loss" in record:
                reached = int(record["step"])
            elif record.get("event") == "process_start" and record.get("generation", 0) > 0:
                found.append(reached)
        return found

    @property
    def checkpoints(self) -> int:
        return sum(b > 0 for b in self._all("moe_ckpt/bytes"))

    @property
    def bytes_per_checkpoint(self) -> float:
        return _mean(b for b in self._all("moe_ckpt/bytes") if b > 0)

    @property
    def bytes_per_iteration(self) -> float:
        return _mean(self._all("moe_ckpt/bytes"))

    @property
    def stall_ms_mean(self) -> float:
        return _mean(self._all("moe_ckpt/stall_ms"))

    @property
    def stall_ms_max(self) -> float:
        return max(self._all("moe_ckpt/stall_ms"), default=0.0)

    @property
    def plt(self) -> float:
        return self._last("moe_ckpt/plt")

    @property
    def lost_tokens(self) -> int:
        return int(self._last("moe_ckpt/lost_tokens"))

    @property
    def experts_per_layer(self) -> list[int]:
        """The values of K that the run went through, in order; empty for a policy that has none."""
        values = [int(value) for value in self._all("moe_ckpt/k")]
        return [value for at, value in enumerate(values) if at == 0 or value != values[at - 1]]

    @property
    def oldest_expert_steps(self) -> int:
        """The oldest that any expert's newest copy ever was."""
        return int(max(self._all("moe_ckpt/oldest_expert_steps"), default=0))

    @property
    def skewness_mean(self) -> float:
        return _mean(self._all("moe_ckpt/skewness"))

    def tables(self, name: str) -> tuple[list[int], Tables]:
        """Steps, and ``[T, L, E]``: ``ages`` or ``unsaved`` of all experts; of a step computed twice the last."""
        by_step = {int(r["step"]): r[name] for r in self.records if r.get("event") == "experts"}
        steps = sorted(by_step)
        return steps, np.asarray([by_step[step] for step in steps], dtype=np.int64)

    def curve(self, metric: str) -> Curve:
        """Steps and values; of a step computed twice the last execution counts."""
        by_step = self._by_step(metric)
        steps = sorted(by_step)
        return steps, [by_step[s] for s in steps]

    def _by_step(self, metric: str) -> dict[float, float]:
        return {r["step"]: float(r[metric]) for r in self.records if metric in r and r.get("step") is not None}

    def _all(self, metric: str) -> list[float]:
        return [float(r[metric]) for r in self.records if metric in r]

    def _last(self, metric: str) -> float:
        return next((float(r[metric]) for r in reversed(self.records) if metric in r), 0.0)

    def _finished(self, key: str) -> Any:
        return next((r.get(key) for r in reversed(self.records) if r.get("event") == "finished"), None)


def summarise(title: str, run_dir: Path, wall_secs: float = 0.0) -> RunSummary:
    ranks = read_runlog(run_dir)
    return RunSummary(title, tuple(over_ranks(ranks)), wall_secs, len(read_lines(run_dir / "kills.jsonl")))


def over_ranks(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rank 0's diary, with bytes summed and stalls the longest over the ranks' lines of the same step."""
    totals: dict[Any, list[dict[str, Any]]] = {}
    for record in (r for rank in ranks for r in rank if "moe_ckpt/bytes" in r):
        totals.setdefault((record["generation"], record["step"]), []).append(record)
    merged = []
    for record in ranks[0] if ranks else []:
        if "moe_ckpt/bytes" in record:
            same = totals[record["generation"], record["step"]]
            record["moe_ckpt/bytes"] = sum(r["moe_ckpt/bytes"] for r in same)
            record["moe_ckpt/stall_ms"] = max(r["moe_ckpt/stall_ms"] for r in same)
        merged.append(record)
    return merged


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


ROWS: tuple[tuple[str, str], ...] = (
    ("iterations", "the length of the run"),
    ("processes killed", "kill -9 of a rank, in the middle of an iteration"),
    ("iterations computed again", "finished ones that the kill threw away"),
    ("checkpoints begun", "over the whole run"),
    ("written per checkpoint", "averaged, all ranks together"),
    ("written per iteration", "averaged over all iterations, all ranks together"),
    ("stall per iteration", "mean / worst time that training waited for the checkpoint"),
    ("experts per layer", "how many of each layer's experts a checkpoint writes (K)"),
    ("oldest expert, iterations", "the most iterations that the newest copy of an expert was ever behind"),
    ("skewness of load", "0: every expert gets as many tokens, 1: one gets all; mean over layers and iterations"),
    ("lost tokens", "tokens that a restored expert no longer knows"),
    ("PLT", "portion of lost tokens: their share of all tokens"),
    ("validation loss", "nats per byte on held-out files"),
    ("wall time", "with the start of the processes"),
)
"""Row titles of the final table, each with a word for the newcomer."""


def table_cells(run: RunSummary) -> tuple[str, ...]:
    """The cells of one run, in the order of ``ROWS``."""
    return (
        str(run.steps),
        str(run.kills),
        str(run.recomputed),
        str(run.checkpoints),
        human_bytes(run.bytes_per_checkpoint),
        human_bytes(run.bytes_per_iteration),
        f"{run.stall_ms_mean:.1f} / {run.stall_ms_max:.0f} ms",
        " then ".join(map(str, run.experts_per_layer)) or "all",
        str(run.oldest_expert_steps),
        f"{run.skewness_mean:.3f}",
        f"{run.lost_tokens:,}",
        f"{run.plt:.2%}",
        "not finished" if run.val_loss is None else f"{run.val_loss:.4f}",
        f"{run.wall_secs:.0f} s",
    )


@dataclass(frozen=True)
class Verdict:
    passed: bool
    sentence: str


def verdicts(
    baseline: RunSummary, dense: RunSummary, sequential: RunSummary, load_aware: RunSummary, kills: int
) -> tuple[Verdict, ...]:
    """What the demo promises, checked on what was measured."""
    same = baseline.parameters is not None and baseline.parameters == dense.parameters
    losses = baseline.curve("train/loss") == dense.curve("train/loss")
    failing = (dense, sequential, load_aware)
    survived = all(run.kills == kills and run.val_loss is not None for run in failing)
    counts = ", ".join(str(run.kills) for run in failing)
    return (
        Verdict(
            survived,
            f"All three failing runs lost a process to kill -9 {kills} times and came back by themselves."
            if survived
            else f"NOT as planned: {counts} kills instead of {kills} each, or a run did not finish.",
        ),
        Verdict(
            same and losses,
            "Dense: parameters and every loss equal those of the run that never failed, bit for bit."
            if same and losses
            else f"Dense DIFFERS from the run that never failed (parameters equal: {same}, losses equal: {losses}).",
        ),
        *(_partial(baseline, dense, run) for run in (sequential, load_aware)),
        _compared(sequential, load_aware),
    )


def _partial(baseline: RunSummary, dense: RunSummary, run: RunSummary) -> Verdict:
    drift = abs((run.val_loss or float("inf")) - (baseline.val_loss or 0.0))
    return Verdict(
        run.val_loss is not None,
        f"{run.title}: {run.lost_tokens:,} tokens lost (PLT {run.plt:.2%}), iterations computed again: "
        f"{run.recomputed} (Dense: {dense.recomputed}), validation loss {drift:.4f} away from the run that never "
        "failed.",
    )


def _compared(sequential: RunSummary, load_aware: RunSummary) -> Verdict:
    """Which selection loses less depends on the router's skewness and on the kills, so either may, and is said."""
    finished = sequential.val_loss is not None and load_aware.val_loss is not None
    less = load_aware.lost_tokens / sequential.lost_tokens - 1 if sequential.lost_tokens else 0.0
    return Verdict(
        finished,
        f"Experts chosen by load lost {load_aware.lost_tokens:,} tokens, experts in turn "
        f"{sequential.lost_tokens:,} ({less:+.0%}), through the same kills.",
    )
