"""What a run's diary says: one number per question, one curve per plot. No plotting, no training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.demonstrating import Verdict, human_bytes
from recipes.gpt_moe_lightning.runlog import read_lines, read_runlog

Curve = tuple[list[float], list[float]]
Tables = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RunSummary:
    """One run, with everything that was computed twice counted but shown once.

    kills: of the schedule, as recorded by the processes just before they died.
    recomputed: finished iterations that were computed again: those that a restart threw away, and those that bring a
    sparse window back. replayed: the latter.
    lost_tokens: token-expert assignments whose updates the restored experts lacked; plt: their portion.
    checkpoints: begun; a sparse window is one.
    bytes_per_iteration, bytes_at_compute, stall_ms_mean, stall_ms_max: over all executed iterations but those replayed;
    bytes of all ranks together, stall of the slowest rank.
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
        loss: float | None = self._finished("val_loss")
        return loss

    @property
    def parameters(self) -> str | None:
        """Hash of the final parameters, None while the run has not finished."""
        digest: str | None = self._finished("parameters")
        return digest

    @property
    def restarts(self) -> int:
        return max(0, sum(1 for r in self.records if r.get("event") == "process_start") - 1)

    @property
    def recomputed(self) -> int:
        executed = sum("train/loss" in r for r in self.records)
        return executed - len(self._by_step("train/loss"))

    @property
    def replayed(self) -> int:
        return int(sum(self._all("moe_ckpt/replayed")))

    @property
    def losses(self) -> dict[int, set[float]]:
        """Step -> its training loss, or losses if it came out differently when it was computed again."""
        found: dict[int, set[float]] = {}
        for record in self.records:
            if "train/loss" in record:
                found.setdefault(int(record["step"]), set()).add(record["train/loss"])
        return found

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
        return sum(r.get("moe_ckpt/bytes", 0) > 0 and not r.get("moe_ckpt/window_slot", 0) for r in self.records)

    @property
    def bytes_per_checkpoint(self) -> float:
        return sum(self._all("moe_ckpt/bytes")) / max(1, self.checkpoints)

    @property
    def bytes_per_iteration(self) -> float:
        return _mean(self._all("moe_ckpt/bytes"))

    @property
    def bytes_at_compute(self) -> float:
        """Of ``bytes_per_iteration``, weights alone, of what is saved in full later in its window."""
        return _mean(self._all("moe_ckpt/bytes_compute"))

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
            for name in ("moe_ckpt/bytes", "moe_ckpt/bytes_compute"):
                record[name] = sum(r.get(name, 0) for r in same)
            record["moe_ckpt/stall_ms"] = max(r["moe_ckpt/stall_ms"] for r in same)
        merged.append(record)
    return merged


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


ROWS: tuple[tuple[str, str], ...] = (
    ("iterations", "the length of the run"),
    ("processes killed", "kill -9 of a rank, in the middle of an iteration"),
    ("iterations computed again", "finished ones that the kill threw away, or that bring a sparse window back"),
    ("of these, per kill", "what one failure costs, on average"),
    ("replays among them", "to bring a sparse window back; nothing is saved at them"),
    ("checkpoints begun", "over the whole run; a sparse window is one"),
    ("written per checkpoint", "averaged, all ranks together"),
    ("written per iteration", "averaged over all iterations but replays, all ranks together"),
    ("most in one iteration", "all ranks together; the very first checkpoint of MoC is a full one"),
    (
        "weights alone, per iteration",
        "part of what is written: at compute fidelity, without the optimizer state that follows later in the window",
    ),
    ("stall per iteration", "mean / worst time that training waited for the checkpoint"),
    ("experts per layer", "how many of each layer's experts a checkpoint writes (K)"),
    ("oldest expert, iterations", "the most iterations that the newest copy of an expert was ever behind"),
    ("skewness of load", "0: every expert gets as many tokens, 1: one gets all; mean over layers and iterations"),
    ("lost tokens", "tokens that a restored expert no longer knows"),
    ("PLT", "portion of lost tokens: their share of all tokens"),
    ("validation loss", "nats per byte on held-out files"),
    ("its difference", "to the run that never failed"),
    ("wall time", "with the start of the processes"),
)
"""Row titles of the final table, each with a word for the newcomer."""


