"""A GPT-MoE of Megatron-Core as the hub's Qwen3-MoE, Mixtral or DeepSeek-V3 is built; body of ``run_ranks``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.testing import megatron_cpu
from tests.support.megatron_gpt import latent_core_attention

VOCABULARY, PADDED, LENGTH = 60, 64, 8
LATENT: dict[str, Any] = {
    "num_query_groups": None,
    "kv_channels": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
    "rotary_base": 5000,
    "rotary_scaling_factor": 1.0,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_dtype": "fp32",
    "moe_shared_expert_intermediate_size": 24,
}
"""Of DeepSeek-V3, beside what all families have."""


def trained(rank: int, world_size: int, place: str, family: str, degrees: dict[str, int]) -> torch.Tensor:
    """Trains two steps and leaves a store; the logits of a model in evaluation."""
    megatron_cpu.install()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from moe_ckpt import megatron
    from moe_ckpt.policies import Dense

    parallel_state.initialize_model_parallel(**degrees)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    first_is_dense, latent = family != "mixtral", family == "deepseek_v3"
    settings: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
    kind = MLATransformerConfig if latent else TransformerConfig
    config = kind(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 16,
            "ffn_hidden_size": 48 if first_is_dense else 24,
            "moe_ffn_hidden_size": 24,
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_layer_freq": [0, 1] if first_is_dense else 1,
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "qk_layernorm": first_is_dense,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "sequence_parallel": degrees.get("tensor_model_parallel_size", 1) > 1,
            "finalize_model_grads_func": finalize_model_grads,
            **settings,
            **(LATENT if latent else {}),
        }
    )
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    if latent:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = latent_core_attention()
    inner = GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=LENGTH,
        parallel_output=False,
        share_embeddings_and_output_weights=not first_is_dense,
        position_embedding_type="none" if latent else "rope",
        rotary_base=5000,
    )
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if "norm" in name:  # else all ones, whichever it is
                parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        for name, buffer in inner.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), inner)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), [model])
    positions = torch.arange(LENGTH).expand(2, -1)
    later = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with megatron.attach(model, optimizer, policy=Dense(), dirpath=f"{place}/store", when_busy="wait") as ckpt:
        ckpt.resume()
        for iteration in range(2):
            words = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(iteration))
            model.zero_grad_buffer()
            optimizer.zero_grad()
            logits = model(words, positions, later)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()).backward()
            finalize_model_grads([model])
            optimizer.step()
            ckpt.after_step(iteration + 1, consumed_samples=2 * iteration + 2)
    model.eval()
    with torch.no_grad():
        logits = model(asked(), positions, later)
    dist.barrier()
    return logits.float()


def asked() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(9))
