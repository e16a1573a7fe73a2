"""Spare work while a sparse window is brought back: what is not anchored yet needs no gradients and no update.

Whole parameters only; rows of a stack of experts cannot be left out of autograd, and their update is overwritten
instead. Nothing of this is needed for exactness, and it must not harm it:

- The norm for clipping is that of all gradients, so it is recorded at each step and used again.
- Weight gradients are only left out for experts. Everything in front of them still requires gradients, so that no
  input of a layer stops to (with which reentrant activation checkpointing would drop the gradients behind it).
- Under DDP every parameter takes part in the reduction, so there only the update is left out.
- Where somebody else may look at gradients (manual optimization, hooks of module or callbacks, a gradient scaler),
  nothing is left out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from moe_ckpt.core.operators import Catalog, OperatorKind
from moe_ckpt.modeling.names import parameters_of

_LOOKS_AT_GRADIENTS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)


class ClipNorms:
    """Takes note of the gradient norms of each step, from ``on_fit_start`` until ``close``.

    taken: of the step under way, one per clipped optimizer. given: use these instead, in the same order.
    """

    def __init__(self, trainer: Any) -> None:
        self.taken: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []
        self._plugin = trainer.precision_plugin
        self.known = type(self._plugin).clip_grad_by_norm is Precision.clip_grad_by_norm
        if self.known:
            self._plugin.clip_grad_by_norm = self._clip

    def _clip(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """``Precision.clip_grad_by_norm``, with the norm kept, or given."""
        parameters = list(self._plugin.main_params(optimizer))
        if self.given:
            norm = self.given.pop(0).to(parameters[0].device)
            nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)
        else:
            norm = nn.utils.clip_grad_norm_(parameters, clip_val)
        self.taken.append(norm)

    def close(self) -> None:
        if self.known:
            self.known = False
            del self._plugin.clip_grad_by_norm


class Freezing:
    """Leaves out the work on parameters that are not anchored yet. Driven by ``Replaying``."""

    def __init__(self, trainer: Any, module: pl.LightningModule, catalog: Catalog) -> None:
        self._parameters = dict(parameters_of(module))
        self._experts = _of_experts(catalog) if isinstance(trainer.strategy, SingleDeviceStrategy) else frozenset()
        self._without_gradient: dict[str, nn.Parameter] = {}
        self._frozen: frozenset[str] = frozenset()

    def apply(self, frozen: frozenset[str]) -> None:
        """From now on until the next call these parameters, by name, are left out."""
        self.release()
        self._frozen = frozen
        for name in sorted(frozen & self._experts):
            parameter = self._parameters[name]
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._without_gradient[name] = parameter

    def drop_gradients(self) -> None:
        """Before clipping and update: what has no gradient is not updated."""
        for name in self._frozen:
            self._parameters[name].grad = None

    def release(self) -> None:
        """Safe to call twice."""
        for parameter in self._without_gradient.values():
            parameter.requires_grad_(True)
        self._without_gradient.clear()
        self._frozen = frozenset()


def _of_experts(catalog: Catalog) -> frozenset[str]:
    """Parameters that hold nothing but experts."""
    return frozenset(
        name for name, parts in catalog.spans_of.items() if all(op.kind is OperatorKind.EXPERT for op, _ in parts)
    )


def may_leave_out(trainer: Any, module: pl.LightningModule, norms: ClipNorms, ours: Collection[Callback]) -> bool:
    """Whether nobody but the optimizers looks at gradients."""
    if not module.automatic_optimization or getattr(trainer.precision_plugin, "scaler", None) is not None:
        return False
    if trainer.gradient_clip_val and not norms.known:
        return False
    others = [callback for callback in trainer.callbacks if callback not in ours]
    return not any(is_overridden(name, module) for name in _LOOKS_AT_GRADIENTS) and not any(
        _overrides(callback, name) for callback in others for name in _LOOKS_AT_GRADIENTS
    )


def _overrides(callback: Callback, name: str) -> bool:
    own, plain = getattr(type(callback), name, None), getattr(Callback, name, None)
    return plain is not None and own is not plain
