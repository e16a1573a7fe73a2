"""A callback whose state changes only where training pauses: when an epoch ends."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


class Pausing(pl.Callback):
    """Adds to a sum when an epoch ends.

    Args:
        alike: The same on every rank, else another number on each.
    """

    def __init__(self, alike: bool) -> None:
        self.alike, self.sum = alike, 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.sum += 1 if self.alike else 10**trainer.global_rank

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sum = state_dict["sum"]
