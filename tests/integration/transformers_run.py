"""One life of a ``transformers.Trainer`` that trains a tiny Qwen3-MoE, in a process of its own: ``lived``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState
from torch.distributed.tensor import DTensor
from transformers import (
    EarlyStoppingCallback,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import moe_ckpt
from moe_ckpt import policies
from moe_ckpt.transformers import MoECheckpointCallback
from tests.support.kills import OPENING, Kill, Killer
from tests.support.token_journal import TokenJournal

SAMPLES, BATCH, EPOCHS = 42, 2, 3


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        policy: Name and arguments; None: without the callback.
        memory: Checkpoints in memory that outlives the process.
        accumulate: Batches a step. An epoch has 21 at one rank: its last step has fewer.
        fsdp2: Sharded by ``fully_shard``, by accelerate; else DDP where there are several ranks.
        settings: Further ones of ``TrainingArguments``.
        masked: The collator draws random numbers.
        patience: Evaluations without a better one, after which training stops.
        threshold: How much better one must be.
        resume: The option.
        stop_at: A callback stops training after this step.
        raise_at: An error is raised in the forward pass after this step.
        journal: What experts are and routers do is written to files that begin with this.
        lora: Arguments of peft's ``LoraConfig``, which wraps the model.
    """

    policy: tuple[str, dict[str, Any]] | None = ("Dense", {})
    memory: bool = False
    accumulate: int = 1
    fsdp2: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    masked: bool = False
    patience: int = 50
    threshold: float = 0.0
    resume: str = "auto"
    stop_at: int | None = None
    raise_at: int | None = None
    journal: str = ""
    lora: dict[str, Any] | None = None


class _Dies(TrainerCallback):
    """Dies, and writes down how far it came."""

    def __init__(self, run: Run, killer: Killer, rank: int) -> None:
        self._run, self._killer, self._rank = run, killer, rank
        self.ours: MoECheckpointCallback | None = None
        self.losses: dict[int, float] = {}
        self.begins: list[int] = []
        self.journal: TokenJournal | None = None

    @property
    def tokens(self) -> Any:
        return self.ours.checkpoint.session.run_ledger.tokens

    def on_train_begin(self, args, state, control, model=None, **_: Any) -> None:
        if self._run.journal:
            self.journal = TokenJournal(f"{self._run.journal}.{self._rank}", getattr(model, "module", model))
            self.journal.begin(self.ours.checkpoint.restored_step or 0, self.tokens)

    def on_step_end(self, args, state, control, **_: Any) -> None:
        if self.journal is not None:
            self.journal.step(state.global_step)
        control.should_training_stop |= state.global_step == self._run.stop_at

    def on_step_begin(self, args, state, control, **_: Any) -> None:
        self.begins.append(state.global_step)
        self._killer.at(state.global_step)
        if state.global_step == self._run.raise_at:
            raise ZeroDivisionError("the user's mistake")

    def on_log(self, args, state, control, logs=None, **_: Any) -> None:
        self.losses |= {state.global_step: logs["loss"]} if "loss" in logs else {}


def model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.01,
            attention_dropout=0.1,
        )
    )


def dataset() -> list[dict[str, torch.Tensor]]:
    words = [torch.randint(64, (16,), generator=torch.Generator().manual_seed(number)) for number in range(SAMPLES)]
    return [{"input_ids": each, "labels": each} for each in words]


def trainer(root: str, run: Run, *callbacks: TrainerCallback) -> Trainer:
    sharding = {}
    if run.fsdp2:
        wrapped = {"transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"]}
        sharding = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, **wrapped}}
    arguments = TrainingArguments(
        **{
            "output_dir": f"{root}/hf",
            "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": run.accumulate,
            "learning_rate": 1e-2,
            "seed": 3,
            "use_cpu": True,
            "save_strategy": "no",
            "eval_strategy": "steps",
            "eval_steps": 5,
            "logging_steps": 4,
            "report_to": [],
            "disable_tqdm": True,
            "metric_for_best_model": "eval_loss",
            **sharding,
            **run.settings,
        }
    )
    if run.fsdp2:  # accelerate shards on accelerators only: gloo's collectives are those of any of them
        assert arguments.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_NPU
    data, trained = dataset(), model()
    if run.lora is not None:
        from peft import LoraConfig, get_peft_model

        trained = get_peft_model(trained, LoraConfig(r=2, **run.lora))
    return Trainer(
        model=trained,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:6],
        data_collator=_masked if run.masked else None,
        callbacks=list(callbacks),
    )


def _masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    words = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": words.masked_fill(torch.rand(words.shape) < 0.1, 0), "labels": words}


def callback(root: str, run: Run) -> list[MoECheckpointCallback]:
    if run.policy is None:
        return []
    name, arguments = run.policy
    memory = moe_ckpt.Memory(directory=root, replicas=0) if run.memory else None
    options = {"dirpath": f"{root}/store", "memory": memory, "resume": run.resume}
    return [MoECheckpointCallback(getattr(policies, name)(**arguments), **options)]


def lived(rank: int, world_size: int, root: str, run: Run, kill: Kill | None = None) -> dict[str, Any]:
    """The state at the end; a process that is killed returns nothing."""
    killer = Killer(kill, rank, f"{root}/store")
    killer.at(OPENING)
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # accelerate asks for it, and does not use it: there is a process group
    patience = EarlyStoppingCallback(run.patience, run.threshold)
    ours, dies = callback(root, run), _Dies(run, killer, rank)
    dies.ours = ours[0] if ours else None
    trained = trainer(root, run, *ours, patience, dies)
    result = trained.train()
    assert run.fsdp2 is any(isinstance(parameter, DTensor) for parameter in trained.model.parameters())
    if dies.journal is not None:
        dies.journal.end(dies.tokens)
    checkpoint = ours[0].checkpoint if ours else None
    whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # noqa: E731
    tensors = {key: whole(value) for key, value in trained.accelerator.unwrap_model(trained.model).state_dict().items()}
    for at, entries in trained.optimizer.state_dict()["state"].items():
        tensors |= {f"{at}/{key}": whole(value) for key, value in entries.items()}
    state = trained.state
    return {
        "tensors": {**tensors, "rng": torch.get_rng_state()},
        "losses": dies.losses,
        "begins": dies.begins,
        "train_loss": result.training_loss,
        "restored": None if checkpoint is None else checkpoint.restored_step,
        "plt": None if checkpoint is None else checkpoint.session.run_ledger.tokens.plt,
        "at_end": (state.global_step, state.epoch, state.best_metric, state.total_flos, state.num_input_tokens_seen),
        "patience": patience.early_stopping_patience_counter,
    }
