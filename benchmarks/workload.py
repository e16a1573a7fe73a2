"""The training run that all contestants share: one model, one optimizer, random tokens, for ever."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.step_model import CONTEXT, VOCABULARY, WIDTH, TinyMoE
from recipes.gpt_moe_lightning.model import GPTMoEConfig, GPTMoELightning

SIZES: dict[str, tuple[GPTMoEConfig, int]] = {
    "tiny": (GPTMoEConfig(layers=2, hidden=64, heads=2, context=32), 2),
    "small": (GPTMoEConfig(layers=4, hidden=192, heads=4, context=128), 2),
    "default": (GPTMoEConfig(layers=6, hidden=384, heads=6, context=128), 4),
}
"""Name -> (model, sequences per batch). "default" is 412 MiB of fp32 parameters and AdamW state."""


SHAPES = {"48x128": (48, 128, False), "48x128-listed": (48, 128, True)}
"""Name -> (MoE layers, experts, one module for each expert): of ``step_model``, so small that only Python counts."""
_SHAPED_BATCH = 2


class _OneOptimizer:
    """A module with one optimizer for life, so that every ``fit`` goes on from the same state."""

    config: GPTMoEConfig
    _kept: torch.optim.Optimizer | None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if self._kept is None:
            raise RuntimeError("configure_optimizers() has not been called yet")
        return self._kept

    def state_tensors(self) -> list[torch.Tensor]:
        """Parameters and optimizer state: what every contestant has to save."""
        tensors = [p.detach() for group in self.optimizer.param_groups for p in group["params"]]
        for state in self.optimizer.state.values():
            tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
        return tensors


class Workload(_OneOptimizer, GPTMoELightning):
    """The recipe's model."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__(config)
        self._kept = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._kept is None:
            self._kept = torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)
        return self._kept


class ShapedWorkload(_OneOptimizer, TinyMoE):
    """The model of ``step_scale.py``."""

    def __init__(self, layers: int, experts: int, *, listed: bool) -> None:
        super().__init__(layers, experts, listed=listed)
        self.config = GPTMoEConfig(
            VOCABULARY, CONTEXT, layers=layers, hidden=WIDTH, heads=1, experts=experts, moe_every=1
        )


Model = Workload | ShapedWorkload


def workload_of(size: str) -> tuple[Model, int]:
    """(model, sequences per batch) of a name in ``SIZES`` or ``SHAPES``."""
    if size in SHAPES:
        layers, experts, listed = SHAPES[size]
        return ShapedWorkload(layers, experts, listed=listed), _SHAPED_BATCH
    config, batch = SIZES[size]
    return Workload(config), batch


class _RandomTokens(IterableDataset[torch.Tensor]):
    def __init__(self, config: GPTMoEConfig, batch: int) -> None:
        self._config, self._batch = config, batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self._batch, self._config.context + 1)
        while True:
            yield torch.randint(self._config.vocab_size, shape, generator=generator)


def endless_batches(config: GPTMoEConfig, batch: int) -> DataLoader[torch.Tensor]:
    """``[B, S + 1]`` token ids."""
    return DataLoader(_RandomTokens(config, batch), batch_size=None)
