"""A small real MoE under real Lightning, for integration tests: routing, dropout, stacked or listed experts."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader

WIDTH, HIDDEN, CLASSES = 16, 24, 8


class Router(nn.Module):
    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) * 0.3)
        self.top_k = top_k

    def forward(self, x):
        scores = F.softmax(F.linear(x, self.weight).float(), dim=-1)
        weights, indices = scores.topk(self.top_k, dim=-1)
        return weights.to(x.dtype), indices


class StackedExperts(nn.Module):
    """Parameters ``[E, ...]``, as transformers 5 and torchtitan keep them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up_proj = nn.Parameter(torch.randn(experts, hidden, width) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) * 0.2)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            if len(token):
                y = F.linear(F.gelu(F.linear(hidden_states[token], self.up_proj[expert])), self.down_proj[expert])
                out.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(out.dtype))
        return out


class ListedExpert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoELayer(nn.Module):
    def __init__(self, experts: int, top_k: int, stacked: bool) -> None:
        super().__init__()
        self.gate = Router(WIDTH, experts, top_k)
        if stacked:
            self.experts: nn.Module = StackedExperts(experts, WIDTH, HIDDEN)
        else:
            self.experts = nn.ModuleList(ListedExpert(WIDTH, HIDDEN) for _ in range(experts))
        self.stacked = stacked

    def forward(self, x):
        weights, indices = self.gate(x)
        if self.stacked:
            return self.experts(x, indices, weights)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(indices == number)
            if len(token):
                out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        return out


class Block(nn.Module):
    def __init__(self, experts: int, top_k: int, dropout: float, stacked: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.moe = MoELayer(experts, top_k, stacked)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.moe(self.norm(x)))


class Tokens(torch.utils.data.Dataset):
    """``n`` seeded samples of a learnable toy task."""

    def __init__(self, n: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, WIDTH, generator=generator)
        self.y = (self.x @ torch.randn(WIDTH, CLASSES, generator=generator)).argmax(-1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def loader(samples: int = 64, batch: int = 4, shuffle: bool = True, **kwargs) -> StatefulDataLoader:
    return StatefulDataLoader(Tokens(samples), batch_size=batch, shuffle=shuffle, **kwargs)


class TinyMoE(pl.LightningModule):
    """Logs every loss in ``losses`` by global step, and every routing decision in ``routed``."""

    def __init__(
        self,
        layers: int = 2,
        experts: int = 4,
        top_k: int = 2,
        dropout: float = 0.1,
        stacked: bool = True,
        optimizer: str = "adamw",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(experts, top_k, dropout, stacked) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.losses: dict[int, float] = {}

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x.to(self.head.weight.dtype)).float(), y)
        self.losses[self.trainer.fit_loop.epoch_loop.total_batch_idx] = loss.item()
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x.to(self.head.weight.dtype)).float(), y), sync_dist=True)

    def configure_optimizers(self):
        if self.hparams.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        elif self.hparams.optimizer == "adafactor":
            optimizer = torch.optim.Adafactor(self.parameters(), lr=0.01)
        else:
            kinds = {"adamw": {}, "fused": {"fused": True}, "forloop": {"foreach": False}, "foreach": {"foreach": True}}
            kind = kinds[self.hparams.optimizer]
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, **kind)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"},
        }


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Copies of all parameters, buffers and optimizer state, for ``torch.equal``."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if optimizer is not None:
        for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                whole = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                state[f"optim.{i}.{key}"] = whole.detach().clone()
    return state
