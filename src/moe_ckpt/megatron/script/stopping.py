"""Seals the newest iteration when Megatron-LM's ``train`` stops at a failure.

The loop advances the scheduler and counts samples and operations after the update. If an error comes in between, the
weights are already those of the next iteration, so its state is complete once the rest is counted as the loop would
have. A validation that did not end is left to the next start.

Under Megatron-LM's own ``--inprocess-restart`` a monitor interrupts the process to let it train again, but not while
the newest iteration is sealed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from moe_ckpt.megatron.checkpoint import MegatronCheckpoint, end_iteration, has_updated
from moe_ckpt.megatron.compat import megatron_core
from moe_ckpt.megatron.script.arguments import counters_of
from moe_ckpt.megatron.script.validation import DUE, follows
from moe_ckpt.megatron.trainer_state import capture_generators


def uninterrupted() -> AbstractContextManager[Any]:
    """Keeps the monitor from interrupting the block, by the call wrapper that ``pretrain`` has as a local variable.

    Called within ``pretrain``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "pretrain":
        frame = frame.f_back
    call = None if frame is None else frame.f_locals.get("inprocess_call_wrapper")
    guard: AbstractContextManager[Any] = contextlib.nullcontext() if call is None else call.atomic()
    return guard


class StartedIteration:
    """The loop's counters when an iteration began.

    Args:
        ckpt: Of the run.
        settings: Megatron's arguments.
        training: The module ``megatron.training.training``.
        scheduler: That ``train_step`` moves.
    """

    def __init__(self, ckpt: MegatronCheckpoint, settings: Any, training: Any, scheduler: Any) -> None:
        self._ckpt, self._settings, self._training, self._scheduler = ckpt, settings, training, scheduler
        self._scheduler_steps = scheduler.num_steps
        self._consumed: int = settings.consumed_train_samples
        self._skipped: int = getattr(settings, "skipped_train_samples", 0)
        self._validated: int = getattr(settings, "consumed_valid_samples", 0)
        self._generators: Mapping[str, Any] | None = None
        self._is_validated = False

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """The block runs the validation that follows the iteration."""
        self._generators = capture_generators()
        yield
        self._is_validated = True

    def count(self, operations: Any) -> bool:
        """Counts the iteration, whose update is made, as the loop would have.

        Args:
            operations: Floating-point operations by the iteration before.

        Returns:
            False where weights change after the update, since it is not known whether they have.
        """
        ckpt, settings, updated = self._ckpt, self._settings, has_updated(self._ckpt)
        iteration = ckpt.iteration + 1
        if getattr(settings, "qk_clip", False) or getattr(settings, "vision_pretraining", False):
            return False
        is_due = follows(settings, iteration) and not self._is_validated
        calculator = importlib.import_module("megatron.core.num_microbatches_calculator")
        micro_batches = calculator.get_num_microbatches() * settings.micro_batch_size
        samples = megatron_core().parallel_state.get_data_parallel_world_size() * micro_batches
        if updated and self._scheduler.num_steps == self._scheduler_steps:
            self._scheduler.step(increment=micro_batches * settings.data_parallel_size)
        counters = counters_of(settings, operations + self._training.num_floating_point_operations(settings, samples))
        if "skipped_train_samples" in counters:
            left_out = calculator.get_current_global_batch_size() - calculator.get_current_running_global_batch_size()
            counters["skipped_train_samples"] = self._skipped + left_out
        if is_due:
            counters |= {"consumed_valid_samples": self._validated, DUE: True}
        tokens = end_iteration(ckpt, iteration, self._consumed + samples, counters, updated=updated)
        if is_due and self._generators:
            ckpt._host.generators.state = self._generators
        ckpt._driver.count(tokens, updated=updated)
        return True
