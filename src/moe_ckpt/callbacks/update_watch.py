"""Counts optimizer updates, and runs a function after every batch-end hook.

A step that the loss scaler skips advances ``global_step`` but runs no optimizer hook. The module's own
``on_train_batch_end`` runs after all callbacks' and may still change weights or buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
from torch.utils.hooks import RemovableHandle

from moe_ckpt.errors import ConfigError
from moe_ckpt.stopwatch import Stopwatch


class Batch(NamedTuple):
    """What a batch did.

    Attributes:
        stepped: ``trainer.global_step`` moved.
        updates: How often an optimizer stepped.
        applied: At least one of these updates was not skipped because gradients overflowed.
    """

    stepped: bool
    updates: int
    applied: bool


class UpdateWatch:
    """Hooks on module and optimizers, from ``on_fit_start`` until ``close``.

    Args:
        trainer: Of the fit.
        module: The model.
        before_update: Called before a raw optimizer steps, under manual optimization.
        after_batch: Called after every batch-end hook.
        is_searching: Whether batches are no part of the run: then ``before_update`` is called here, as no callback is.
        stopwatch: Counts what hooks take.

    Attributes:
        steps_seldom: A batch made no step, so that others may not either.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        before_update: Callable[[], None],
        after_batch: Callable[[], None],
        is_searching: Callable[[], bool],
        stopwatch: Stopwatch,
    ) -> None:
        self.steps_seldom = False
        self._updates = self._booked = 0
        self._global_step = self._applied = 0
        self._hooks: list[RemovableHandle] = []
        name = "on_train_batch_end"
        theirs, had = getattr(module, name), vars(module).get(name)

        def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
            theirs(*args, **kwargs)
            after_batch()

        setattr(module, name, on_train_batch_end)
        self._restore: Callable[[], None] = lambda: delattr(module, name) if had is None else setattr(module, name, had)
        for optimizer in trainer.optimizers:
            self._hooks.append(optimizer.register_step_post_hook(stopwatch.around(self._count)))
            # The raw optimizer bypasses Lightning's hook. Under automatic optimization this hook runs before the
            # forward pass, which is in the closure, and a join there would stall training.
            bypassed = not module.automatic_optimization

            def begins(*_: Any, bypassed: bool = bypassed) -> None:
                if bypassed or is_searching():
                    before_update()

            self._hooks.append(optimizer.register_step_pre_hook(stopwatch.around(begins)))

    def begin(self, global_step: int) -> None:
        """Training begins at ``trainer.global_step``. Updates made before, to come back to it, do not count."""
        self._global_step = global_step
        self._updates = self._booked = self._applied = 0

    @property
    def unbooked(self) -> int:
        """Updates since the last call of ``book``."""
        return self._updates - self._booked

    @property
    def moved(self) -> bool:
        """Whether any update was booked."""
        return self._booked > 0

    def book(self, global_step: int) -> Batch:
        """Returns what this batch did. It made no update if gradients accumulate, or the loss scaler skipped the step.

        Raises:
            ConfigError: There were updates, and ``global_step`` did not move.
        """
        stepped, updates = global_step != self._global_step, self.unbooked
        self._global_step = global_step
        self.steps_seldom |= not stepped
        if updates and not stepped:
            raise ConfigError(
                "an optimizer stepped, but trainer.global_step did not: in manual optimization call step() on what "
                "self.optimizers() returns (use_pl_optimizer=True), or steps cannot be counted"
            )
        applied, self._booked, self._applied = self._applied > 0, self._updates, 0
        return Batch(stepped, updates, applied)

    def forget(self) -> None:
        """Ignores the updates since the last call of ``book``: they are no part of the run."""
        self._booked, self._applied = self._updates, 0

    def _count(self, optimizer: Any, *_: Any) -> None:
        self._updates += 1
        # A fused optimizer is handed the loss scale, and leaves out an overflow by itself, on the device.
        self._applied += getattr(optimizer, "found_inf", None) is None

    def close(self) -> None:
        """Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._restore()
        self._restore = lambda: None
