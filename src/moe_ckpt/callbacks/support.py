"""Checks whether a Lightning strategy is supported, and whether a resume will be exact."""

from __future__ import annotations

import logging
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from moe_ckpt.callbacks.compat import NAMES, Private
from moe_ckpt.callbacks.data_position import dealer_of, why_unknown
from moe_ckpt.data import draws_new_order, samplers_of
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.modeling.bucket_order import BucketOrder

log = logging.getLogger("moe_ckpt")

SHARDING_ATTRIBUTE = "moe_ckpt_sharding"
"""Attribute by which other strategies say how they spread the state: a key of ``SHARDINGS``."""

SHARDINGS = {
    "replicated": "every rank holds all parameters and optimizer state, as ordinary tensors (DDP)",
    "dtensor": "state that is sharded over ranks is in DTensors, optimizer state too (FSDP2, tensor parallel)",
}
_SHARDING_OF: dict[type[Strategy], str] = {
    SingleDeviceStrategy: "replicated",
    DDPStrategy: "replicated",
    ModelParallelStrategy: "dtensor",
}
_ADVICE = "Use strategy='ddp', ModelParallelStrategy (FSDP2, tensor parallel) or a single device."


def sharding_of(strategy: Any) -> str:
    """Returns how the strategy spreads the training state over ranks: a key of ``SHARDINGS``.

    Known strategies are matched by exact class, because a subclass may differ: NeMo's ``MegatronStrategy`` is a
    ``DDPStrategy`` whose ranks hold different experts. Others have the attribute ``moe_ckpt_sharding``.

    Raises:
        UnsupportedError: Experts cannot be saved alone under this strategy, or it lacks the attribute.
        ConfigError: The attribute is not a key of ``SHARDINGS``.
    """
    name = type(strategy).__name__
    sharding = _SHARDING_OF.get(type(strategy))
    if sharding is not None:
        return sharding
    if isinstance(strategy, FSDPStrategy):
        raise UnsupportedError(
            f"MoECheckpoint with {name} (FSDP1): its flat parameters mix experts, so no expert can be saved alone. "
            f"{_ADVICE}"
        )
    if isinstance(strategy, DeepSpeedStrategy):
        raise UnsupportedError(
            f"MoECheckpoint with {name}: DeepSpeed keeps master weights and optimizer state in its own partitions, "
            f"which this library cannot read. {_ADVICE}"
        )
    named = getattr(strategy, SHARDING_ATTRIBUTE, None)
    if named in SHARDINGS:
        return str(named)
    choices = "; ".join(f"{key!r} if {meaning}" for key, meaning in SHARDINGS.items())
    if named is not None:
        raise ConfigError(f"{name}.{SHARDING_ATTRIBUTE} is {named!r}: choose {choices}")
    if any("megatron" in kind.__name__.lower() for kind in type(strategy).__mro__):
        raise UnsupportedError(
            f"MoECheckpoint with {name}: its ranks hold different experts, pipeline stages and optimizer shards of "
            "Megatron-Core, which the Lightning callback does not see. In a Megatron training loop use "
            f"moe_ckpt.megatron.attach(model_chunks, optimizer, ...) instead. {_ADVICE}"
        )
    parents = ", ".join(kind.__name__ for kind in type(strategy).__mro__[1:] if kind in _SHARDING_OF) or "none of them"
    raise UnsupportedError(
        f"MoECheckpoint with {name} (a subclass of {parents}): this strategy is not known, and saving it as if it held "
        f"its state like another would lose experts. {_ADVICE} If you know how it holds its state, declare it by the "
        f"class attribute {SHARDING_ATTRIBUTE}: {choices}."
    )


def buckets_of(trainer: Any) -> BucketOrder:
    """Returns the order of DDP's buckets."""
    strategy = trainer.strategy
    hooked = isinstance(strategy, DDPStrategy) and Private(strategy).ddp_comm_hook is not None
    return BucketOrder(strategy.model, trainer.world_size, hooked=hooked)


