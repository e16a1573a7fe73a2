"""The model of ``step_scale.py``: a GPT-MoE of Qwen3-MoE's shape, of any number of layers and experts, hidden size 4.

Every expert has ``gate_proj``, ``up_proj`` and ``down_proj``. All experts see all tokens, weighted by the router, so
that each iteration is a few batched products whatever the number of experts, and every parameter gets a gradient: what
is measured is not the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

WIDTH = 4
VOCABULARY = 32
CONTEXT = 8
TOP_K = 2


class Router(nn.Module):
    """Top-k softmax router with Qwen3's normalised weights."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.top_k, self.num_experts = TOP_K, experts
        self.weight = nn.Parameter(torch.randn(experts, WIDTH) * 0.3)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """``[T, H]`` -> weights ``[T, k]``, chosen experts ``[T, k]``."""
        weights, chosen = F.linear(hidden_states, self.weight).softmax(dim=-1).topk(TOP_K, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen


def _mixed(hidden: Tensor, chosen: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The experts' weighted sum. hidden ``[T, H]``; gate, up ``[E, F, H]``; down ``[E, H, F]``; ``[T, H]``."""
    routed = torch.zeros(len(hidden), len(gate)).scatter(1, chosen, weights)
    inner = F.silu(torch.einsum("th,efh->etf", hidden, gate)) * torch.einsum("th,efh->etf", hidden, up)
    return torch.einsum("etf,ehf,te->th", inner, down, routed)


class StackedExperts(nn.Module):
    """Parameters ``[E, ...]``."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_proj = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * 0.3)
        self.up_proj = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * 0.3)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _mixed(hidden_states, top_k_index, top_k_weights, self.gate_proj, self.up_proj, self.down_proj)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down_proj = nn.Linear(WIDTH, WIDTH, bias=False)


class ListedExperts(nn.ModuleList):
    """One module per expert, as most models before transformers 5."""

    def __init__(self, experts: int) -> None:
        super().__init__(Expert() for _ in range(experts))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        stacks = [
            torch.stack([getattr(expert, name).weight for expert in self])
            for name in ("gate_proj", "up_proj", "down_proj")
        ]
        return _mixed(hidden_states, top_k_index, top_k_weights, *stacks)


class SparseMoE(nn.Module):
    def __init__(self, experts: int, listed: bool) -> None:
        super().__init__()
        self.gate = Router(experts)
        self.experts: nn.Module = ListedExperts(experts) if listed else StackedExperts(experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(tokens)
        mixed: Tensor = self.experts(tokens, chosen, weights)
        return mixed.reshape(x.shape)


class Attention(nn.Module):
    """One head, with Qwen3's norms of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        mixed: Tensor = self.o_proj(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return mixed


class Block(nn.Module):
    def __init__(self, experts: int, listed: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(WIDTH)
        self.mlp = SparseMoE(experts, listed)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


class TinyMoE(pl.LightningModule):
    """Next-token training. One optimizer for life, so that every ``fit`` goes on with the state of the one before."""

    def __init__(self, layers: int, experts: int, *, listed: bool, sharded: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(experts, listed) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self._sharded, self._is_sharded = sharded, False
        self._kept: torch.optim.Optimizer | None = None

    def configure_model(self) -> None:
        if not self._sharded or self._is_sharded:
            return
        from torch.distributed.fsdp import fully_shard

        if self.device_mesh is None:
            raise RuntimeError("the strategy has made no device mesh")
        mesh = self.device_mesh["data_parallel"]
        for block in self.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)
        self._is_sharded = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._kept is None:
            self._kept = torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=True)
        return self._kept


class _Tokens(Dataset[Tensor]):
    """Random token ids ``[S + 1]``, the same ones for the same index."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(VOCABULARY, (64, CONTEXT + 1), generator=generator)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index % len(self._rows)]


def batches(rank: int, world_size: int) -> Any:
    """A loader of ``[2, S + 1]`` whose position can be restored, as MoEvement demands."""
    tokens = _Tokens()
    sampler: Sequence[int] | Any = None
    if world_size > 1:
        sampler = StatefulDistributedSampler(tokens, world_size, rank, shuffle=False)
    return StatefulDataLoader(tokens, batch_size=2, sampler=sampler)
