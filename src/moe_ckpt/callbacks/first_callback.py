"""A callback in front of all others, for hooks in which other callbacks may change weights.

``MoECheckpoint`` itself runs last, after what the others do. But averaging callbacks replace weights at the end of an
epoch, around a validation and when training ends, through ``.data``, which no version counter notices, so a copy under
way is joined before the first of them. During a replay no callback may read weights before the window's are loaded.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from moe_ckpt.callbacks.fit import Fit
from moe_ckpt.callbacks.loop_position import update_plateaus
from moe_ckpt.callbacks.support import warn_of_partial_means


class FirstCallback(pl.Callback):
    """Runs each hook before any other callback. ``MoECheckpoint.setup`` adds it, and sets ``fit``."""

    def __init__(self) -> None:
        self.fit: Fit | None = None
        self._epoch_is_whole = False

    def on_before_backward(self, trainer: Any, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self.fit is not None:
            self.fit.before_backward(loss)

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.fit is not None:
            self.fit.before_callbacks()

    def on_train_epoch_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self._epoch_is_whole = True  # Lightning calls this in no epoch that is resumed in its middle
        self._hooks_begin()

    def on_train_batch_start(self, trainer: Any, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._hooks_begin()

    def _hooks_begin(self) -> None:
        if self.fit is not None and self.fit.host.windows is not None:
            self.fit.host.windows.hooks_begin()

    def on_train_epoch_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if self.fit is not None:
            self.fit.join(update=False)
            if self.fit.driver.restored_step is not None:
                update_plateaus(trainer)
                if not self._epoch_is_whole:
                    warn_of_partial_means(trainer)
            self._epoch_is_whole = False

    def on_validation_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if self.fit is not None:
            self.fit.join(update=False)

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if self.fit is not None:
            self.fit.join(update=False)
            self.fit.driver.catch_up()  # other callbacks may read the last step's record

    def on_fit_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if self.fit is not None:
            self.fit.end_untrained()
