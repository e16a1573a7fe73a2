"""Skips work in the replay of a sparse window: parameters not anchored yet need no gradients and no update.

An optimization that must not change results. It concerns whole parameters only; the update of single rows of a stack
of experts is overwritten instead.

- Clipping needs the norm of all gradients, so norms are recorded at each step and reused in the replay.
- Weight gradients are skipped for experts only. Everything before them still requires gradients; if a layer's input did
  not, reentrant activation checkpointing would drop the gradients behind it.
- Under DDP every parameter takes part in the reduction, so only the update is skipped.
- Nothing is skipped where others may read gradients: manual optimization, hooks of module or callbacks, a scaler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from moe_ckpt.core.operators import Catalog, OperatorKind
from moe_ckpt.driver.handing_back import handing_back
from moe_ckpt.driver.replaying import StepSource
from moe_ckpt.modeling.names import parameters_of
from moe_ckpt.recovery.replay import Replay

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
    """Records the gradient norms that clipping uses, from ``on_fit_start`` until ``close``.

    Attributes:
        taken: Norms of the current step, one per clipped optimizer.
        given: Norms to clip by instead, in the same order.
    """

    def __init__(self, trainer: Any) -> None:
        self.taken: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []
        self._plugin = trainer.precision_plugin
        self.known = type(self._plugin).clip_grad_by_norm is Precision.clip_grad_by_norm
        if self.known:
            self._plugin.clip_grad_by_norm = self._clip

    def _clip(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Replaces ``Precision.clip_grad_by_norm``: records the norm, or uses a given one."""
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


class SparingRecompute(StepSource):
    """Training's own passes, without gradients and updates of parameters that are not anchored yet."""

    def __init__(self, trainer: Any, module: pl.LightningModule, catalog: Catalog, norms: ClipNorms) -> None:
        self._parameters = dict(parameters_of(module))
        self._experts: frozenset[str] = frozenset()  # parameters that hold nothing but experts
        if isinstance(trainer.strategy, SingleDeviceStrategy):
            kinds = {name: {operator.kind for operator, _ in parts} for name, parts in catalog.spans_of.items()}
            self._experts = frozenset(name for name in kinds if kinds[name] == {OperatorKind.EXPERT})
        self._without_gradient: list[nn.Parameter] = []
        self._frozen: frozenset[str] = frozenset()
        self._norms = norms

    def prepare(self, replay: Replay, recorded: Mapping[str, Any]) -> None:
        self._release()
        self._frozen = replay.frozen_parameters()
        experts = [self._parameters[name] for name in sorted(self._frozen & self._experts)]
        self._without_gradient = [parameter for parameter in experts if parameter.requires_grad]
        for parameter in self._without_gradient:
            parameter.requires_grad_(False)
        with handing_back("the steps of a sparse window", replay.upcoming_path):
            self._norms.given = list(recorded["replay"]["norms"])

    def before_update(self) -> None:
        for name in self._frozen:
            self._parameters[name].grad = None  # clipping and update pass over it

    def _release(self) -> None:
        for parameter in self._without_gradient:
            parameter.requires_grad_(True)
        self._without_gradient, self._frozen = [], frozenset()

    def close(self) -> None:
        self._release()
        self._norms.given = []


def may_leave_out(trainer: Any, module: pl.LightningModule, norms: ClipNorms, ours: Collection[Callback]) -> bool:
    """Returns whether only the optimizers read gradients."""
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
