"""The same for Megatron-Core: a small GPT-MoE on one device, without Transformer Engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.training import digests_of

_VOCABULARY, _LENGTH, _BATCH = 64, 16, 4


class MegatronTraining:
    """A model with its optimizer, in a process group of one rank; ``step`` computes one iteration. It has dropout.

    The router's type is left to Megatron-Core: in fp32 it would ask for Transformer Engine.

    Args:
        device: "cuda" or "cpu".
        graphs: Megatron-Core's own CUDA graphs capture attention, routers and what comes before experts.
    """

    def __init__(self, device: str, *, graphs: bool = False) -> None:
        warnings.simplefilter("ignore")  # of packages that are not installed
        if device == "cpu":
            from moe_ckpt.testing import megatron_cpu

            megatron_cpu.install()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel, gpt_layer_specs
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig, transformer_layer

        torch.set_num_threads(1)
        self.device = device
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=graphs and device == "cuda")
        options: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_moe_experts": 8}
        options |= {"moe_router_topk": 2, "add_bias_linear": False, "finalize_model_grads_func": finalize_model_grads}
        if graphs:
            options |= {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"]}
        config = TransformerConfig(**options)
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        if graphs:  # the class of layers that graphs may capture a part of
            for layer in spec.layer_specs:
                layer.module = transformer_layer.MoETransformerLayer
        model = GPTModel(config, spec, vocab_size=_VOCABULARY, max_sequence_length=_LENGTH).to(device)
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [self.model])

    def attach(self, **options: Any) -> Any:
        """Attaches checkpoints."""
        from moe_ckpt import megatron

        return megatron.attach(self.model, self.optimizer, **options)

    def step(self, number: int) -> dict[str, Any]:
        """Computes iteration ``number``, whose batch follows from it; returns what is told to checkpoints."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter([number]),
            model=self.model,
            num_microbatches=1,
            seq_length=_LENGTH,
            micro_batch_size=_BATCH,
            forward_only=False,
        )
        updated, _, _ = self.optimizer.step()
        return {"consumed_samples": _BATCH * number, "updated": updated}

    def _forward(self, numbers: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
        seed = torch.Generator().manual_seed(next(numbers))
        tokens = torch.randint(_VOCABULARY, (_BATCH, _LENGTH + 1), generator=seed).to(self.device)
        positions = torch.arange(_LENGTH, device=self.device).expand(_BATCH, -1)
        later = torch.ones(1, 1, _LENGTH, _LENGTH, dtype=torch.bool, device=self.device).triu(1)

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return losses.mean(), {}

        return model(tokens[:, :-1].contiguous(), positions, later, labels=tokens[:, 1:].contiguous()), loss_of

    @property
    def has_captured(self) -> bool:
        """Whether CUDA graphs were captured, and are replayed."""
        from megatron.core.transformer import cuda_graphs

        return bool(cuda_graphs._CudagraphGlobalRecord.cudagraph_created)

    def digests(self) -> dict[str, str]:
        """Returns a digest of each weight, and of each tensor of torch's optimizers beneath Megatron's."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return digests_of(self.model, [optimizer.optimizer for optimizer in optimizers])
