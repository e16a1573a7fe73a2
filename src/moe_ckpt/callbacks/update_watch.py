"""Counts optimizer updates, and calls ``Fit.after_batch`` after every batch-end hook.

A step that the loss scaler skips advances ``global_step`` but runs no optimizer hook. The module's own
``on_train_batch_end`` runs after all callbacks' and may still change weights or buffers.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from moe_ckpt.callbacks.compat import call_callback_hooks, call_module_hook
from moe_ckpt.driver.states import Moment
from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.updates import Updates
from moe_ckpt.run.agreement import Updated
from moe_ckpt.stopwatch import timed

if TYPE_CHECKING:
    from moe_ckpt.callbacks.fit import Fit

log = logging.getLogger("moe_ckpt")

_HOOK = "on_train_batch_end"


class WatchedBatch(NamedTuple):
    """The updates that a batch made.

    Attributes:
        stepped: ``trainer.global_step`` moved.
        updates: How often an optimizer stepped.
        applied: At least one of these updates was not skipped because gradients overflowed.
    """

    stepped: bool
    updates: int
    applied: Updated


class UpdateWatch:
    """Hooks on module and optimizers, from ``on_fit_start`` until ``close``.

    Args:
        fit: Its ``before_update`` is called before the step of an optimizer for which Lightning calls no callback
            (under manual optimization, and in batches that are no part of the run), and ``after_batch`` after every
            batch-end hook.

    Attributes:
        stopwatch: Counts the time of the optimizers' hooks.
        updates: Those of the optimizers since ``book``.
        moved: Some update was booked.
        steps_seldom: Some batch made no step, so others may make none either.
        hooks_began: Batch-end hooks are running, so learning rate schedules have made their step.
    """

    def __init__(self, fit: Fit) -> None:
        trainer, module = fit.host.trainer, fit.host.module
        self.stopwatch = fit.stopwatch
        self.steps_seldom = self.hooks_began = self.moved = False
        self._fit, self._trainer, self._module = fit, trainer, module
        self._rates: list[Any] = []
        self.updates = self._global_step = 0
        self._applied = Updates()
        self._undo = ExitStack()
        self._module_hook = is_overridden(_HOOK, module)
        theirs, had = getattr(module, _HOOK), vars(module).get(_HOOK)

        def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
            theirs(*args, **kwargs)
            fit.after_batch()

        setattr(module, _HOOK, on_train_batch_end)
        self._undo.callback(lambda: delattr(module, _HOOK) if had is None else setattr(module, _HOOK, had))
        for optimizer in trainer.optimizers:
            self._undo.callback(optimizer.register_step_pre_hook(self._begins).remove)
            self._undo.callback(optimizer.register_step_post_hook(self._count).remove)

    def begin(self, global_step: int) -> None:
        """Training begins at ``trainer.global_step``. Updates made before, to return to it, do not count."""
        self._global_step = global_step
        self.forget()

    def book(self, global_step: int) -> WatchedBatch:
        """Books the updates of this batch: none if gradients accumulate, or the loss scaler skipped the step.

        Raises:
            ConfigError: There were updates, and ``global_step`` did not move.
        """
        batch = WatchedBatch(global_step != self._global_step, self.updates, self._applied.take())
        if batch.updates and not batch.stepped:
            raise ConfigError(
                "an optimizer stepped, but trainer.global_step did not: in manual optimization call step() on what "
                "self.optimizers() returns (use_pl_optimizer=True), or steps cannot be counted"
            )
        self._global_step, self.updates = global_step, 0
        self.hooks_began = False
        self.steps_seldom |= not batch.stepped
        self.moved |= batch.updates > 0
        return batch

    def require_whole(self, error: BaseException | None) -> None:
        """Raises ``RuntimeError`` unless the step of a batch that ``error`` ended is complete; warns of missing hooks.

        Learning rate schedules must have made their step. Hooks that are known to change saved state must have run:
        the module's own, and those of callbacks with state.

        Args:
            error: None if it is not known.
        """
        batch = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if not self.updates or batch.processed < batch.ready:
            raise RuntimeError("its update is made, but the batch has not come to its end")
        if not self.hooks_began and any(old is new for old, new in zip(self._rates, self._rates_now(), strict=True)):
            raise RuntimeError("its update is made, but its learning rate schedules have not come to their ends")
        cut_off, due = self._hooks_after(error)
        saved = [
            type(owner).__name__
            for owner in due
            if isinstance(owner, pl.LightningModule)
            or any(is_overridden(name, owner) for name in ("state_dict", "on_save_checkpoint"))
        ]
        if saved:
            raise RuntimeError(
                f"its update is made, but {_HOOK} of {' and '.join(saved)} had still to run, which changes what is "
                "saved. Place callbacks that may fail behind others"
            )
        if others := [type(owner).__name__ for owner in (*cut_off, *due)]:
            log.warning(
                "%s of %s has not come to its end in step %d: that step is kept without what was still to change",
                *(_HOOK, " and ".join(others), self._trainer.global_step),
            )

    def _rates_now(self) -> list[Any]:
        """Returns the list of rates of each schedule, a new object after each of its steps."""
        return [getattr(config.scheduler, "_last_lr", None) for config in self._trainer.lr_scheduler_configs]

    def _hooks_after(self, error: BaseException | None) -> tuple[list[Any], list[Any]]:
        """Returns the callback or module whose batch-end hook failed, if any, and those whose hook had still to run.

        Most of Lightning's own callbacks are left out: their hooks change nothing that training reads.
        """
        due: list[Any] = [*self._trainer.callbacks, *([self._module] if self._module_hook else [])]
        failed: list[Any] = []
        for frame, _ in traceback.walk_tb(None if error is None else error.__traceback__):
            calls, names = frame.f_code.co_name, frame.f_locals
            if names.get("hook_name") != _HOOK:
                continue
            if calls == call_module_hook.__name__:
                failed, due = [self._module], []
            elif calls == call_callback_hooks.__name__ and names.get("callback") in due:
                at = due.index(names["callback"])
                failed, due = due[at : at + 1], due[at + 1 :]
        return [owner for owner in failed if _is_asked(owner)], [owner for owner in due if _is_asked(owner)]

    def forget(self) -> None:
        """Ignores the updates since the last call of ``book``, which are no part of the run."""
        self.updates = 0
        self._applied.take()
        self.hooks_began = False

    @timed
    def _begins(self, *_: Any) -> None:
        # The raw optimizer bypasses Lightning's hook. Under automatic optimization this hook runs before the forward
        # pass, which is in the closure, and a join there would stall training.
        if not self._module.automatic_optimization or self._fit.is_searching():
            self._fit.before_update()

    @timed
    def _count(self, optimizer: Any, *_: Any) -> None:
        self.updates += 1
        self._applied.note(optimizer)
        self._rates = self._rates_now()
        if not self._fit.is_searching():
            self._fit.driver.note(Moment.WRITTEN)

    def close(self) -> None:
        """Removes the hooks. Safe to call twice."""
        self._undo.close()


def _is_asked(owner: Any) -> bool:
    """Returns whether the batch-end hook of a callback or module may change what training reads."""
    trusted = type(owner).__module__.split(".")[0] in ("lightning", "moe_ckpt") or isinstance(owner, Checkpoint)
    return isinstance(owner, (pl.LightningModule, WeightAveraging)) or (not trusted and is_overridden(_HOOK, owner))
