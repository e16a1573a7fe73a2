"""A callback in front of all others, for hooks in which others may put other weights into the model.

``MoECheckpoint`` itself stands behind the others, to see what they have done. But averaging callbacks swap
or replace the weights at the end of an epoch, around a validation and when training ends, through ``.data``,
which no version counter notices. A copy still under way must be joined before the first of them runs. And while
steps are computed again to bring a sparse window back, nobody may see weights before the window's are in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl


class InFront(pl.Callback):
    """Calls ``join`` before any other callback hears of the hook, and ``batch_ended`` when a batch ended.

    Put in place by ``MoECheckpoint.setup``.
    """

    def __init__(self, join: Callable[[], None], batch_ended: Callable[[Any], None]) -> None:
        self.join = join
        self.batch_ended = batch_ended

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batch_ended(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.join()

    def on_validation_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.join()

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.join()
