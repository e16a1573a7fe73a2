"""One of each metric, fed together from a step's record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

_SUMMED = ("nbytes", "frozen_nbytes", "stall_secs", "popularity", "iterations")
"""Facts that add up over steps; of all others the newest counts."""


class CheckpointMetrics(MetricCollection):
    """The metrics of ``checkpoint_metrics``. Training notes its steps here as plain numbers; they become tensors when a
    metric is asked for, for a tensor of one element takes the training thread as long as a thousand numbers."""

    _noted: Mapping[str, Any] | None = None

    def note(self, step_facts: Mapping[str, Any], iterations: int = 1) -> None:
        """Notes what ``facts`` returned.

        Args:
            step_facts: Of one step.
            iterations: 0 for the same step again, about which more is known by now: only what does not add up counts.
        """
        facts = dict(step_facts, iterations=iterations, worst_stall_secs=step_facts["stall_secs"])
        if not iterations:
            facts |= {name: facts[name] * 0 for name in (*_SUMMED, "worst_stall_secs")}
        for metric in self._foreign():
            if iterations:
                metric.update(**metric._filter_kwargs(**step_facts))
        before = self._noted
        if before is not None:
            facts |= {name: before[name] + facts[name] for name in _SUMMED}
            facts["worst_stall_secs"] = max(before["worst_stall_secs"], facts["worst_stall_secs"])
        self._noted = facts

    def _foreign(self) -> list[Metric]:
        """Metrics that a user has added, which are updated at each step."""
        return [metric for metric in super().values(copy_state=False) if not isinstance(metric, StepMetric)]

    def catch_up(self) -> None:
        """Updates the metrics by what was noted."""
        noted, self._noted = self._noted, None
        if noted is None:
            return
        for metric in super().values(copy_state=False):
            if isinstance(metric, StepMetric):
                metric.update(**metric._filter_kwargs(**noted))
                metric._update_count += noted["iterations"] - 1

    def items(  # type: ignore[override]
        self, keep_base: bool = False, copy_state: bool = True
    ) -> Iterable[tuple[str, Metric]]:
        self.catch_up()
        return super().items(keep_base, copy_state)

    def values(self, copy_state: bool = True) -> Iterable[Metric]:  # type: ignore[override]
        self.catch_up()
        return super().values(copy_state)

    def __getitem__(self, key: str, copy_state: bool = True) -> Metric:
        self.catch_up()
        return super().__getitem__(key, copy_state)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        self.catch_up()
        return super().state_dict(*args, **kwargs)

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
    metrics: dict[str, Any] = {
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
    collection = CheckpointMetrics(metrics, compute_groups=False)
    for metric in metrics.values():
        metric.catch_up = collection.catch_up
    return collection


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
    """Returns an observer that notes each new step, and the newest once more when training has ended."""

    def note(event: SessionEvent) -> None:
        if isinstance(event, StepEnded | TrainingEnded):  # the ranks have agreed on the last step only at the end
            metrics.note(facts(event.record, event.run_ledger), iterations=int(isinstance(event, StepEnded)))

    return note


def window_age(record: StepRecord) -> int | None:
    """Steps since the newest complete window's last step, or the newest checkpoint; None before the first."""
    return None if record.committed_step is None else record.step - record.committed_step
