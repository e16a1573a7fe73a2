"""A tiny GPT-MoE of the real Megatron-Core, trained on the CPU by the real schedules, in processes of its own.

Megatron-Core is imported inside the functions only, after ``megatron_cpu.install()``: that call changes names in
``torch`` for the life of the process, so it must never run in pytest's own. Use from the ranks of ``run_ranks``::

    def body(rank, world_size, setup):
        built = megatron_gpt.build(setup, seed=1)
        return [megatron_gpt.train_step(built, i) for i in range(3)]

    def test_it():
        run_ranks(body, 4, megatron_gpt.Setup(pp=2, ep=2))

A checkpoint library hooks in between ``forward_backward`` and ``update``, which ``train_step`` joins.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.testing import megatron_cpu


@dataclass(frozen=True)
class Setup:
    """Layout and model. Data parallelism is what the world leaves over: world size / (tp * pp)."""

    tp: int = 1
    """Above 1 with sequence parallelism, without which Megatron-Core refuses MoE."""
    pp: int = 1
    vpp: int | None = None
    """Model chunks per pipeline rank; None for the plain 1F1B schedule."""
    ep: int = 1
    etp: int | None = 1
    layers: int = 4
    hidden: int = 32
    heads: int = 2
    ffn: int = 32
    experts: int = 4
    """0: no MoE layer."""
    top_k: int = 2
    seq: int = 16
    vocab: int = 64
    micro_batch: int = 2
    num_microbatches: int = 4
    grouped: bool = False
    """GroupedMLP, which takes bf16 only, instead of SequentialMLP."""
    precision: str = "fp32"
    """fp32, bf16 or fp16; the latter two with fp32 masters."""
    loss_scale: float = 2.0**12
    """Where dynamic loss scaling of fp16 starts: 2.0**32 makes the first steps overflow and be skipped."""
    dist_opt: bool = False
    tied: bool = False
    shared_experts: bool = False
    expert_bias: bool = False
    mla: bool = False
    mtp: int = 0
    """Layers of multi-token prediction, on the last pipeline stage, which then holds the embedding, too."""
    mtp_detached: bool = False
    """They send no gradient to the rest, and are clipped by a norm of their own (since 0.19)."""
    dropout: float = 0.1
    dense_first: bool = False
    glu: bool = False
    recompute: bool = False
    capacity_factor: float | None = None
    overlap_param_gather: bool = False
    """Gather parameters in the next forward pass; needs ``dist_opt``."""
    lr: float = 1e-2
    clip: float = 1.0
    optimizer: str = "adam"
    frozen: tuple[str, ...] = ()
    """Parameters whose name has one of these in it require no gradient when the optimizer is made."""

    def __post_init__(self) -> None:
        if self.tp > 1 and self.ep == 1 and self.etp not in (None, self.tp):
            raise ValueError(
                f"tp {self.tp} with ep 1 and etp {self.etp}: Megatron-Core 0.16.1 then reduces the gradients of "
                "experts over data-parallel ranks only, and their copies on tensor-parallel ranks drift apart. "
                "Set etp=None, or ep above 1."
            )

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]


@dataclass
class Built:
    """What Megatron's own training loop holds. ``chunks`` are wrapped in Megatron's DDP."""

    setup: Setup
    config: Any
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    consumed_samples: int = 0
    gathers_in_forward: bool = False


def build(setup: Setup, seed: int, timeout_minutes: float = 30.0) -> Built:
    """Process groups, model, optimizer and scheduler, as Megatron's training.py makes them.

    Joins the process group that exists, or makes one from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    megatron_cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    _join_groups(setup, timeout_minutes)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed + 100 * parallel_state.get_pipeline_model_parallel_rank(), force_reset_rng=True
    )
    config = _transformer_config(setup)
    chunks = _chunks(setup, config)
    optimizer = _optimizer(setup, chunks)
    config.grad_scale_func = optimizer.scale_loss
    return Built(setup, config, chunks, optimizer, _scheduler(setup, optimizer))


def train_step(built: Built, iteration: int) -> tuple[float | None, bool, float | None]:
    """(loss, whether the update was made, norm of the gradients before clipping).

    The loss is the mean over the global batch; None on ranks that are not in the last pipeline stage.
    """
    loss = forward_backward(built, iteration)
    return loss, *update(built)


