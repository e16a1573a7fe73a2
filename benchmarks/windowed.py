"""The run that ``moevement.py`` measures: the model of all benchmarks, on data whose position can be restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.workload import Workload
from recipes.gpt_moe_lightning.model import GPTMoEConfig, MoELayer


class _Tokens(Dataset[Tensor]):
    """Random token ids ``[S + 1]``, the same ones for the same index."""

    def __init__(self, config: GPTMoEConfig, samples: int = 1_000_000) -> None:
        self._config, self._samples = config, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self._config.vocab_size, (self._config.context + 1,), generator=generator)


def batches(config: GPTMoEConfig, batch: int) -> StatefulDataLoader:
    """``[B, S + 1]`` token ids."""
    return StatefulDataLoader(_Tokens(config), batch_size=batch)


class _Expert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class ListedExperts(nn.ModuleList):
    """The recipe's stacked experts as one module each; same sizes, same order of sums."""

    def __init__(self, config: GPTMoEConfig) -> None:
        inner = config.ffn_multiple * config.hidden
        super().__init__(_Expert(config.hidden, inner) for _ in range(config.experts))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            token, slot = torch.where(top_k_index == number)
            out = expert(hidden_states[token]) * top_k_weights[token, slot, None]
            output = output.index_add(0, token, out.to(output.dtype))
        return output


def workload(config: GPTMoEConfig, *, listed: bool = False) -> Workload:
    """The model, always with the same weights. listed: experts in a ``ModuleList`` instead of stacked parameters."""
    torch.manual_seed(0)
    module = Workload(config)
    if listed:
        for layer in [m for m in module.modules() if isinstance(m, MoELayer)]:
            layer.experts = ListedExperts(config)
    return module


def trainer(steps: int, directory: Path, *callbacks: pl.Callback) -> pl.Trainer:
    """Trains on one CPU process to optimizer step ``steps``, and says nothing."""
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with_checkpoints = any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks)
    return pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        enable_checkpointing=with_checkpoints,
        default_root_dir=directory,
        **options,
    )
