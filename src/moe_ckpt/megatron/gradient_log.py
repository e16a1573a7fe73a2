"""The gradient log of a Megatron training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from moe_ckpt.driver.run import Driver, release_gradients
from moe_ckpt.engine.options import Options
from moe_ckpt.errors import ConfigError
from moe_ckpt.gradients.recording import Ignored, StepRecorder
from moe_ckpt.gradients.run_log import RunLog
from moe_ckpt.megatron.gradients import capture_gradients, inner_optimizers, weights_from_masters
from moe_ckpt.megatron.inventory import ModelInventory
from moe_ckpt.megatron.optimizers import slots


def run_log(
    inventory: ModelInventory,
    optimizer: Any,
    chunks: Sequence[Any],
    options: Options,
    driver: Driver,
) -> RunLog:
    """Returns the gradient log of a training loop, which records nothing unless the policy logs gradients.

    Args:
        inventory: Of the model chunks.
        optimizer: Megatron's.
        chunks: The model chunks.
        options: The user's.
        driver: Of the run, whose stopwatch counts what hooks take.

    Raises:
        ConfigError: Megatron changes weights behind the optimizer's update.
        UnsupportedError: As ``capture_gradients``.
    """
    attach = partial(capture_gradients, inventory, optimizer, chunks, stopwatch=driver.stopwatch)
    inner = inner_optimizers(optimizer)
    recorder: StepRecorder | None = None
    if options.needs.gradients:
        _refuse_qk_clip(chunks, type(options.policy).__name__)
        attach(Ignored()).close()  # whatever is refused, is refused before training
        keys, stored = [0] * len(inner), options.needs.stored_gradients  # keys as ``megatron.state`` has them
        copies, gathered = list(_copies(inventory, optimizer)), _gathers_late(chunks)
        recorder = StepRecorder(inner, partial(release_gradients, driver), keys, stored, copies, gathered=gathered)
    return RunLog(attach, inner, recorder, partial(weights_from_masters, optimizer, chunks))


def _copies(inventory: ModelInventory, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the model's weights of which the optimizer updates a master copy, with their names."""
    names = {live.parameter: live.parts[0].name for live in inventory.parameters}
    for parameter, slot in slots(optimizer).items():
        if slot.master is not None:
            yield names[parameter], parameter


def _gathers_late(chunks: Sequence[Any]) -> bool:
    """Whether the next forward pass gathers weights from other ranks."""
    return any(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in chunks)


def _refuse_qk_clip(chunks: Sequence[Any], policy: str) -> None:
    """Raises ``ConfigError`` if Megatron clips weights behind updates, by ``.data``: torch does not count that."""
    modules = (module for chunk in chunks for module in chunk.modules())
    if any(getattr(getattr(module, "config", None), "qk_clip", False) for module in modules):
        raise ConfigError(
            f"{policy} and Megatron's qk_clip contradict each other: QK-clip changes weights behind the optimizer's "
            "update, and a log of gradients holds the update alone. Train without --qk-clip, or take a policy that "
            "saves full state (MoEvement, Dense, MoC, or MoEtion without recompute)"
        )
