"""What a run's diary says: one number per question, one curve per plot. No plotting, no training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.demonstrating import human_bytes, read_lines
from recipes.gpt_moe_lightning.recoveries import Recovery, recoveries_in

Curve = tuple[list[float], list[float]]
Tables = npt.NDArray[np.int64]

STORED, SENT, HAD = "moe_ckpt/bytes_to_storage", "moe_ckpt/bytes_to_peers", "moe_ckpt/bytes_peers_had"
_COUNTED = {SENT: "moe_ckpt/replica_sent_bytes", HAD: "moe_ckpt/replica_saved_bytes"}
"""Of one step: what the diary counts since the process began."""
BEHIND, STORAGE_BEHIND = "moe_ckpt/steps_behind", "moe_ckpt/storage_steps_behind"
"""Metrics that are made of those in the diary."""


@dataclass(frozen=True)
class RunSummary:
    """One run, with everything that was computed twice counted but shown once.

    kills: of the schedule, as recorded by the processes just before they died.
    recomputed: finished iterations that were computed again: those that a restart threw away, and those that bring a
    sparse window back. replayed: the latter.
    lost_tokens: token-expert assignments whose updates the restored experts lacked; plt: their portion.
    checkpoints: begun; a sparse window is one.
    bytes_per_iteration, bytes_at_compute, stall_ms_mean, stall_ms_max: over all executed iterations but those replayed;
    bytes of all ranks together that go to storage, stall of the slowest rank.
    recoveries: one for each kill, as far as they are done.
    """

    title: str
    records: tuple[Mapping[str, Any], ...]
    wall_secs: float = 0.0
    kills: int = 0
    recoveries: tuple[Recovery, ...] = ()

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
        results: dict[int, set[float]] = {}
        for record in self.records:
            if "train/loss" in record:
                results.setdefault(int(record["step"]), set()).add(record["train/loss"])
        return results

    @property
    def restart_steps(self) -> list[int]:
        """The last finished step before each restart."""
        result, reached = [], 0
        for record in self.records:
            if "train/loss" in record:
                reached = int(record["step"])
            elif record.get("event") == "process_start" and record.get("generation", 0) > 0:
                result.append(reached)
        return result

    @property
    def checkpoints(self) -> int:
        return sum(r.get(STORED, 0) > 0 and not r.get("moe_ckpt/window_slot", 0) for r in self.records)

    @property
    def bytes_per_checkpoint(self) -> float:
        return sum(self._all(STORED)) / max(1, self.checkpoints)

    @property
    def bytes_per_iteration(self) -> float:
        return _mean(self._all(STORED))

    @property
    def saved_per_iteration(self) -> float:
        """Likewise, of what is saved anywhere: into memory or to storage."""
        return _mean(self._all("moe_ckpt/bytes"))

    @property
    def most_bytes(self) -> float:
        """In one iteration."""
        return max(self._all(STORED), default=0.0)

    @property
    def memory_bytes(self) -> float:
        """The most that lay in memory that outlives the processes, copies of others included; 0 without such memory."""
        return max(self._all("moe_ckpt/memory_bytes"), default=0.0)

    @property
    def sent_per_iteration(self) -> float:
        """Bytes sent to peers."""
        return _mean(self._all(SENT))

    @property
    def had_per_iteration(self) -> float:
        """Bytes of copies on peers that these had in their own training state, so that they were not sent."""
        return _mean(self._all(HAD))

    @property
    def replica_lag_steps(self) -> int:
        """The most that a rank's copies on peers ever were behind."""
        return int(max(self._all("moe_ckpt/replica_lag_steps"), default=0.0))

    @property
    def down_secs(self) -> float:
        """Mean time from the last iteration before a kill to the first after it."""
        return _mean(recovery.secs for recovery in self.recoveries)

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
    def mlt_worst(self) -> float:
        """Momentary lost tokens of the failure that lost most (MLT); 0 where none did."""
        return max(self._all("moe_ckpt/mlt_worst"), default=0.0)

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

    def same_as(self, baseline: RunSummary) -> bool:
        """Whether all parameters and losses are equal, also those of iterations that were computed more than once."""
        return (
            None not in (self.parameters, self.val_loss)
            and (self.parameters, self.val_loss) == (baseline.parameters, baseline.val_loss)
            and self.losses == baseline.losses
        )

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
    paths = sorted(run_dir.glob("metrics.rank*.jsonl"), key=lambda p: int(p.suffixes[0].removeprefix(".rank")))
    ranks = [read_lines(path) for path in paths]
    kills, back = len(read_lines(run_dir / "kills.jsonl")), tuple(recoveries_in(run_dir, ranks))
    return RunSummary(title, tuple(over_ranks(ranks)), wall_secs, kills, back)


