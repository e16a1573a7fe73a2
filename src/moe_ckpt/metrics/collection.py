"""One of each metric, fed together from a step's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchmetrics import Metric, MetricCollection

from moe_ckpt.engine.events import Observer, SessionEvent, StepEnded, TrainingEnded
from moe_ckpt.engine.record import StepRecord
from moe_ckpt.engine.run_ledger import RunLedger
from moe_ckpt.metrics.base import StepMetric
from moe_ckpt.metrics.cost import BytesByFidelity, CheckpointBytes, CheckpointStall
from moe_ckpt.metrics.experts import ExpertAges, OldestExpertAge, UnsavedTokens
from moe_ckpt.metrics.tokens import (
    ExpertLoadSkewness,
    ExpertsPerLayer,
    MomentaryLostTokens,
    OwedTokens,
    PortionAtRisk,
    PortionOfLostTokens,
)
from moe_ckpt.metrics.windows import WindowAge, WindowPlace


class CheckpointMetrics(MetricCollection):
    """What ``checkpoint_metrics`` gives."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Give each metric what it asks for; see ``facts``."""
        metrics = [metric for metric in self.values(copy_state=False) if isinstance(metric, StepMetric)]
        if args or len(metrics) < len(self):  # a user's own are among them
            super().update(*args, **kwargs)
            return
        for metric in metrics:
            metric.note(kwargs)

    def plot(self, val: Any = None, ax: Any = None, together: bool = False) -> Any:
        """A picture of each metric: see ``MetricCollection.plot``, which cannot find those of several values."""
        value: Any = self.compute() if val is None else val
        single = isinstance(value, Mapping)
        found = [self._by_metric(entry) for entry in ([value] if single else value)]
        return super().plot(found[0] if single else found, ax, together)

    def _by_metric(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """``value``, in which a metric of several values has them under its own name."""
        metrics = {str(name): metric for name, metric in self.items(keep_base=False)}
        return {name: value[name] if name in value else _parts(metric, value) for name, metric in metrics.items()}


def _parts(metric: Any, value: Mapping[str, Any]) -> dict[str, Any]:
    """What ``value`` has of a metric of several values, whose names may have got a prefix."""
    return {name: number for name, number in value.items() if any(part in name for part in metric.parts)}


def checkpoint_metrics(experts: Sequence[int] | None = None, **kwargs: Any) -> CheckpointMetrics:
    """Returns one of each, by name: ``collection.update(**facts)`` gives each what it asks for.

    Args:
        experts: Number of experts of each MoE layer; None if all have the same.
        **kwargs: Of ``torchmetrics.Metric``, for each; ``sync_on_compute=False`` makes ``compute`` this rank's own
            affair.
    """
    metrics: dict[str, Metric | MetricCollection] = {
        "plt": PortionOfLostTokens(**kwargs),
        "at_risk": PortionAtRisk(**kwargs),
        "mlt": MomentaryLostTokens(**kwargs),
        "owed_tokens": OwedTokens(**kwargs),
        "k": ExpertsPerLayer(**kwargs),
        "skewness": ExpertLoadSkewness(experts, **kwargs),
        "bytes": CheckpointBytes(**kwargs),
        "fidelity": BytesByFidelity(**kwargs),
        "stall": CheckpointStall(**kwargs),
        "window_age": WindowAge(**kwargs),
        "window": WindowPlace(**kwargs),
        "oldest_expert_steps": OldestExpertAge(**kwargs),
        "expert_ages": ExpertAges(experts, **kwargs),
        "unsaved_tokens": UnsavedTokens(experts, **kwargs),
    }
    return CheckpointMetrics(metrics, compute_groups=False)


def facts(record: StepRecord, run_ledger: RunLedger) -> dict[str, Any]:
    """What the metrics ask for, of the step that ``record`` is about; not for steps that are computed again."""
    return {
        "lost_tokens": record.lost_tokens,
        "owed_tokens": record.owed_tokens,
        "routed_tokens": record.routed_tokens,
        "at_risk_tokens": run_ledger.ledger.at_risk.tokens,
        "at_risk_mlt": record.at_risk_mlt,
        "mlt_newest": record.mlt_newest,
        "mlt_worst": record.mlt_worst,
        "k": record.k,
        "popularity": run_ledger.popularity,
        "nbytes": record.nbytes,
        "frozen_nbytes": record.frozen_nbytes,
        "stall_secs": record.stall_secs,
        "oldest_expert_steps": record.oldest_expert_steps,
        "ages": run_ledger.ledger.expert_ages(record.step),
        "unsaved": run_ledger.tokens.unsaved(),
        "window_age": window_age(record),
        "window_size": record.window,
        "window_slot": record.slot,
    }


def feeding(metrics: CheckpointMetrics) -> Observer:
    """Returns an observer that updates ``metrics`` at each new step, and those of the ledger once training ended."""

    def note(event: SessionEvent) -> None:
        if isinstance(event, StepEnded):
            metrics.update(**facts(event.record, event.run_ledger))
        elif isinstance(event, TrainingEnded):  # the ranks have agreed on the last step only now
            found = facts(event.record, event.run_ledger)
            for name in ("plt", "at_risk", "mlt", "owed_tokens", "unsaved_tokens"):
                metrics[name].update(**metrics[name]._filter_kwargs(**found))

    return note


def window_age(record: StepRecord) -> int | None:
    """Steps since the newest complete window's last step, or the newest checkpoint; None before the first."""
    return None if record.committed_step is None else record.step - record.committed_step
