"""What is told about a step: to the metrics always, to the user's loggers now and then, to the log when K changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from moe_ckpt.core.skew import normalized_hhi
from moe_ckpt.engine.books import Books
from moe_ckpt.engine.record import StepRecord
from moe_ckpt.metrics import checkpoint_metrics
from moe_ckpt.metrics.collection import facts, window_age

log = logging.getLogger("moe_ckpt")


class StepLog:
    """Fed by ``MoECheckpoint`` once per optimizer step, on every rank, on the training thread.

    experts: number of experts of each MoE layer.
    k: experts per layer that were saved before this process began, if that is known.
    metrics: never asks other ranks, so that one rank alone may call ``compute``.
    """

    def __init__(self, experts: Sequence[int] = (), k: int | None = None) -> None:
        self.experts = tuple(experts)
        self.k = k
        self.metrics: Any = checkpoint_metrics(self.experts or None, sync_on_compute=False)

    def note(self, trainer: Any, record: StepRecord, books: Books) -> None:
        """Update the metrics; every ``log_every_n_steps`` tell the loggers; say when K has changed.

        A step that is computed again was counted when it was new, so the metrics leave it out, and the loggers hear
        only that it was one.
        """
        if not record.replayed:
            self.metrics.update(**facts(record, books))
        if record.k is not None and record.k != self.k:
            if self.k is not None and trainer.is_global_zero:
                _say_k(record, self.k)
            self.k = record.k
        every = trainer.log_every_n_steps
        if not every or record.step % every:  # 0 switches logging off
            return
        values = {f"moe_ckpt/{name}": value for name, value in self._values(record, books).items()}
        # Not through log(): this runs after the module's own hook, when Lightning takes no more values for the step.
        for logger in trainer.loggers:
            logger.log_metrics(values, step=record.step)

    def _values(self, record: StepRecord, books: Books) -> dict[str, float]:
        """Numbers of this step; those that are not known, or not kept by the policy, are left out."""
        if record.replayed:
            return {"replayed": 1.0}
        skews = normalized_hhi(books.popularity, self.experts)
        values: dict[str, float | None] = {
            "stall_ms": record.stall_secs * 1e3,
            "agree_ms": record.agree_secs * 1e3,
            "bytes": record.nbytes,
            "bytes_full": record.nbytes - record.frozen_nbytes,
            "bytes_compute": record.frozen_nbytes,
            "experts_saved": record.experts_saved,
            "k": record.k,
            "oldest_expert_steps": record.oldest_expert_steps,
            "skewness": skews.mean() if skews.size else None,
            "plt": record.plt,
            "plt_if_failed_now": record.at_risk_plt,
            "plt_budget_left": record.plt_budget_left,
            "lost_tokens": record.lost_tokens,
            "routed_tokens": record.routed_tokens,
            "begun": record.begun,
            "skipped": record.skipped,
            "waited": record.waited,
            "skips": record.skips,
            "waits": record.waits,
            "failed_checkpoints": record.failed_checkpoints,
            "committed_step": record.committed_step,
            "window_age": window_age(record),
            "window_size": record.window or None,
            "window_slot": record.slot if record.window else None,
            "replayed": False,
        }
        return {name: float(value) for name, value in values.items() if value is not None}


def _say_k(record: StepRecord, before: int) -> None:
    left = "" if record.plt_budget_left is None else f", {record.plt_budget_left:.2%} of all tokens may still be lost"
    log.info(
        "step %d: %d experts of each layer are saved per checkpoint from now on, %d before; PLT %.2f%%%s",
        record.step, record.k, before, 100 * record.plt, left,
    )  # fmt: skip
