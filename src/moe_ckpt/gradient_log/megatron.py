"""Captures the gradients that Megatron's inner optimizers consume: main gradients, or shards of them.

They are final when the inner optimizer steps: reduced, unscaled and clipped. It does not step if fp16 overflowed. A
unit is a parameter, its fp32 master weights, or a flat range of either. Gradients stay in Megatron's buffers until
``zero_grad_buffer`` at the start of the next iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from moe_ckpt.driver.run import Driver
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.gradient_log.capture import GradientCapture, GradientConsumer
from moe_ckpt.gradient_log.optimizers import Coupling, register
from moe_ckpt.gradient_log.recording import RunLog
from moe_ckpt.gradient_log.units import Unit, UnitBlock
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.megatron.blocks import placed_blocks
from moe_ckpt.megatron.inventory import ModelInventory, has_unread, unwrap_module
from moe_ckpt.megatron.optimizers import MASTER, inner_optimizers, leaves, slots
from moe_ckpt.stopwatch import Stopwatch

_ELEMENTWISE = ("FusedAdam", "FusedSGD")
"""Optimizers of Apex and Transformer Engine that ``leaves`` accepts in addition to torch's."""


def capture_gradients(
    inventory: ModelInventory,
    optimizer: Any,
    chunks: Sequence[Any],
    consumer: GradientConsumer,
    rounded: torch.dtype | None = None,
    stopwatch: Stopwatch | None = None,
) -> GradientCapture:
    """Gives ``consumer`` the gradients of every update of this rank, from now until ``GradientCapture.close``.

    Args:
        inventory: Inventory of the model chunks.
        optimizer: Megatron's optimizer.
        chunks: The model chunks, in Megatron's ``DistributedDataParallel``.
        consumer: Gets the gradients.
        rounded: Type to which wider gradients are rounded before each update; None: they are not rounded.
        stopwatch: Counts the time of hooks.

    Raises:
        UnsupportedError: The layout of the optimizer's state is not known, or its gradients do not stay until the next
            iteration.
    """
    for chunk in chunks:
        if not hasattr(chunk, "zero_grad_buffer"):
            raise UnsupportedError(
                f"{type(chunk).__name__} is not wrapped in Megatron's DistributedDataParallel, so it is not known when "
                "its gradients are overwritten. Wrap it, or use a policy that saves full state."
            )
    for leaf in leaves(optimizer):
        if type(leaf.optimizer).__name__ in _ELEMENTWISE:
            register(type(leaf.optimizer), Coupling.ELEMENTS)
    if any(has_unread(unwrap_module(chunk)) for chunk in chunks):
        raise UnsupportedError(
            "with tied embeddings and multi-token prediction over several pipeline stages Megatron-Core updates an "
            "output layer that nothing reads, and whose gradients a log has no place for. Give the model an output "
            "layer of its own (--untie-embeddings-and-output-weights), or use a policy that saves full state."
        )
    capture = GradientCapture(
        inner_optimizers(optimizer), _ShardUnits(inventory, optimizer), consumer, rounded, stopwatch
    )
    capture.release_before(chunks, "zero_grad_buffer")
    return capture


@torch.no_grad()
def weights_from_masters(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Sets model weights from master weights, on all ranks of a distributed optimizer. A collective."""
    for leaf in leaves(optimizer):
        copy = getattr(leaf, "_copy_main_params_to_model_params", None)
        if copy is not None:
            copy()
    if any(slot.range is not None for slot in slots(optimizer).values()):
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


class _ShardUnits:
    def __init__(self, inventory: ModelInventory, optimizer: Any) -> None:
        live_of = {live.parameter: live for live in inventory.parameters}
        self._entries = {
            id(slot.updated): (at, live_of[parameter], slot)
            for at, (parameter, slot) in enumerate(slots(optimizer).items())
            if slot.updated is not None
        }

    def __call__(self, number: int, group: int, updated: torch.Tensor) -> Unit:
        at, live, slot = self._entries[id(updated)]
        start, stop = slot.range or (0, live.parameter.numel())
        return Unit(
            name=f"{at}: {live.parts[0].name}[{start}:{stop}]",  # a tied embedding is two parameters of one name
            optimizer=number,
            group=group,
            dtype=str(updated.dtype).removeprefix("torch."),
            shape=tuple(updated.shape),
            stride=tuple(updated.stride()),
            pieces=tuple(
                UnitBlock(part.name, Box(placed.offsets, placed.shape), placed.stride, placed.first)
                for part in live.parts
                for placed in placed_blocks(part, start, stop)
            ),
            stored="" if slot.master is None else MASTER,
        )


def loop_log(inventory: ModelInventory, optimizer: Any, chunks: Sequence[Any], driver: Driver) -> RunLog:
    """Returns the gradient log of a training loop.

    Args:
        inventory: Inventory of the model chunks.
        optimizer: Megatron's optimizer.
        chunks: The model chunks.
        driver: Driver of the run; its stopwatch counts the time of hooks.

    Raises:
        ConfigError: The policy logs gradients, and Megatron changes weights behind the optimizer's update.
        UnsupportedError: The policy logs gradients, and ``capture_gradients`` refuses.
    """
    policy, inner = driver.options.policy, inner_optimizers(optimizer)
    configs = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    if driver.options.needs.gradients:
        _refuse_qk_clip(chunks, type(policy).__name__)
    return RunLog(
        partial(capture_gradients, inventory, optimizer, chunks, stopwatch=driver.stopwatch),
        inner,
        policy,
        driver.release_gradients,
        keys=[0] * len(inner),  # as ``megatron.training_state`` has them
        copies=list(_copies(inventory, optimizer)),
        gathered=any(getattr(config, "overlap_param_gather", False) for config in configs),
        finish=partial(weights_from_masters, optimizer, chunks),
    )


def _copies(inventory: ModelInventory, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the model's weights of which the optimizer updates a master copy, with their names."""
    names = {live.parameter: live.parts[0].name for live in inventory.parameters}
    for parameter, slot in slots(optimizer).items():
        if slot.master is not None:
            yield names[parameter], parameter


def _refuse_qk_clip(chunks: Sequence[Any], policy: str) -> None:
    """Raises ``ConfigError`` if Megatron clips weights behind updates, by ``.data``: torch does not count that."""
    modules = (module for chunk in chunks for module in chunk.modules())
    if any(getattr(getattr(module, "config", None), "qk_clip", False) for module in modules):
        raise ConfigError(
            f"{policy} and Megatron's qk_clip contradict each other: QK-clip changes weights behind the optimizer's "
            "update, and a log of gradients holds the update alone. Train without --qk-clip, or take a policy that "
            "saves full state (MoEvement, Dense, MoC, or MoEtion without recompute)"
        )
