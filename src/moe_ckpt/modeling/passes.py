"""Which forward passes belong to training: those whose tokens count, and in which routers take a capacity boost."""

from __future__ import annotations

import torch
from torch import nn


class TrainingPasses:
    """By default, those of modules in training mode.

    A model may be trained in eval mode, which switches off dropout and little else: ``from_pretrained`` of transformers
    leaves it so, and Lightning does not change it. In eval mode a pass is training's if it is part of a batch and
    gradients are recorded.

    Attributes:
        in_batch: A batch of training is computed now, not a validation or a hook.
    """

    in_batch = False

    def include(self, module: nn.Module) -> bool:
        """Returns whether the forward pass of ``module`` that runs now is one of training."""
        return module.training or (self.in_batch and torch.is_grad_enabled())
