"""A GPT-MoE of Megatron-Core as the hub's Qwen3-MoE or Mixtral is built; body of ``run_ranks``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.testing import megatron_cpu

VOCABULARY, PADDED, LENGTH = 60, 64, 8


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
    from megatron.core.transformer import TransformerConfig

    from moe_ckpt import megatron
    from moe_ckpt.policies import Dense

    parallel_state.initialize_model_parallel(**degrees)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    qwen = family == "qwen3_moe"
    settings: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 16,
            "ffn_hidden_size": 48 if qwen else 24,
            "moe_ffn_hidden_size": 24,
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_layer_freq": [0, 1] if qwen else 1,
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "qk_layernorm": qwen,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "sequence_parallel": degrees.get("tensor_model_parallel_size", 1) > 1,
            "finalize_model_grads_func": finalize_model_grads,
            **settings,
        }
    )
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    inner = GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=LENGTH,
        parallel_output=False,
        share_embeddings_and_output_weights=not qwen,
        position_embedding_type="rope",
        rotary_base=5000,
    )
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if "norm" in name:  # else all ones, whichever it is
                parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
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
