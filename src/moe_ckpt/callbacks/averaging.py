"""Stochastic weight averaging: what Lightning's callback needs to go on from the middle of an epoch.

It swaps the scheduler and begins to average at the start of an epoch, which Lightning does not announce
again when a run goes on from the middle of one.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import StochasticWeightAveraging


def go_on_averaging(trainer: Any) -> None:
    """Put the averaging scheduler back where the checkpoint was taken, if it was in use there.

    Called when callbacks, loops and optimizers have their state back, and before schedulers get theirs.
    """
    for callback in trainer.callbacks:
        if not isinstance(callback, StochasticWeightAveraging) or callback._scheduler_state is None:
            continue
        # Its scheduler is the one whose state was stored; the run's own must not be given that.
        callback._clear_schedulers(trainer)
        if trainer.current_epoch != callback._latest_update_epoch:
            continue  # the epoch is yet to begin, and Lightning will say so
        groups = trainer.optimizers[0].param_groups
        before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        callback.on_train_epoch_start(trainer, trainer.lightning_module)
        for group, values in zip(groups, before, strict=True):
            group.update(values)  # a scheduler's constructor takes a first step
