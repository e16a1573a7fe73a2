"""One life of torchtitan's own ``Trainer`` with a tiny Qwen3-MoE on a CPU, in a process of its own: ``lived``.

On a CPU it needs ``tests.support.torchtitan_warm``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

import moe_ckpt
from moe_ckpt import policies
from tests.support.kills import OPENING, Kill, Killer
from tests.support.token_journal import TokenJournal

STEPS, SEQ, BATCH, VOCAB, EXPERTS, TOP_K = 24, 16, 2, 64, 4, 2


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        policy: Name and arguments; None: without checkpoints.
        memory: Checkpoints in memory that outlives the process.
        spmd: ``parallelism.spmd_backend``.
        degrees: Of parallelism, where not 1.
        compiled: By torch.compile, block by block.
        recompute: Layers are computed again in the backward pass, where torchtitan counts tokens again.
        accumulate: Batches a step.
        workers: Of the data loader.
        validate: A validation every five steps draws random numbers.
        samples: Of the data, at one rank; None: endless.
        first: Number of its first sample.
        optimizers: Experts have Adam, all else AdamW.
        steps: In all.
        raise_at: An error is raised in the forward pass after this step.
        options: Further ones of the manager's config.
        journal: What experts are and routers do is written to files that begin with this.
    """

    policy: tuple[str, dict[str, Any]] | None = ("Dense", {})
    memory: bool = False
    spmd: str = "partial_dtensor"
    degrees: dict[str, int] = field(default_factory=dict)
    compiled: bool = False
    recompute: bool = False
    accumulate: int = 1
    workers: int = 0
    validate: bool = False
    samples: int | None = None
    first: int = 0
    optimizers: int = 1
    steps: int = STEPS
    raise_at: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    journal: str = ""

    def readers(self, ranks: int) -> int:
        """Of different batches, among all ranks."""
        return ranks // (self.degrees.get("tensor_parallel", 1) * self.degrees.get("context_parallel", 1))


class Words(IterableDataset):
    """Sequences that depend on their number, which is the state."""

    def __init__(self, rank: int, samples: int | None, first: int = 0) -> None:
        self.rank, self.samples, self.number = rank, samples, first

    def __iter__(self):
        while self.samples is None or self.number < self.samples:
            generator = torch.Generator().manual_seed(1_000 * self.number + self.rank)
            self.number += 1
            words = torch.randint(VOCAB, (SEQ + 1,), generator=generator)
            yield {"input": words[:-1], "positions": torch.arange(SEQ)}, words[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def _model() -> Any:
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE

    spec = qwen3.model_registry("debugmodel_moe")
    model, width = spec.model, 32
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCAB
    model.dim = model.tok_embeddings.embedding_dim = model.lm_head.in_features = width
    model.norm = qwen3._qwen3_norm(width)
    model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=width,
        n_heads=2,
        n_kv_heads=2,
        head_dim=16,
        moe_hidden_dim=16,
        num_experts=EXPERTS,
        top_k=TOP_K,
        attn_backend="flex",
        rope=CosSinRoPE.Config(dim=16, max_seq_len=64, theta=10_000.0),
        moe_comm_backend="standard",
    )
    return spec


