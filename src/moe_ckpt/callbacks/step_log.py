"""Reports each step to the metrics, at their interval to the trainer's loggers, and changes of K to the log."""

from __future__ import annotations

import logging
from typing import Any

from moe_ckpt.core.tokens import normalized_hhi
from moe_ckpt.metrics import CheckpointMetrics
from moe_ckpt.run.events import SessionEvent, StepEnded, StepRecord, StepReplayed
from moe_ckpt.run.run_ledger import RunLedger

log = logging.getLogger("moe_ckpt")

_AS_RECORDED = (
    *("experts_saved", "k", "oldest_expert_steps", "plt", "plt_budget_left", "lost_tokens", "routed_tokens"),
    "owed_tokens",
    *("mlt_newest", "mlt_worst"),
    *("begun", "skipped", "waited", "skips", "waits", "failed_checkpoints", "committed_step"),
)
"""Fields of ``StepRecord`` that loggers get under their own names."""


class StepLog:
    """An observer of the session, on every rank.

    Args:
        k: Experts per layer that the run saved before this process; None if unknown.
        trainer: Its loggers get the values.

    Attributes:
        metrics: Of this rank alone, so that one rank may call ``compute``.
    """

    def __init__(self, k: int | None = None, trainer: Any = None) -> None:
        self.k = k
        self.metrics = CheckpointMetrics(sync_on_compute=False)
        self._trainer = trainer

    def __call__(self, event: SessionEvent) -> None:
        self.metrics.observe(event)
        if not isinstance(event, (StepEnded, StepReplayed)):
            return
        record = event.record
        if record.k is not None and record.k != self.k:
            if self.k is not None and self._trainer.is_global_zero:
                budget = record.plt_budget_left
                log.info(
                    "step %d: each checkpoint now saves %d experts per layer (before: %d); PLT %.2f%%%s",
                    *(record.step, record.k, self.k, 100 * record.plt),
                    "" if budget is None else f", {budget:.2%} of all tokens may still be lost",
                )
            self.k = record.k
        every = self._trainer.log_every_n_steps
        if not every or record.step % every:  # 0 switches logging off
            return
        values = {f"moe_ckpt/{name}": value for name, value in self._values(record, event.run_ledger).items()}
        # Not through log(): this runs after the module's own hook, when Lightning takes no more values for the step.
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=record.step)

    def _values(self, record: StepRecord, run_ledger: RunLedger) -> dict[str, float]:
        """Returns the numbers of this step that are known and that the policy has."""
        if record.replayed:
            return {"replayed": 1.0}
        layers = run_ledger.ledger.catalog.layers
        skews = normalized_hhi(run_ledger.activity.newest, [layer.experts for layer in layers])
        values: dict[str, float | None] = {
            "stall_ms": record.stall_secs * 1e3,
            "agree_ms": record.agree_secs * 1e3,
            "bytes": record.nbytes,
            "bytes_full": record.nbytes - record.frozen_nbytes,
            "bytes_compute": record.frozen_nbytes,
            "skewness": skews.mean() if skews.size else None,
            "plt_if_failed_now": record.at_risk_plt,
            "mlt_if_failed_now": record.at_risk_mlt,
            "window_age": record.window_age,
            "window_size": record.window or None,
            "window_slot": record.slot if record.window else None,
            "replayed": False,
            **{name: getattr(record, name) for name in _AS_RECORDED},
        }
        if record.memory_nbytes:  # with memory that outlives the process
            values |= {
                "memory_step": record.memory_step,
                "memory_bytes": record.memory_nbytes,
                "to_storage": record.to_storage,
                "replica_lag_steps": record.replica_lag_steps,
                "replica_sent_bytes": record.replica_sent_nbytes,
                "replica_saved_bytes": record.replica_saved_nbytes,
                "gradient_factor": record.gradient_factor,
            }
        return {name: float(value) for name, value in values.items() if value is not None}