def forward_backward(built: Built, iteration: int, *, forward_only: bool = False) -> float | None:
    """Gradients of one global batch, reduced and ready for ``update``; the loss on the last pipeline stage.

    forward_only: A validation, after which there are no gradients.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    setup = built.setup
    for chunk in built.chunks:
        chunk.zero_grad_buffer()
    built.optimizer.zero_grad()
    data_rank = parallel_state.get_data_parallel_rank()
    batches = [_batches(setup, iteration, data_rank) for _ in built.chunks]
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=batches if len(built.chunks) > 1 else batches[0],
        model=built.chunks if len(built.chunks) > 1 else built.chunks[0],
        num_microbatches=setup.num_microbatches,
        seq_length=setup.seq,
        micro_batch_size=setup.micro_batch,
        forward_only=forward_only,
    )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    loss = torch.stack([each["loss"] for each in losses]).mean()
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(loss, group=group)
    return loss.item() / group.size()


def update(built: Built) -> tuple[bool, float | None]:
    """Optimizer step, then the scheduler's if it was made: (made, norm of the gradients before clipping)."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

    made, norm, _ = built.optimizer.step()
    clear_aux_losses_tracker()
    setup = built.setup
    samples = setup.micro_batch * setup.num_microbatches * parallel_state.get_data_parallel_world_size()
    built.consumed_samples += samples
    if made:
        built.scheduler.step(increment=samples)
    if made and setup.overlap_param_gather and not built.gathers_in_forward:
        # As Megatron's training.py: the first step runs without, so that a wrong load shows instead of being gathered.
        for chunk in built.chunks:
            chunk.enable_forward_pre_hook()
        built.gathers_in_forward = True
    return bool(made), None if norm is None else float(norm)


def fingerprint(built: Built) -> dict[str, float]:
    """Sum of the bits of every parameter and of every tensor in the optimizer: equal where two runs are equal."""
    found = {}
    for index, chunk in enumerate(built.chunks):
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            found[f"{index}.{name}"] = _bits(tensor)
    for index, optimizer in enumerate(getattr(built.optimizer, "chained_optimizers", [built.optimizer])):
        for number, state in enumerate(optimizer.optimizer.state.values()):
            for name, value in state.items():
                found[f"optimizer {index}.{number}.{name}"] = _bits(torch.as_tensor(value))
    return found


def _bits(tensor: torch.Tensor) -> int:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64)
    return int((raw * (1 + torch.arange(raw.numel()) % 251)).sum())


def _join_groups(setup: Setup, timeout_minutes: float) -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    _forget_losses()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=setup.tp,
        pipeline_model_parallel_size=setup.pp,
        virtual_pipeline_model_parallel_size=setup.vpp,
        expert_model_parallel_size=setup.ep,
        expert_tensor_parallel_size=setup.etp,
        distributed_timeout_minutes=timeout_minutes,
    )


def _forget_losses() -> None:
    """Megatron-Core's tables of auxiliary losses are global, and as long as the process's first model has layers."""
    within = "megatron.core.transformer.moe"
    if importlib.util.find_spec(f"{within}.moe_logging") is not None:  # since 0.17
        importlib.import_module(f"{within}.moe_logging").destroy_moe_metrics_tracker()
    else:
        importlib.import_module(f"{within}.moe_utils").get_moe_layer_wise_logging_tracker().clear()


