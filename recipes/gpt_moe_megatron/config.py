"""The run's configuration: plain dataclasses, filled from Hydra's YAML files in ``conf/`` or by hand.

Nothing of Megatron-Core or torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PRECISIONS = ("fp32", "bf16", "fp16")
ENGINES = ("auto", "always", "never")
DATA = ("synthetic", "tokens")


@dataclass(frozen=True)
class Paper:
    """What a paper says about this model, in parameters; None where it says nothing. ``matched``: held by a test."""

    name: str
    total: float
    active: float | None = None
    matched: str = "total"


@dataclass(frozen=True)
class ModelConfig:
    """A GPT whose feed-forward layers are experts.

    ffn: width of the feed-forward layers that are not experts. expert_ffn: of one expert.
    shared_expert_ffn: of all shared experts together, None without any.
    dense_layers: as many layers at the front have no experts.
    gated: SwiGLU (three matrices) instead of GELU (two).
    capacity_factor: None drops no token.
    """

    layers: int
    hidden: int
    heads: int
    experts: int
    top_k: int
    expert_ffn: int
    vocab: int
    seq: int
    ffn: int | None = None
    shared_expert_ffn: int | None = None
    dense_layers: int = 0
    gated: bool = False
    norm: str = "LayerNorm"
    position: str = "rope"
    tied: bool = False
    dropout: float = 0.0
    capacity_factor: float | None = None
    aux_loss: float = 0.01
    init_std: float = 0.02
    paper: Paper | None = None

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"model.top_k={self.top_k}: there are only model.experts={self.experts}")
        if self.hidden % self.heads:
            raise ValueError(f"model.hidden={self.hidden} cannot be split over model.heads={self.heads}")
        if not 0 <= self.dense_layers < self.layers:
            raise ValueError(
                f"model.dense_layers={self.dense_layers}: of model.layers={self.layers} one must have experts"
            )
        if self.dense_layers and self.ffn is None:
            raise ValueError(f"model.dense_layers={self.dense_layers}: give their width, model.ffn")

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers


@dataclass(frozen=True)
class ParallelConfig:
    """The layout. Ranks: tp * pp * ep * dp.

    dp: as the papers count, beside ep. Megatron-Core's data-parallel size, the number of copies of what is no expert,
        is ep * dp; of each expert there are tp * dp. None: what the number of processes leaves over.
    vpp: model chunks per pipeline rank; None for the plain 1F1B schedule.
    layout: Megatron-Core's ``pipeline_model_parallel_layout``, where layers cannot be dealt evenly.
    distributed_optimizer: masters and optimizer state are divided over the data-parallel ranks (ZeRO stage 1).
    overlap: reduce gradients beside the backward pass and gather parameters beside the forward pass.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    dp: int | None = None
    layout: str | None = None
    distributed_optimizer: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.overlap and not self.distributed_optimizer:
            raise ValueError("parallel.overlap=true gathers parameters: it needs parallel.distributed_optimizer=true")
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"parallel.vpp={self.vpp} interleaves pipeline stages, but parallel.pp=1 has only one")

    @property
    def ranks(self) -> int:
        """``dp=None`` counts as 1."""
        return self.tp * self.pp * self.ep * (self.dp or 1)

    def data_parallel(self, world_size: int) -> int:
        """Megatron-Core's data-parallel size.

        Raises:
            ValueError: this many processes do not fit the layout.
        """
        model = self.tp * self.pp
        fits = world_size == self.ranks if self.dp is not None else world_size % self.ranks == 0
        if not fits:
            expected = self.ranks if self.dp is not None else f"a multiple of {self.ranks}"
            raise ValueError(
                f"parallel: tp={self.tp} pp={self.pp} ep={self.ep} dp={self.dp} needs {expected} processes, not "
                f"{world_size}: start another number of them, or change parallel.dp"
            )
        return world_size // model


@dataclass(frozen=True)
class TrainerConfig:
    """micro_batch: sequences per rank. global_batch: sequences per iteration, all ranks.

    transformer_engine: auto, always or never; auto takes it where it is installed and a GPU is there.
    grouped_gemm: one grouped product for all local experts; only with Transformer Engine.
    options: any further field of Megatron-Core's TransformerConfig, such as recompute_granularity.
    timeout_secs: how long a rank waits for another before it fails.
    """

    train_iters: int = 30
    micro_batch: int = 2
    global_batch: int = 16
    precision: str = "bf16"
    transformer_engine: str = "auto"
    grouped_gemm: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    timeout_secs: float = 600
    log_every: int = 1

    def __post_init__(self) -> None:
        for name, choices in (("precision", PRECISIONS), ("transformer_engine", ENGINES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"trainer.{name}={getattr(self, name)!r}: choose from {', '.join(choices)}")

    def microbatches(self, data_parallel: int) -> int:
        """Per iteration and rank.

        Raises:
            ValueError: the global batch cannot be dealt evenly.
        """
        count, rest = divmod(self.global_batch, self.micro_batch * data_parallel)
        if rest or not count:
            raise ValueError(
                f"trainer.global_batch={self.global_batch} is no multiple of trainer.micro_batch={self.micro_batch} x "
                f"{data_parallel} data-parallel ranks; change one of them"
            )
        return count


@dataclass(frozen=True)
class AdamConfig:
    """min_lr: None for a tenth of lr. decay_iters: None for the whole run."""

    lr: float = 1e-3
    min_lr: float | None = None
    warmup_iters: int = 5
    decay_iters: int | None = None
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    @property
    def last_lr(self) -> float:
        return self.lr / 10 if self.min_lr is None else self.min_lr


@dataclass(frozen=True)
class DataConfig:
    """synthetic: a language made up here. tokens: ``path`` is a flat file of token ids of type ``dtype``."""

    name: str = "synthetic"
    path: str | None = None
    dtype: str = "uint16"

    def __post_init__(self) -> None:
        if self.name not in DATA:
            raise ValueError(f"data.name={self.name!r}: choose from {', '.join(DATA)}")
        if self.name == "tokens" and not self.path:
            raise ValueError("data=tokens: give data.path=<file of token ids>, such as the .bin of a Megatron data set")


@dataclass(frozen=True)
class FaultConfig:
    """kill -9 of random ranks at random iterations, the same for the same seed; for trying out restarts.

    after: share of the run in which nothing is killed yet.
    """

    kills: int = 0
    seed: int = 0
    after: float = 0.1


@dataclass(frozen=True)
class RunConfig:
    """One run. ``run_dir`` must be the same on every rank and after a restart."""

    run_dir: str
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: AdamConfig = field(default_factory=AdamConfig)
    data: DataConfig = field(default_factory=DataConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    seed: int = 1

    @classmethod
    def of(cls, plain: dict[str, Any]) -> RunConfig:
        """From the plain form of a composed config; keys that no field has are left to whoever they are for.

        Raises:
            TypeError: a group has a key that no field has.
            ValueError: values that do not fit together.
        """
        model = dict(plain["model"])
        model["paper"] = Paper(**model["paper"]) if model.get("paper") else None
        return cls(
            run_dir=plain["run_dir"],
            seed=plain["seed"],
            model=ModelConfig(**model),
            parallel=ParallelConfig(**plain["parallel"]),
            trainer=TrainerConfig(**plain["trainer"]),
            optimizer=AdamConfig(**plain["optimizer"]),
            data=DataConfig(**plain["data"]),
            faults=FaultConfig(**plain["faults"]),
        )