def table_cells(run: RunSummary, baseline: RunSummary) -> tuple[str, ...]:
    """The cells of one run, in the order of ``ROWS``. baseline: the run that never failed."""
    return (
        str(run.steps),
        str(run.kills),
        str(run.recomputed),
        f"{run.recomputed / run.kills:.1f}" if run.kills else "-",
        str(run.replayed),
        str(run.checkpoints),
        human_bytes(run.bytes_per_checkpoint),
        human_bytes(run.bytes_per_iteration),
        human_bytes(max(run._all("moe_ckpt/bytes"), default=0.0)),
        human_bytes(run.bytes_at_compute),
        f"{run.stall_ms_mean:.1f} / {run.stall_ms_max:.0f} ms",
        " then ".join(map(str, run.experts_per_layer)) or "all",
        str(run.oldest_expert_steps),
        f"{run.skewness_mean:.3f}",
        f"{run.lost_tokens:,}",
        f"{run.plt:.2%}",
        "not finished" if run.val_loss is None else f"{run.val_loss:.4f}",
        _difference(run, baseline),
        f"{run.wall_secs:.0f} s",
    )


def _difference(run: RunSummary, baseline: RunSummary) -> str:
    """With enough digits that only what is exactly 0 reads so."""
    if run.val_loss is None or baseline.val_loss is None:
        return "unknown"
    away = run.val_loss - baseline.val_loss
    return f"{away:+.4f}" if abs(away) >= 5e-5 else f"{away:+.1e}" if away else "0"


def verdicts(
    baseline: RunSummary,
    dense: RunSummary,
    sequential: RunSummary,
    load_aware: RunSummary,
    windows: RunSummary,
    *,
    kills: int,
) -> tuple[Verdict, ...]:
    """What the demo promises, checked on what was measured. windows: the run under MoEvement."""
    failing = (dense, sequential, load_aware, windows)
    survived = all(run.kills == kills and run.val_loss is not None for run in failing)
    counts = ", ".join(str(run.kills) for run in failing)
    return (
        Verdict(
            survived,
            f"All four failing runs lost a process to kill -9 {kills} times and came back by themselves."
            if survived
            else f"NOT as planned: {counts} kills instead of {kills} each, or a run did not finish.",
        ),
        _exact(baseline, dense),
        *(_partial(baseline, dense, run) for run in (sequential, load_aware)),
        _compared(sequential, load_aware),
        _exact(baseline, windows),
        _spared(dense, windows),
    )


def _exact(baseline: RunSummary, run: RunSummary) -> Verdict:
    """Losses of iterations that were computed more than once count each time."""
    same = baseline.parameters is not None and baseline.parameters == run.parameters
    losses = baseline.losses == run.losses
    end = baseline.val_loss is not None and baseline.val_loss == run.val_loss
    return Verdict(
        same and losses and end and run.lost_tokens == 0,
        f"{run.title}: parameters and every loss equal those of the run that never failed, bit for bit; no token lost."
        if same and losses and end and run.lost_tokens == 0
        else f"{run.title} DIFFERS from the run that never failed (parameters equal: {same}, training losses equal: "
        f"{losses}, validation loss equal: {end}, lost tokens: {run.lost_tokens:,}).",
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


def _spared(dense: RunSummary, windows: RunSummary) -> Verdict:
    """How much a kill costs Dense depends on where in its ten iterations it comes, so this is said and not demanded."""
    share = windows.bytes_per_iteration / dense.bytes_per_checkpoint if dense.bytes_per_checkpoint else 0.0
    return Verdict(
        windows.val_loss is not None,
        f"{windows.title}: iterations computed again: {windows.recomputed}, {windows.replayed} of them replays "
        f"(Dense: {dense.recomputed}); it writes {share:.0%} of a whole checkpoint at every iteration.",
    )
