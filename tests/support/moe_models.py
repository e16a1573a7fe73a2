"""Tiny MoE models for tests: transformers families, and small layers of other makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BASE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 24}
_DENSE_FIRST = {"first_k_dense_replace": 1, "n_shared_experts": 1, **_GROUPED}
_ATTENTION = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
_PLAIN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_FULL = {"layer_types": ["full_attention", "full_attention"]}
_ENCODER_DECODER = {"d_model": 16, "num_experts": 4, "expert_capacity": 64, "decoder_start_token_id": 0}

FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": _LOCAL,
    "Qwen2Moe": {**_PLAIN, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": _PLAIN,
    "Olmoe": _PLAIN,
    "DeepseekV2": {**_ROUTED, **_ATTENTION, **_DENSE_FIRST, "topk_method": "greedy"},
    "DeepseekV3": {**_ROUTED, **_ATTENTION, **_DENSE_FIRST},
    "Glm4Moe": {**_ROUTED, **_DENSE_FIRST, "head_dim": 8},
    "GraniteMoe": _LOCAL,
    "GptOss": _LOCAL,
    "Phimoe": _LOCAL,
    "MiniMax": {**_LOCAL, **_FULL},
    "Dots1": {**_ROUTED, **_DENSE_FIRST, "head_dim": 8},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_intermediate_size": 24},
    "FlexOlmo": _PLAIN,
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "Jamba": {
        **_PLAIN,
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "Lfm2Moe": {**_PLAIN, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"]},
    "Llama4": {**_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 1},
    "JetMoe": {**_LOCAL, "kv_channels": 8, "num_key_value_heads": 1},
    "Gemma4": {
        **_PLAIN,
        **_FULL,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 64,
    },
    "LongcatFlash": {
        **_ATTENTION,
        "n_routed_experts": 4,
        "moe_topk": 3,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 24,
        "ffn_hidden_size": 24,
        "num_layers": 1,
        "head_dim": 4,
    },
    "NllbMoe": {
        **_ENCODER_DECODER,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
    },
    "SwitchTransformers": {
        **_ENCODER_DECODER,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "NemotronH": {
        **_ROUTED,
        **_GROUPED,
        "moe_shared_expert_intermediate_size": 24,
        "hybrid_override_pattern": "E*",
        "head_dim": 8,
    },
    "Zaya": {**_PLAIN, "num_experts_per_tok": 1, "router_hidden_size": 8},
    "Afmoe": {**_PLAIN, **_FULL, "num_dense_layers": 1, "n_group": 1, "topk_group": 1, "num_shared_experts": 1},
}
_TEXT_CONFIG = {"Llama4", "Gemma4"}


def family(name: str, seed: int = 0) -> nn.Module:
    """A tiny causal (or encoder-decoder) language model of one family of transformers, freshly initialised."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, name + ("TextConfig" if name in _TEXT_CONFIG else "Config"))
    head = "ForConditionalGeneration" if name in ("NllbMoe", "SwitchTransformers") else "ForCausalLM"
    model: nn.Module = getattr(transformers, name + head)(config(**{**_BASE, **FAMILIES[name]}))
    return model


def tokens(seed: int = 1, batch: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    """Language-model loss on random tokens; a new batch per seed."""
    ids = tokens(seed)
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


class ListMoE(nn.Module):
    """Experts as a ModuleList beside a linear gate; experts without tokens are not called."""

    def __init__(self, hidden: int = 8, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 12), nn.Linear(12, hidden)) for _ in range(experts)
        )

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k, dim=-1)
        return weights, chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.choose(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if token.numel():
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class OwnMoE(nn.Module):
    """Nothing a heuristic could know: stacked matrices in the layer itself, a router named ``scorer``."""

    def __init__(self, hidden: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.scorer = nn.Linear(hidden, experts)
        self.w_in = nn.Parameter(torch.randn(experts, hidden, 12) * 0.1)
        self.w_out = nn.Parameter(torch.randn(experts, 12, hidden) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scorer(x).softmax(-1)
        weight, chosen = scores.max(-1)
        h = torch.einsum("th,thf->tf", x, self.w_in[chosen]).relu()
        return torch.einsum("tf,tfh->th", h, self.w_out[chosen]) * weight[:, None]


class Stack(nn.Module):
    """Two blocks of a layer class between two linear layers; input and output ``[tokens, 8]``."""

    def __init__(self, layer: type[nn.Module], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(8), "moe": layer()}) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block["moe"](block["norm"](x))
        out: torch.Tensor = self.head(x)
        return out
