"""Captures the gradients that optimizers of a torch module consume, in a Lightning fit or in a plain loop.

Gradients of an update stay in memory during the next forward pass: under automatic optimization Lightning zeroes them
after ``training_step``. A copy can be made meanwhile, and must end (``release``) before that, and before a backward
pass writes into buffers that outlive their gradients (DDP with ``gradient_as_bucket_view``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moe_ckpt.driver.run import Driver
from moe_ckpt.errors import UnsupportedError
from moe_ckpt.gradient_log.capture import GradientCapture, GradientConsumer
from moe_ckpt.gradient_log.recording import RunLog
from moe_ckpt.gradient_log.units import Unit, whole_unit
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.modeling.blocks import block_of
from moe_ckpt.modeling.names import parameters_of
from moe_ckpt.stopwatch import Stopwatch


def capture_gradients(
    trainer: Any,
    module: Any,
    consumer: GradientConsumer,
    rounded: torch.dtype | None = None,
    stopwatch: Stopwatch | None = None,
) -> GradientCapture:
    """Gives ``consumer`` the gradients of every update, from now until ``GradientCapture.close``.

    With automatic and manual optimization, several optimizers, accumulated gradients, loss scaling and clipping, it
    gets gradients as the optimizer does. Names are those of ``modeling.names.parameters_of``; of DTensors it gets the
    local blocks.

    Args:
        trainer: Trainer whose optimizers are set up, as in ``on_fit_start`` or later.
        module: The model.
        consumer: Gets the gradients.
        rounded: Type to which wider gradients are rounded before each update; None: they are not rounded.
        stopwatch: Counts the time of hooks.

    Raises:
        UnsupportedError: Steps of an optimizer cannot be repeated from gradients, or it holds a parameter that is not
            the model's.
    """
    capture = GradientCapture(trainer.optimizers, _ModuleUnits(module), consumer, rounded, stopwatch)
    wrapped = module.optimizers(use_pl_optimizer=True)
    # Under manual optimization users zero gradients through Lightning's wrapper, which has its own method.
    capture.release_before([*trainer.optimizers, *(wrapped if isinstance(wrapped, list) else [wrapped])], "zero_grad")
    capture.release_before([trainer.strategy], "backward")
    return capture


def fit_log(trainer: Any, module: Any, driver: Driver) -> RunLog:
    """Returns the gradient log of a fit.

    Args:
        trainer: Trainer whose optimizers are set up.
        module: The model.
        driver: Driver of the run; its stopwatch counts the time of hooks.

    Raises:
        UnsupportedError: The policy logs gradients, and ``capture_gradients`` refuses.
    """
    attach = partial(capture_gradients, trainer, module, stopwatch=driver.stopwatch)
    return RunLog(attach, trainer.optimizers, driver.options.policy, driver.release_gradients)


def loop_log(optimizers: Sequence[Optimizer], module: nn.Module, driver: Driver) -> RunLog:
    """Returns the gradient log of a loop without a framework, which zeroes gradients through its optimizers.

    Args:
        optimizers: All that update the model.
        module: The model.
        driver: As of ``fit_log``.

    Raises:
        UnsupportedError: As ``fit_log``.
    """

    def attach(consumer: GradientConsumer, rounded: torch.dtype | None) -> GradientCapture:
        capture = GradientCapture(optimizers, _ModuleUnits(module), consumer, rounded, driver.stopwatch)
        capture.release_before([*optimizers, module], "zero_grad")
        return capture

    return RunLog(attach, optimizers, driver.options.policy, driver.release_gradients)


class _ModuleUnits:
    def __init__(self, module: Any) -> None:
        self._module = module
        self._names: dict[int, tuple[torch.Tensor, str]] = {}

    def __call__(self, number: int, group: int, parameter: torch.Tensor) -> Unit:
        if id(parameter) not in self._names:  # it keeps tensors alive, so that their ids are unique
            self._names = {id(tensor): (tensor, name) for name, tensor in parameters_of(self._module)}
        _, name = self._names.get(id(parameter), (parameter, None))
        if name is None:
            raise UnsupportedError(
                f"optimizer {number} updates a parameter of shape {tuple(parameter.shape)} that is not among the "
                "model's named_parameters(): make its owner an attribute of the module."
            )
        block = block_of(parameter, name)
        return whole_unit(name, number, group, block.local, Box(block.offsets, tuple(block.local.shape)))