def boost_refusal(strategy: Any) -> str | None:
    """Returns why no router may take a capacity boost under this strategy; None if routers may."""
    mesh: Any = getattr(strategy, NAMES["device_mesh"], None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if "tensor_parallel" in names and mesh["tensor_parallel"].size() > 1:
        return (
            "tensor-parallel ranks route the same tokens independently, and would choose differently. A boost needs "
            "data-parallel ranks (DDP, FSDP2)"
        )
    return None


def reasons_for_inexact_resume(trainer: Any, buckets: BucketOrder) -> list[str]:
    """Returns the reasons why a resume in the middle of an epoch would not be exact; [] if it would be.

    Called once per fit, when the loaders exist, to warn before a failure.

    Args:
        trainer: Of the fit.
        buckets: Of DDP.
    """
    reasons = [] if buckets.inexact is None else [buckets.inexact]
    for loader in Private(trainer.fit_loop).combined_loader.flattened:
        name = type(loader).__name__
        unknown = why_unknown(trainer, loader)
        if unknown is not None:
            reasons.append(unknown)
        elif dealer_of(loader) is not None:
            continue
        elif not hasattr(loader, "state_dict"):
            reasons.append(
                f"{name} keeps no position (give it sampler=moe_ckpt.data.RecoverableDistributedSampler(dataset), or "
                "use torchdata's StatefulDataLoader)"
            )
        elif any(isinstance(sampler, DistributedSamplerWrapper) for sampler in samplers_of(loader)):
            reasons.append(
                f"the sampler that Lightning put into {name} draws a new order after a resume (give the loader "
                "sampler=moe_ckpt.data.RecoverableDistributedSampler(dataset), which Lightning leaves alone)"
            )
        elif any(draws := [sampler for sampler in samplers_of(loader) if draws_new_order(sampler)]):
            reasons.append(
                f"the {type(draws[0]).__name__} in {name} draws a new order after a resume (give the loader "
                "shuffle=True in its place, or sampler=moe_ckpt.data.RecoverableDistributedSampler(dataset))"
            )
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        reasons.append(
            "Lightning does not restore the training metrics that ReduceLROnPlateau may monitor (those of a validation "
            "at the end of the epoch are computed again)"
        )
    return reasons


def warn_of_timers(trainer: Any) -> None:
    """Warns of a ``Timer`` (``max_time``) that ends training after one step, since it counts the time of all starts."""
    for callback in trainer.callbacks if trainer.is_global_zero else ():
        if isinstance(callback, Timer) and (remaining := callback.time_remaining()) is not None and remaining <= 0:
            log.warning(
                "the Timer (Trainer(max_time=...)) has no time left: it counts the time of all starts of the run "
                "together, and ends training after one batch. Raise max_time, or set max_steps in its place and let "
                "the scheduler end the job"
            )


def warn_of_partial_means(trainer: Any) -> None:
    """Warns, at the end of an epoch that was resumed in its middle, of training metrics that are means over epochs."""
    logged = [result.meta for result in Private(trainer.fit_loop.epoch_loop).results.values()]
    names = sorted({meta.name for meta in logged if meta.on_epoch and "epoch" not in meta.fx})
    if names and trainer.is_global_zero:
        log.warning(
            "what training logs for this whole epoch (%s) leaves out the batches before the resume: Lightning does not "
            "restore such metrics. Weights are not concerned, but EarlyStopping, ModelCheckpoint and schedulers that "
            "monitor them are: let these monitor a metric of validation",
            ", ".join(names),
        )


def require_restartable(trainer: Any) -> None:
    """Refuses, before the first step, a run that no restart could continue.

    Raises:
        UnsupportedError: A scheduler needs a metric after a batch. A restarted run lacks it until it is logged, so
            Lightning would end the run, at each restart.
    """
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "step" and config.strict:
            raise UnsupportedError(
                "MoECheckpoint with ReduceLROnPlateau and interval='step': after a restart Lightning has no "
                f"{config.monitor!r} until training logs it again, and ends the run because of that. Use "
                "interval='epoch' (exact, if it monitors a metric of validation), or strict=False, with which "
                "Lightning leaves such updates out"
            )
