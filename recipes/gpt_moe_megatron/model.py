"""Megatron-Core's GPT-MoE for a config: process groups, model chunks, optimizer and scheduler.

Megatron-Core is imported inside the functions: on a machine without a GPU ``start`` has to prepare torch for it first.
What is here is what Megatron-LM's own ``training.py`` does, without its argument parser.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recipes.gpt_moe_megatron.config import AdamConfig, ModelConfig, ParallelConfig, RunConfig, TrainerConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Built:
    """What Megatron's training loop holds. ``chunks`` are wrapped in Megatron's DDP.

    engine: whether layers are Transformer Engine's.
    """

    config: Any
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    microbatches: int
    engine: bool


def start(timeout_secs: float) -> None:
    """Make this process a rank: NCCL on its own GPU, or gloo with the CPU layer where there is none.

    Under torchrun; without it, a world of one. Call before anything imports ``megatron.core``.
    """
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron orders its collectives by it
    logging.getLogger("megatron").setLevel(logging.WARNING)  # else each rank lists its parameters and settings
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        prepare_cpu()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_secs))


def prepare_cpu() -> None:
    """Let Megatron-Core run without a GPU, and without a word about each GPU library that is not there."""
    from moe_ckpt.testing import megatron_cpu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megatron_cpu.install()
    for message in (
        ".*_into_tensor.* is deprecated",
        ".*_scatter_tensor.* is deprecated",
        ".*(Apex|Transformer Engine).*not installed",
        "full scope is deprecated",
    ):
        warnings.filterwarnings("ignore", message)


def build(run: RunConfig) -> Built:
    """Everything that training needs, on this rank; draws the initial weights from ``run.seed``."""
    world_size = dist.get_world_size()
    microbatches = run.trainer.microbatches(run.parallel.data_parallel(world_size))
    join_groups(run.parallel)
    _seed(run.seed)
    engine = use_engine(run.trainer)
    config = transformer_config(run.model, run.parallel, run.trainer, engine)
    chunks = _wrapped(run, config, engine)
    optimizer = _optimizer(run, chunks)
    config.grad_scale_func = optimizer.scale_loss
    scheduler = _scheduler(run.optimizer, run.trainer, optimizer)
    return Built(config, chunks, optimizer, scheduler, microbatches, engine)


def join_groups(parallel: ParallelConfig, gloo: bool = True) -> None:
    """Megatron-Core's process groups for the layout, in the world that exists.

    gloo: a group for the CPU beside each for the GPU; a world that is only acted has none.
    """
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=gloo,
    )


def use_engine(trainer: TrainerConfig) -> bool:
    """Whether layers are Transformer Engine's.

    Raises:
        ValueError: the config asks for it, or for what only it can do, and it cannot be used here.
    """
    there = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if trainer.transformer_engine == "always" and not there:
        raise ValueError("trainer.transformer_engine=always: it is not installed, or this machine has no GPU")
    engine = there and trainer.transformer_engine != "never"
    if trainer.grouped_gemm and not engine:
        raise ValueError(
            "trainer.grouped_gemm=true needs Transformer Engine, which is not installed, not wanted, or has no "
            "GPU here; set trainer.grouped_gemm=false"
        )
    return engine


def transformer_config(model: ModelConfig, parallel: ParallelConfig, trainer: TrainerConfig, engine: bool) -> Any:
    """Megatron-Core's ``TransformerConfig``."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    dtype = DTYPES[trainer.precision]
    options: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "ffn_hidden_size": model.ffn or model.expert_ffn,
        "add_bias_linear": False,  # Megatron's grouped experts have none
        "normalization": model.norm,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
        "init_method_std": model.init_std,
        "params_dtype": dtype,
        "bf16": trainer.precision == "bf16",
        "fp16": trainer.precision == "fp16",
        "finalize_model_grads_func": finalize_model_grads,
        **_parallel_options(parallel, dtype),
        **_moe_options(model, trainer),
    }
    if model.gated:
        options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if engine:
        options |= {"attention_softmax_in_fp32": True}
    return TransformerConfig(**options | trainer.options)


def _parallel_options(parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "pipeline_model_parallel_layout": parallel.layout,
        "pipeline_dtype": dtype,
        "deallocate_pipeline_outputs": True,
        # Interleaving with two pipeline ranks and batched sends mixes up the two neighbours, which are one rank.
        "overlap_p2p_comm": parallel.vpp is not None,
        "batch_p2p_comm": parallel.vpp is None,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.tp > 1,  # Megatron-Core refuses to split MoE without
        "use_cpu_initialization": False,  # True would give every expert-parallel rank the same experts
    }


def _moe_options(model: ModelConfig, trainer: TrainerConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": model.experts,
        "moe_router_topk": model.top_k,
        "moe_router_pre_softmax": model.top_k == 1,  # after choosing one expert it would be 1, without a gradient
        "moe_ffn_hidden_size": model.expert_ffn,
        "moe_shared_expert_intermediate_size": model.shared_expert_ffn,
        "moe_layer_freq": [0] * model.dense_layers + [1] * model.moe_layers,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": model.aux_loss,
        "moe_token_dispatcher_type": "alltoall",
        "moe_expert_capacity_factor": model.capacity_factor,
        "moe_grouped_gemm": trainer.grouped_gemm,
    }


def model_chunk(model: ModelConfig, config: Any, engine: bool, vp_stage: int | None = None) -> torch.nn.Module:
    """This pipeline rank's part of the model, or one of its parts where stages are interleaved."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    plain = vp_stage is None
    chunk: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=vp_stage
        ),
        vocab_size=model.vocab,
        max_sequence_length=model.seq,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=plain, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=plain, vp_stage=vp_stage),
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type=model.position,
        vp_stage=vp_stage,
    )
    return chunk


def _wrapped(run: RunConfig, config: Any, engine: bool) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    parallel = run.parallel
    stages: list[int | None] = [None] if parallel.vpp is None else list(range(parallel.vpp))
    chunks = [model_chunk(run.model, config, engine, stage).cuda() for stage in stages]
    if run.trainer.precision != "fp32":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap,
        overlap_param_gather=parallel.overlap,
    )
    wrapped = [DistributedDataParallel(config, settings, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]
    if parallel.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def _optimizer(run: RunConfig, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    adam, precision = run.optimizer, run.trainer.precision
    config = OptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        min_lr=adam.last_lr,
        weight_decay=adam.weight_decay,
        clip_grad=adam.clip_grad,
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
        adam_eps=adam.eps,
        params_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        use_distributed_optimizer=run.parallel.distributed_optimizer,
        overlap_param_gather=run.parallel.overlap,
    )
    return get_megatron_optimizer(config, chunks)


def _scheduler(adam: AdamConfig, trainer: TrainerConfig, optimizer: Any) -> Any:
    """Counts samples, as Megatron's does."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=adam.lr,
        min_lr=adam.last_lr,
        lr_warmup_steps=adam.warmup_iters * trainer.global_batch,
        lr_decay_steps=max(adam.decay_iters or trainer.train_iters, adam.warmup_iters + 1) * trainer.global_batch,
        lr_decay_style="cosine",
        start_wd=adam.weight_decay,
        end_wd=adam.weight_decay,
        wd_incr_steps=trainer.train_iters * trainer.global_batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a run that is made longer goes by its new length
    )


def _seed(seed: int) -> None:
    """Pipeline stages draw differently, data-parallel ranks alike, expert-parallel ones by Megatron's tracker."""
    from megatron.core import parallel_state, tensor_parallel

    own = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    tensor_parallel.model_parallel_cuda_manual_seed(own)
