"""Counts real updates, and is the last to hear that a batch ended.

A step that the loss scaler skipped advances ``global_step``, but fires no hook of the optimizer. The module's own
``on_train_batch_end`` runs after all callbacks' and may still change weights or buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch.utils.hooks import RemovableHandle


class UpdateWatch:
    """From ``on_fit_start`` until ``close``, which takes back everything that was put on module and optimizers.

    before_update: called just before a raw optimizer steps, under manual optimization.
    after_batch: called when a batch is over for everybody else.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        before_update: Callable[[], None],
        after_batch: Callable[[], None],
    ) -> None:
        self.updates = 0
        self._hooks: list[RemovableHandle] = []
        name = "on_train_batch_end"
        theirs, had = getattr(module, name), vars(module).get(name)

        def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
            theirs(*args, **kwargs)
            after_batch()

        setattr(module, name, on_train_batch_end)
        self._restore: Callable[[], None] = lambda: delattr(module, name) if had is None else setattr(module, name, had)
        for optimizer in trainer.optimizers:
            self._hooks.append(optimizer.register_step_post_hook(self._count))
            if not module.automatic_optimization:
                # Users may call the raw optimizer, past Lightning's hook. Under automatic optimization this
                # fires before the forward pass (it is wrapped in the closure), where a join would be a stall.
                self._hooks.append(optimizer.register_step_pre_hook(lambda *_: before_update()))

    def _count(self, *_: Any) -> None:
        self.updates += 1

    def close(self) -> None:
        """Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._restore()
        self._restore = lambda: None