def _transformer_config(setup: Setup) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    options: dict[str, Any] = {
        "num_layers": setup.layers,
        "hidden_size": setup.hidden,
        "num_attention_heads": setup.heads,
        "ffn_hidden_size": setup.ffn,
        "tensor_model_parallel_size": setup.tp,
        "pipeline_model_parallel_size": setup.pp,
        "virtual_pipeline_model_parallel_size": setup.vpp,
        "expert_model_parallel_size": setup.ep,
        "expert_tensor_parallel_size": setup.etp,
        "sequence_parallel": setup.tp > 1,
        "use_cpu_initialization": False,  # True gives every expert-parallel rank the same experts
        "params_dtype": setup.dtype,
        "pipeline_dtype": setup.dtype,
        "bf16": setup.precision == "bf16",
        "fp16": setup.precision == "fp16",
        "hidden_dropout": setup.dropout,
        "attention_dropout": setup.dropout,
        "add_bias_linear": False,
        "deallocate_pipeline_outputs": True,
        # Megatron's argument parser refuses batched sends when two pipeline ranks interleave: both neighbours are then
        # one rank, and what is sent to it as next would arrive as from previous: no error, wrong gradients.
        "overlap_p2p_comm": setup.vpp is not None,
        "batch_p2p_comm": setup.vpp is None,
        "finalize_model_grads_func": finalize_model_grads,
        **_moe_options(setup),
    }
    if setup.mtp:
        options["mtp_num_layers"] = setup.mtp
    if setup.mtp_detached:
        options["mtp_detach_heads"] = True
    if setup.glu:
        options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if setup.recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if not setup.mla:
        return TransformerConfig(**options)
    head = setup.hidden // setup.heads
    options |= {"q_lora_rank": head, "kv_lora_rank": head, "qk_head_dim": head, "v_head_dim": head, "kv_channels": head}
    return MLATransformerConfig(**options, qk_pos_emb_head_dim=head // 2, rope_type="rope", qk_layernorm=True)


def _moe_options(setup: Setup) -> dict[str, Any]:
    if not setup.experts:
        return {}
    options: dict[str, Any] = {
        "num_moe_experts": setup.experts,
        "moe_router_topk": setup.top_k,
        "moe_ffn_hidden_size": setup.ffn,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": setup.grouped,
        "moe_expert_capacity_factor": setup.capacity_factor,
        "moe_router_load_balancing_type": "none" if setup.expert_bias else "aux_loss",
        "moe_aux_loss_coeff": 0.0 if setup.expert_bias else 0.01,
    }
    if setup.expert_bias:
        options |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    if setup.shared_experts:
        options["moe_shared_expert_intermediate_size"] = setup.ffn
    if setup.dense_first:
        options["moe_layer_freq"] = [0] + [1] * (setup.layers - 1)
    return options


def _chunks(setup: Setup, config: Any) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    chunks = [_model(setup, config, index if setup.vpp else None) for index in range(setup.vpp or 1)]
    for name, parameter in (each for chunk in chunks for each in chunk.named_parameters()):
        parameter.requires_grad_(not any(part in name for part in setup.frozen))
    if setup.precision != "fp32":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=setup.dist_opt,
        overlap_grad_reduce=setup.overlap_param_gather,  # Megatron's argument parser wants both or neither
        overlap_param_gather=setup.overlap_param_gather,
        bucket_size=4096 if setup.overlap_param_gather else None,
    )
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    each = len(wrapped) > 1
    if setup.overlap_param_gather:
        config.no_sync_func = [w.no_sync for w in wrapped] if each else wrapped[0].no_sync
        for chunk in wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)
    return wrapped


def _model(setup: Setup, config: Any, vp_stage: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    if setup.mla:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = latent_core_attention()
    predicting = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=predicting,
        vocab_size=setup.vocab,
        max_sequence_length=setup.seq,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        share_embeddings_and_output_weights=setup.tied,
        position_embedding_type="none" if setup.mla else "rope",
        vp_stage=vp_stage,
    )


def latent_core_attention() -> type:
    """Megatron's plain attention for MLA, whose layer names the widths of keys and values, as only Transformer Engine's
    attention lets it. The plain one reads the keys' width off its input, and takes the values' to be ``kv_channels``,
    which ``_transformer_config`` makes true."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentCoreAttention(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any):
            super().__init__(*args, **kwargs)

    return LatentCoreAttention


def _optimizer(setup: Setup, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer=setup.optimizer,
        lr=setup.lr,
        min_lr=setup.lr / 10,
        weight_decay=0.01,
        clip_grad=setup.clip,
        params_dtype=setup.dtype,
        bf16=setup.precision == "bf16",
        fp16=setup.precision == "fp16",
        initial_loss_scale=setup.loss_scale,
        use_distributed_optimizer=setup.dist_opt,
        overlap_param_gather=setup.overlap_param_gather,
    )
    return get_megatron_optimizer(config, chunks)


def _scheduler(setup: Setup, optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=setup.lr / 10,
        max_lr=setup.lr,
        min_lr=setup.lr / 10,
        lr_warmup_steps=16,
        lr_decay_steps=4096,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.02,
        wd_incr_steps=4096,
        wd_incr_style="linear",
    )


def _batches(setup: Setup, iteration: int, data_rank: int) -> Any:
    """Micro-batches (tokens, labels), each [micro_batch, seq]: a walk through the vocabulary from a random start.

    They depend on the step, the data-parallel rank and the micro-batch alone, so a run that goes on from a checkpoint
    at ``iteration`` reads what an unbroken one reads.
    """
    for micro in range(setup.num_microbatches):
        drawing = torch.Generator().manual_seed((iteration * 1009 + data_rank) * 1013 + micro)
        walk = torch.randint(setup.vocab, (setup.micro_batch, 1), generator=drawing)
        rows = [walk]
        for _ in range(setup.seq):
            rows.append((rows[-1] * 5 + 3) % setup.vocab)
        tokens = torch.cat(rows, dim=1)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(batches)
    seq = tokens.shape[1]
    positions = torch.arange(seq).expand_as(tokens)
    later = torch.triu(torch.ones(1, 1, seq, seq, dtype=torch.bool), diagonal=1)

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place

    return model(tokens, positions, later, labels=labels), loss_of