def over_ranks(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rank 0's diary, with bytes summed, and stalls and lags the largest, over the ranks' lines of the same step.

    Added to its lines: what goes to storage (``STORED``), what was sent to peers (``SENT``) and what of their copies
    they had anyway (``HAD``), and how far a checkpoint that is complete is behind, in the nearest tier (``BEHIND``) and
    on storage (``STORAGE_BEHIND``).
    """
    totals: dict[Any, list[dict[str, Any]]] = {}
    for record in (r for rank in ranks for r in rank if "moe_ckpt/bytes" in r):
        totals.setdefault((record["generation"], record["step"]), []).append(record)
    merged = []
    before: dict[Any, float] = {}
    for record in ranks[0] if ranks else []:
        if "moe_ckpt/bytes" in record:
            same = totals[record["generation"], record["step"]]
            record = record | _merged(same) | _behind(record)
            for name, counted in _COUNTED.items():
                key, now = (record["generation"], name), record.get(counted)
                if now is not None:
                    record[name], before[key] = now - before.get(key, 0), now
        merged.append(record)
    return merged


def _merged(same: list[dict[str, Any]]) -> dict[str, float]:
    """Of one step, what all ranks say together."""
    results: dict[str, float] = {
        name: sum(r.get(name, 0) for r in same) for name in ("moe_ckpt/bytes", "moe_ckpt/bytes_compute")
    }
    results[STORED] = results["moe_ckpt/bytes"] * same[0].get("moe_ckpt/to_storage", 1)
    results["moe_ckpt/stall_ms"] = max(r["moe_ckpt/stall_ms"] for r in same)
    if "moe_ckpt/memory_bytes" in same[0]:
        for name in ("moe_ckpt/memory_bytes", *_COUNTED.values()):
            results[name] = sum(r.get(name, 0) for r in same)
        results["moe_ckpt/replica_lag_steps"] = max(r.get("moe_ckpt/replica_lag_steps", 0) for r in same)
    return results


def _behind(record: Mapping[str, Any]) -> dict[str, float]:
    """Iterations since the newest checkpoint that every rank has, and since the newest one on storage."""
    stored = record.get("moe_ckpt/committed_step")
    nearest = record.get("moe_ckpt/memory_step", stored)
    known = {BEHIND: nearest, STORAGE_BEHIND: stored}
    return {name: record["step"] - newest for name, newest in known.items() if newest is not None}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


COLUMNS = (
    "",
    "kills",
    "down\neach",
    "done\nagain",
    "lost\ntokens",
    "saved per\niteration",
    "training\nwaited",
    "final\nloss",
    "same\nbits",
)
"""Of the short table, which fits a terminal of 80 characters."""


def short_cells(run: RunSummary, baseline: RunSummary) -> tuple[str, ...]:
    """The row of one run in the short table."""
    return (
        run.title,
        str(run.kills),
        f"{_three(run.down_secs)} s" if run.recoveries else "-",
        str(run.recomputed),
        f"{run.plt:.2%}" if run.lost_tokens else "0",
        human_bytes(run.saved_per_iteration),
        f"{_three(run.stall_ms_mean)} ms",
        "-" if run.val_loss is None else f"{run.val_loss:.4f}",
        "-" if run is baseline else "yes" if run.same_as(baseline) else "no",
    )


def _three(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


ROWS: tuple[tuple[str, str], ...] = (
    ("iterations", "the length of the run"),
    ("processes killed", "kill -9 of a rank, in the middle of an iteration"),
    ("nodes lost with them", "the memory of that rank's node was deleted, too"),
    ("down per kill", "from the last iteration before it to the first after it; mostly the start of the processes"),
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
    ("most in memory", "files in memory that outlive the processes, copies of other nodes included"),
    ("sent to peers per iteration", "averaged over all iterations, all ranks together"),
    ("not sent, peers had it", "of their copies, what peers took from their own training state; averaged likewise"),
    ("copies behind, at most", "iterations that a node's newest copy on a peer was ever behind"),
    ("stall per iteration", "mean / worst time that training waited for the checkpoint"),
    ("experts per layer", "how many of each layer's experts a checkpoint writes (K)"),
    ("oldest expert, iterations", "the most iterations that an expert's newest copy on storage was ever behind"),
    ("skewness of load", "0: every expert gets as many tokens, 1: one gets all; mean over layers and iterations"),
    ("lost tokens", "tokens that a restored expert no longer knows"),
    ("PLT", "portion of lost tokens: their share of all tokens"),
    ("MLT, at most", "what one failure lost of a layer's tokens by then, mean over layers"),
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
        str(sum(recovery.killed.node for recovery in run.recoveries)),
        f"{run.down_secs:.1f} s" if run.recoveries else "-",
        str(run.recomputed),
        f"{run.recomputed / run.kills:.1f}" if run.kills else "-",
        str(run.replayed),
        str(run.checkpoints),
        human_bytes(run.bytes_per_checkpoint),
        human_bytes(run.bytes_per_iteration),
        human_bytes(run.most_bytes),
        human_bytes(run.bytes_at_compute),
        human_bytes(run.memory_bytes) if run.memory_bytes else "-",
        human_bytes(run.sent_per_iteration) if run.memory_bytes else "-",
        human_bytes(run.had_per_iteration) if run.memory_bytes else "-",
        str(run.replica_lag_steps) if run.memory_bytes else "-",
        f"{run.stall_ms_mean:.1f} / {run.stall_ms_max:.0f} ms",
        " then ".join(map(str, run.experts_per_layer)) or "all",
        str(run.oldest_expert_steps),
        f"{run.skewness_mean:.3f}",
        f"{run.lost_tokens:,}",
        f"{run.plt:.2%}",
        f"{run.mlt_worst:.2%}",
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
