"""The training run that all contestants share: one model, one optimizer, random tokens, for ever."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

from recipes.gpt_moe_lightning.model import GPTMoEConfig, GPTMoELightning

SIZES: dict[str, tuple[GPTMoEConfig, int]] = {
    "tiny": (GPTMoEConfig(layers=2, hidden=64, heads=2, context=32), 2),
    "small": (GPTMoEConfig(layers=4, hidden=192, heads=4, context=128), 2),
    "default": (GPTMoEConfig(layers=6, hidden=384, heads=6, context=128), 4),
}
"""Name -> (model, sequences per batch). "default" is 412 MiB of fp32 parameters and AdamW state."""


class Workload(GPTMoELightning):
    """The recipe's model with one optimizer for life, so that every ``fit`` goes on from the same state."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__(config)
        self._kept: torch.optim.Optimizer | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._kept is None:
            self._kept = torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)
        return self._kept

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if self._kept is None:
            raise RuntimeError("configure_optimizers() has not been called yet")
        return self._kept

    def state_tensors(self) -> list[torch.Tensor]:
        """Parameters and optimizer state: what every contestant has to save."""
        tensors = [p.detach() for p in self.parameters()]
        for state in self.optimizer.state.values():
            tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
        return tensors


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
