"""Passes that make no gradients of some parameters, as in the replay of a sparse window.

Everybody but the forward pass of the module that owns such a parameter sees it as ever: reducers, sharding hooks and
optimizers find ``requires_grad``, so that what ranks do together stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle


class WithoutGradients:
    """Makes passes leave out some gradients, from the constructor until ``close``. On the training thread.

    A parameter that is also used outside of its module's forward pass gets the gradient of that use.

    Args:
        modules: Of the model, all of them.
        frozen: Their parameters that get no gradient.
        connected: Outputs require gradients as if nothing were frozen, so that reentrant checkpoints keep the gradients
            behind them, and a loss always has a backward pass. Else it ends behind the last parameter that is not
            frozen.
    """

    def __init__(self, modules: Iterable[nn.Module], frozen: Collection[nn.Parameter], *, connected: bool) -> None:
        self._connected = connected
        self._handles: list[RemovableHandle] = []
        self._entered: dict[nn.Module, list[list[nn.Parameter]]] = {}
        chosen = {id(parameter) for parameter in frozen if parameter.requires_grad}
        for module in modules:
            names = [name for name, parameter in module._parameters.items() if id(parameter) in chosen]
            if names:
                self._watch(module, names)

    def _watch(self, module: nn.Module, names: Collection[str]) -> None:
        calls = self._entered[module] = []

        def enter(module: nn.Module, args: Any) -> None:
            # By name, for FSDP2 puts other parameters there for the time of the pass.
            here = [module._parameters[name] for name in names] if torch.is_grad_enabled() else []
            calls.append([parameter for parameter in here if parameter is not None and parameter.requires_grad])
            for parameter in calls[-1]:
                parameter.requires_grad_(False)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            spared = calls.pop() if calls else []
            for parameter in spared:
                parameter.requires_grad_(True)
            return _connected(output, spared) if spared and self._connected else None

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def close(self) -> None:
        """Removes the hooks. Safe to call twice."""
        while self._handles:
            self._handles.pop().remove()
        for calls in self._entered.values():
            for parameter in (spared for call in calls for spared in call):
                parameter.requires_grad_(True)
            calls.clear()


def _connected(output: Any, parameters: Collection[nn.Parameter]) -> Any:
    """Returns a module's output, such that its first floating-point tensor requires gradients."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad or not output.is_floating_point():
            return None
        return without_gradient(output, parameters)
    if type(output) not in (tuple, list) or any(isinstance(t, torch.Tensor) and t.requires_grad for t in output):
        return None
    made = list(output)
    for index, value in enumerate(made):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            made[index] = without_gradient(value, parameters)
            break
    return type(output)(made)


def without_gradient(tensor: torch.Tensor, parameters: Collection[nn.Parameter]) -> torch.Tensor:
    """Returns a copy of ``tensor`` that depends on ``parameters``, of which its backward pass makes no gradient.

    Their hooks run all the same, as DDP needs it.
    """
    result: torch.Tensor = _WithoutGradient.apply(tensor, *parameters)  # type: ignore[no-untyped-call]
    return result


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.count = len(parameters)
        return tensor.clone()  # a view could not be changed in place afterwards

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (gradients[0], *[None] * ctx.count)


def with_loss(output: Any, parameters: Collection[nn.Parameter]) -> Any:
    """Returns what a training step returned, with a loss made by ``without_gradient``; None if there is no loss."""
    if isinstance(output, torch.Tensor):
        return without_gradient(output, parameters)
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return {**output, "loss": without_gradient(output["loss"], parameters)}
    return None


class ReentrantCheckpoints:
    """Notices whether torch's reentrant activation checkpoints are in use, from the constructor until ``close``."""

    def __init__(self) -> None:
        self.seen = False
        self._forward = vars(CheckpointFunction)["forward"]
        original: Any = CheckpointFunction.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.seen = True
            return original(*args, **kwargs)

        self._ours = staticmethod(forward)
        setattr(CheckpointFunction, "forward", self._ours)  # noqa: B010 - types forbid the plain form

    def close(self) -> None:
        """Stops noticing; may be called twice."""
        if vars(CheckpointFunction)["forward"] is self._ours:
            setattr(CheckpointFunction, "forward", self._forward)  # noqa: B010 - as above