def config(root: str, run: Run) -> Any:
    """The config of the ``Trainer``; the last line is the user's."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.components.validate import Validator
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.trainer import Trainer

    from moe_ckpt.torchtitan import CheckpointManager

    class Loader(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            samples: int | None = None
            first: int = 0
            infinite: bool = True

        def __init__(self, config, *, dp_rank, dp_world_size, local_batch_size, snapshot_every_n_steps=None, **_: Any):
            workers = {
                "num_workers": config.num_workers,
                "multiprocessing_context": "fork" if config.num_workers else None,
            }
            super().__init__(
                Words(dp_rank, config.samples, config.first),
                dp_rank=dp_rank,
                dp_world_size=dp_world_size,
                batch_size=local_batch_size,
                snapshot_every_n_steps=snapshot_every_n_steps,
                **workers,
            )

    class NoTokenizer:
        def build(self, **_: Any) -> None: ...

    kinds = [(r"experts", "Adam"), (r".*", "AdamW")][2 - run.optimizers :]
    groups = [ParamGroupConfig(pattern=p, optimizer_name=name, optimizer_kwargs={"lr": 1e-2}) for p, name in kinds]
    checkpoint = CheckpointManager.Config(enable=False)
    if run.policy is not None:
        name, arguments = run.policy
        memory = moe_ckpt.Memory(directory=root, replicas=0) if run.memory else None
        policy = getattr(policies, name)(**arguments)
        checkpoint = CheckpointManager.Config(policy=policy, folder="store", memory=memory, **run.options)
    world = int(os.environ["WORLD_SIZE"])
    return Trainer.Config(
        model_spec=_model(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        dump_folder=root,
        tokenizer=NoTokenizer(),
        metrics=MetricsProcessor.Config(log_freq=1),
        dataloader=Loader.Config(num_workers=run.workers, samples=run.samples, first=run.first),
        validator=Validator.Config(enable=run.validate, freq=5, steps=2, dataloader=Loader.Config()),
        optimizer=OptimizersContainer.Config(param_groups=groups),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=max(STEPS, run.steps)),
        training=TrainingConfig(
            local_batch_size=BATCH,
            global_batch_size=BATCH * run.readers(world) * run.accumulate,
            seq_len=SEQ,
            steps=run.steps,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend=run.spmd,
            **{f"{name}_degree": degree for name, degree in run.degrees.items()},
        ),
        activation_checkpoint=FullAC.Config() if run.recompute else None,
        compile=CompileConfig(enable=run.compiled, components=["model"]),
        debug=DebugConfig(seed=7),
        checkpoint=checkpoint,
    )


def lived(rank: int, world_size: int, root: str, run: Run, kill: Kill | None = None) -> dict[str, Any]:
    """The state at the end; a process that is killed returns nothing."""
    killer = Killer(kill, rank, f"{root}/store")
    killer.at(OPENING)
    torch.set_num_threads(1)
    trainer = config(root, run).build()
    whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # noqa: E731
    losses: dict[int, float] = {}
    begins: list[int] = []
    step = trainer.train_step

    def train_step(batches: Any) -> None:
        done = trainer.step - 1
        begins.append(done)
        if journal is not None and len(begins) == 1:
            journal.begin(done, trainer.checkpointer.checkpoint.session.run_ledger.tokens)
        killer.at(done)
        if done == run.raise_at:
            raise ZeroDivisionError("the user's mistake")
        step(batches)

    def log(number: int, loss: float, *_: Any, **__: Any) -> None:
        losses[number] = loss

    update, routed = trainer.optimizers.step, torch.zeros(2, EXPERTS)

    def optimizer_step() -> None:
        routed.add_(torch.stack([whole(block.moe.tokens_per_expert_E) for block in model.layers.values()]))
        update()
        if journal is not None:
            journal.step(trainer.step)

    model = trainer.model_parts[0]
    journal = TokenJournal(f"{run.journal}.{rank}", model) if run.journal else None
    trainer.train_step, trainer.metrics_processor.log, trainer.optimizers.step = train_step, log, optimizer_step
    try:
        trainer.train()
    except Exception:
        trainer.close()
        raise
    trainer.close()
    tensors = {f"model/{name}": whole(value) for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(trainer.optimizers):
        for at, entries in sorted(optimizer.state_dict()["state"].items()):
            tensors |= {f"optimizer {number}/{at}/{key}": whole(value) for key, value in sorted(entries.items())}
    tensors["rng"] = torch.get_rng_state()
    checkpoint = trainer.checkpointer.checkpoint
    book = None if checkpoint is None else checkpoint.session.run_ledger.tokens
    if journal is not None:
        journal.end(book)
    if run.spmd == "partial_dtensor":  # else they are of all ranks
        dist.all_reduce(routed.div_(run.degrees.get("tensor_parallel", 1) * (1 + run.recompute)))
    return {
        "tensors": tensors,
        "losses": losses,
        "begins": begins,
        "restored": None if checkpoint is None else checkpoint.restored_step,
        "plt": None if book is None else book.plt,
        "at_end": (trainer.step, trainer.ntokens_seen, [each.last_epoch for each in trainer.lr_schedulers]),
        "bias": [whole(block.moe.expert_bias_E) for block in model.layers.values()],
        "routed": (None if book is None else book.applied.tolist(), routed.tolist()),
    }


def carried(rank: int, world_size: int, root: str, source: str, target: str) -> int:
    """Takes over a run of torchtitan's ``Trainer`` in a PyTorch loop, which saves the state and ends: its step."""
    trainer = config(root, Run(policy=None)).build()
    [model], stateful = trainer.model_parts, {"lr": trainer.lr_schedulers}
    with moe_ckpt.attach(model, list(trainer.optimizers), dirpath=target, state_from=source, stateful=stateful) as ckpt:
        step = ckpt.resume().step
        ckpt.save()
    trainer.close()
    return step
