"""The training that is measured: a GPT-MoE in bf16 autocast with fp32 AdamW, in a plain PyTorch loop."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 2048
_FP32_COPIES = 3
"""Tensors of fp32 for each parameter: itself and Adam's two moments."""


@dataclass(frozen=True)
class Shape:
    """The size of the model and of a batch."""

    hidden: int
    layers: int
    experts: int
    ffn: int
    sequence: int
    batch: int
    top_k: int = 8


SHAPES = {
    "cuda": Shape(hidden=1024, layers=8, experts=64, ffn=768, sequence=1024, batch=16),
    "cpu": Shape(hidden=64, layers=2, experts=8, ffn=64, sequence=32, batch=4, top_k=2),
}
"""The one for ``cuda`` has 0.84 billion parameters, which with Adam's moments are 9.3 GiB."""

_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


class Experts(nn.Module):
    """All experts of a layer, as stacks of matrices."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.ffn))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.ffn, shape.hidden))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled(tokens.device.type):  # there is no grouped product in fp32
            bounds = [0, *ends.tolist()]
            parts = [
                F.silu(tokens[begin:end] @ self.up[expert]) @ self.down[expert]
                for expert, (begin, end) in enumerate(pairwise(bounds))
            ]
            return torch.cat(parts)
        inner = F.silu(_grouped_mm(tokens.bfloat16(), self.up.bfloat16(), offs=ends))
        return _grouped_mm(inner, self.down.bfloat16(), offs=ends)


class Router(nn.Module):
    """Chooses the experts of each token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape.experts, shape.hidden) * 0.02)
        self.top_k = shape.top_k

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = F.linear(tokens, self.weight).float().softmax(-1).topk(self.top_k)
        return weights, chosen


class MoE(nn.Module):
    """A layer of experts, of which each token gets the ``top_k`` that its gate prefers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k, self.num_experts = shape.top_k, shape.experts
        self.gate = Router(shape)
        self.experts = Experts(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens)
        order = chosen.flatten().argsort(stable=True)
        rows = order // self.top_k
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        out = self.experts(tokens[rows], counts.cumsum(0).int()) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, rows, out.to(tokens.dtype)).view_as(x)


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(shape.hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(shape.hidden, 3 * shape.hidden), nn.Linear(shape.hidden, shape.hidden)
        self.mlp = MoE(shape)
        self._heads = max(1, shape.hidden // 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self._heads, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: torch.Tensor = x + self.mlp(self.norms[1](x))
        return mixed


class GPT(nn.Module):
    """A language model of ``shape``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), words[:, 1:].flatten())


class Family(nn.Module):
    """A small model of transformers.

    Args:
        name: "olmoe", "gpt_oss", "deepseek_v3" or "qwen3".
    """

    def __init__(self, name: str) -> None:
        import transformers

        super().__init__()
        size: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}
        size |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64, "num_experts_per_tok": 2}
        size |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        more: dict[str, dict[str, Any]] = {
            "Olmoe": {"num_experts": 8},
            "GptOss": {"num_local_experts": 8, "head_dim": 16, "layer_types": ["full_attention"] * 2},
            "Qwen3Moe": {"num_experts": 8, "head_dim": 16, "moe_intermediate_size": 64},
            "DeepseekV3": {
                "n_routed_experts": 8,
                "n_shared_experts": 1,
                "moe_intermediate_size": 32,
                "first_k_dense_replace": 1,
                "n_group": 2,
                "topk_group": 1,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
            },
        }
        classes = {"olmoe": "Olmoe", "gpt_oss": "GptOss", "deepseek_v3": "DeepseekV3", "qwen3": "Qwen3Moe"}
        chosen = classes[name]
        config = getattr(transformers, f"{chosen}Config")(**size, **more[chosen])
        self.inner = getattr(transformers, f"{chosen}ForCausalLM")(config)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(input_ids=words, labels=words).loss
        return loss


class Training:
    """A model on a device with its optimizer; ``step`` computes one optimizer step.

    Args:
        device: "cuda" or "cpu".
        size: Of ``SHAPES``; None for the device's own.
        family: "gpt" for the model above, or a small one of transformers.
        autocast: In bf16; else all is fp32.
    """

    def __init__(self, device: str, size: str | None = None, family: str = "gpt", *, autocast: bool = True) -> None:
        torch.manual_seed(1)
        self.device, self.shape, self._autocast = device, SHAPES[size or device], autocast
        self.model: nn.Module = (GPT(self.shape) if family == "gpt" else Family(family)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")

    @property
    def state_nbytes(self) -> int:
        """Bytes of weights and Adam's moments."""
        return sum(4 * _FP32_COPIES * parameter.numel() for parameter in self.model.parameters())

    def step(self, number: int) -> None:
        """Computes step ``number``, whose batch follows from it."""
        seed = torch.Generator().manual_seed(number)
        words = torch.randint(VOCABULARY, (self.shape.batch, self.shape.sequence + 1), generator=seed)
        with torch.autocast(self.device, torch.bfloat16, enabled=self._autocast):
            loss = self.model(words.to(self.device, non_blocking=True))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digests(self) -> dict[str, str]:
        """Returns a digest of each weight and each tensor of the optimizer."""
        return digests_of(self.model, [self.optimizer])


def digests_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Returns a digest of each weight and each tensor of the optimizers."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    for at, optimizer in enumerate(optimizers):
        for number, entries in optimizer.state_dict()["state"].items():
            tensors |= {f"{at}/{number}/{name}": torch.as_tensor(value) for name, value in entries.items()}
    return {
        name: hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in tensors.items()
    }


AfterStep = Callable[[int], dict[str, Any]]
"""Called after each step; returns what is known of it: ``hooks_secs``, ``begun``, ``left_out``, ``behind``."""


class Clock:
    """Times whole iterations: on a GPU by events in its stream, so that nothing waits for them."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """An iteration begins, or the last one has ended."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def milliseconds(self) -> list[float]:
        """Lists the durations between marks."""
        pairs = list(pairwise(self._marks))
        if not self._on_gpu:
            return [1e3 * (end - begin) for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]
