"""One of each metric, fed together from a step's record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


class _Noted(NamedTuple):
    """Steps that the metrics have not been updated by.

    Attributes:
        record: Of the newest of them.
        run_ledger: Of the run.
        sums: Facts of all of them that add up, and how many they are.
        worst_stall_secs: The longest stall among them.
    """

    record: StepRecord
    run_ledger: RunLedger
    sums: Mapping[str, Any]
    worst_stall_secs: float


def _summed(record: StepRecord, run_ledger: RunLedger) -> dict[str, Any]:
    """Returns the facts of one step that add up."""
    return {
        "nbytes": record.nbytes,
        "frozen_nbytes": record.frozen_nbytes,
        "stall_secs": record.stall_secs,
        "popularity": run_ledger.popularity,
        "iterations": 1,
    }


class CheckpointMetrics(MetricCollection):
    """The metrics of ``checkpoint_metrics``. Training notes its steps here as plain numbers; they become tensors when a
    metric is asked for. Torch and numpy let other threads run in the middle of their work, and a thread that copies or
    writes gives the interpreter back milliseconds later."""

    _noted: _Noted | None = None

    def note(self, record: StepRecord, run_ledger: RunLedger, *, again: bool = False) -> None:
        """Notes a step.

        Args:
            record: Of it.
            run_ledger: As ``facts`` takes it. Its tables are read when a metric is asked for.
            again: The step was noted before, and more is known about it by now: nothing is added up.
        """
        before, sums, worst = self._noted, _summed(record, run_ledger), record.stall_secs
        if before is not None:
            added = before.sums.items()
            sums = dict(added) if again else {name: value + sums[name] for name, value in added}
            worst = max(before.worst_stall_secs, worst)
        elif again:
            sums, worst = {name: value * 0 for name, value in sums.items()}, 0.0
        self._noted = _Noted(record, run_ledger, sums, worst)
        if not again and (foreign := self._foreign()):
            asked = facts(record, run_ledger)
            for metric in foreign:
                metric.update(**metric._filter_kwargs(**asked))

    def _foreign(self) -> list[Metric]:
        """Metrics that a user has added, which are updated at each step."""
        return [metric for metric in super().values(copy_state=False) if not isinstance(metric, StepMetric)]

    def catch_up(self) -> None:
        """Updates the metrics by what was noted."""
        noted, self._noted = self._noted, None
        if noted is None:
            return
        asked = facts(noted.record, noted.run_ledger) | {**noted.sums, "worst_stall_secs": noted.worst_stall_secs}
        for metric in super().values(copy_state=False):
            if isinstance(metric, StepMetric):
                metric.update(**metric._filter_kwargs(**asked))
                metric._update_count += noted.sums["iterations"] - 1

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
            metrics.note(event.record, event.run_ledger, again=isinstance(event, TrainingEnded))

    return note


def window_age(record: StepRecord) -> int | None:
    """Steps since the newest complete window's last step, or the newest checkpoint; None before the first."""
    return None if record.committed_step is None else record.step - record.committed_step
