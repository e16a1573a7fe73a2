"""The forward passes that belong to training: their tokens count, and routers take a capacity boost in them."""

from __future__ import annotations

import torch
from torch import nn


class TrainingPasses:
    """The forward passes of training: by default, those of modules in training mode.

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
