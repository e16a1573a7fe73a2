"""What this adapter serves, what it refuses and why, and the name that a job keeps over a restart."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from moe_ckpt.callbacks.data_position import dealer_of, why_unknown
from moe_ckpt.errors import UnsupportedError

_ADVICE = "Use strategy='ddp', ModelParallelStrategy (FSDP2, tensor parallel) or a single device."


def check_strategy(trainer: pl.Trainer) -> None:
    """Raise ``UnsupportedError`` for a strategy whose state cannot be cut into experts exactly."""
    strategy = trainer.strategy
    name = type(strategy).__name__
    if isinstance(strategy, FSDPStrategy):
        raise UnsupportedError(
            f"MoECheckpoint with {name} (FSDP1): its flat parameters cut through experts, so no expert can be saved "
            f"alone. {_ADVICE}"
        )
    if isinstance(strategy, DeepSpeedStrategy):
        raise UnsupportedError(
            f"MoECheckpoint with {name}: DeepSpeed keeps master weights and optimizer state in partitions of its own, "
            f"out of this library's reach. {_ADVICE}"
        )
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)):
        raise UnsupportedError(f"MoECheckpoint with {name}: this strategy is not supported. {_ADVICE}")


def inexact(trainer: Any) -> list[str]:
    """Why a resume in mid-epoch would not go on exactly as the run would have; [] if it would.

    Called once per fit, when the loaders exist: to warn before a failure, not after it.
    """
    found = []
    for loader in trainer.fit_loop._combined_loader.flattened:
        name = type(loader).__name__
        unknown = why_unknown(trainer, loader)
        if unknown is not None:
            found.append(unknown)
        elif dealer_of(loader) is not None:
            continue
        elif not hasattr(loader, "state_dict"):
            found.append(
                f"{name} keeps no position (give it sampler=moe_ckpt.data.RecoverableDistributedSampler(dataset), or "
                "use torchdata's StatefulDataLoader)"
            )
        elif isinstance(getattr(loader, "sampler", None), DistributedSamplerWrapper):
            found.append(
                f"the sampler that Lightning put into {name} draws a new order after a resume (give the loader "
                "sampler=moe_ckpt.data.RecoverableDistributedSampler(dataset), which Lightning leaves alone)"
            )
        elif sized_len(loader) is None:
            found.append(f"{name} has no length, so Lightning fetches one batch ahead and a resume loses that batch")
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        found.append("Lightning does not bring back the metrics that ReduceLROnPlateau looks at")
    return found
