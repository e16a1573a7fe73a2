"""One life of Megatron-Bridge's own ``pretrain`` with a tiny GPT-MoE on CPUs, in processes of their own: ``lived``.

It needs ``tests.support.bridge_warm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import moe_ckpt
from moe_ckpt import policies
from moe_ckpt.megatron.bridge import MoECheckpointCallback
from tests.support.kills import OPENING, Kill, Killer
from tests.support.token_journal import TokenJournal

STEPS, SEQ, VOCAB, EXPERTS = 24, 16, 63, 4


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        policy: Name and arguments.
        memory: Checkpoints in memory that outlives the process.
        experts: Ranks that experts are divided among.
        stages: Of the pipeline.
        sharded: The optimizer is the distributed one.
        batch: Sequences a step, of all ranks.
        validate: A validation every five steps.
        steps: In all.
        journal: What experts are and routers do is written to files that begin with this.
    """

    policy: tuple[str, dict[str, Any]] = ("Dense", {})
    memory: bool = False
    experts: int = 1
    stages: int = 1
    sharded: bool = False
    batch: int = 4
    validate: bool = True
    steps: int = STEPS
    journal: str = ""


def config(root: str, run: Run) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as bridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def layers(model: Any, vp_stage: int | None = None) -> Any:
        return get_gpt_decoder_block_spec(model, use_transformer_engine=False, vp_stage=vp_stage)

    model = GPTModelProvider(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=32,
        seq_length=SEQ,
        vocab_size=None,
        make_vocab_size_divisible_by=4,
        position_embedding_type="rope",
        add_bias_linear=False,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        expert_model_parallel_size=run.experts,
        expert_tensor_parallel_size=1,
        pipeline_model_parallel_size=run.stages,
        transformer_layer_spec=layers,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
    )
    sharded = {"use_distributed_optimizer": run.sharded}
    return bridge.ConfigContainer(
        model=model,
        train=bridge.TrainingConfig(
            train_iters=run.steps, global_batch_size=run.batch, micro_batch_size=1, exit_signal_handler=False
        ),
        validation=bridge.ValidationConfig(eval_interval=5 if run.validate else None, eval_iters=int(run.validate)),
        optimizer=bridge.OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.01, clip_grad=1.0, **sharded
        ),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="cosine",
            lr_decay_iters=run.steps,
            lr_warmup_iters=2,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        ddp=bridge.DistributedDataParallelConfig(grad_reduce_in_fp32=True, **sharded),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo", use_gloo_process_groups=True),
        dataset=bridge.MockGPTDatasetConfig(
            random_seed=7,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=SEQ,
            dataloader_type="single",
            num_workers=0,
        ),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB),
        logger=bridge.LoggerConfig(log_interval=1, tensorboard_dir=None),
        checkpoint=bridge.CheckpointConfig(save=None, load=None),
        rng=bridge.RNGConfig(seed=7),
    )


class Watcher:
    """A callback beside ours: it dies, and writes down what it sees, before ours counts a step."""

    def __init__(self, run: Run, killer: Killer, rank: int, ours: MoECheckpointCallback) -> None:
        self._run, self._killer, self._rank, self._ours = run, killer, rank, ours
        self.losses: dict[int, Any] = {}
        self.end: dict[str, Any] = {}
        self.journal: TokenJournal | None = None

    @property
    def tokens(self) -> Any:
        return self._ours.checkpoint.session.run_ledger.tokens

    def on_train_start(self, context: Any) -> None:
        if self._run.journal:
            self.journal = TokenJournal(f"{self._run.journal}.{self._rank}", context.model[0])
            self.journal.begin(context.state.train_state.step, self.tokens)

    def on_train_step_start(self, context: Any) -> None:
        step = context.state.train_state.step
        self._killer.at(step)

    def on_train_step_end(self, context: Any) -> None:
        step = context.state.train_state.step + 1
        self.losses[step] = {name: tensor.tolist() for name, tensor in context.loss_dict.items()}, context.grad_norm
        if self.journal is not None:
            self.journal.step(step)

    def on_train_end(self, context: Any) -> None:
        position = context.state.train_state
        tensors = {name: tensor for name, tensor in context.model[0].state_dict().items() if torch.is_tensor(tensor)}
        optimizers = getattr(context.optimizer, "chained_optimizers", [context.optimizer])
        for number, optimizer in enumerate(optimizers):
            parameters = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
            for at, parameter in enumerate(parameters):
                entries = optimizer.optimizer.state.get(parameter, {})
                tensors |= {f"{number}/{at}/{name}": each for name, each in entries.items() if torch.is_tensor(each)}
        tensors["rng"] = torch.get_rng_state()
        counts = position.step, position.consumed_train_samples, position.consumed_valid_samples
        self.end = {
            "tensors": {name: tensor.detach().clone() for name, tensor in tensors.items()},
            "at_end": (*counts, context.scheduler.num_steps),
        }


def lived(rank: int, world_size: int, root: str, run: Run, kill: Kill | None = None) -> dict[str, Any]:
    """The state at the end; a process that is killed returns nothing."""
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    killer = Killer(kill, rank, f"{root}/store")
    killer.at(OPENING)
    torch.set_num_threads(1)
    name, arguments = run.policy
    memory = moe_ckpt.Memory(directory=root, replicas=0) if run.memory else None
    policy = getattr(policies, name)(**arguments)
    ours = MoECheckpointCallback(policy, dirpath=f"{root}/store", memory=memory)
    watcher = Watcher(run, killer, rank, ours)
    pretrain(config(root, run), forward_step, callbacks=[watcher, ours])
    if watcher.journal is not None:
        watcher.journal.end(watcher.tokens)
    return {**watcher.end, "losses": watcher.losses, "restored": ours.checkpoint.restored_step}
