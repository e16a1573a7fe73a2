"""Types of the config groups, so that a wrong name or type is refused when the config is composed.

Each dataclass is stored as ``moe_ckpt/schema/<name>``, and the YAML files of the groups start from it.
They are kept out of the groups themselves, so that an error about an unknown policy lists policies only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional, Union  # OmegaConf reads these annotations at run time, on Python 3.10 too

MISSING: Any = "???"
"""A value that the user must give (OmegaConf's marker)."""


@dataclass
class DenseConfig:
    _target_: str = "moe_ckpt.policies.Dense"
    every_n_steps: int = 1


@dataclass
class CheckFreqConfig:
    _target_: str = "moe_ckpt.policies.CheckFreq"
    max_overhead: float = 0.03


@dataclass
class GeminiConfig:
    _target_: str = "moe_ckpt.policies.Gemini"
    every_n_steps: Union[int, str] = "daly"  # noqa: UP007
    mtbf_secs: Optional[float] = None  # noqa: UP045


@dataclass
class MoCConfig:
    _target_: str = "moe_ckpt.policies.MoC"
    k: Union[int, str] = 1  # noqa: UP007
    every_n_steps: int = 1
    selector: str = "sequential"
    snapshot_k: Optional[Union[int, str]] = None  # noqa: UP007, UP045
    plt_budget: Optional[Union[float, int, str]] = None  # noqa: UP007, UP045


@dataclass
class MoEtionConfig:
    _target_: str = "moe_ckpt.policies.MoEtion"
    recompute: bool = False
    every_n_steps: int = 1
    experts: Optional[int] = None  # noqa: UP045
    capacity_boost: Optional[float] = 0.1  # noqa: UP045


@dataclass
class MoEvementConfig:
    _target_: str = "moe_ckpt.policies.MoEvement"
    window: Optional[int] = None  # noqa: UP045
    order: str = "hard_count"


@dataclass
class GradientLogConfig:
    _target_: str = "moe_ckpt.policies.GradientLog"
    window: Union[int, str] = "auto"  # noqa: UP007
    grad_dtype: str = "as_consumed"


@dataclass
class AnyOfConfig:
    """Several policies in one.

    Attributes:
        policies: By name, each of them a node with a ``_target_``, as that of a single policy.
    """

    _target_: str = "moe_ckpt.policies.AnyOf"
    _convert_: str = "all"  # in OmegaConf's own containers dataclasses, which policies are, become configs again
    policies: dict[str, Any] = field(default_factory=dict)


@dataclass
class StoreConfig:
    """Where checkpoints go.

    Attributes:
        dirpath: Directory or fsspec URL, the same on every rank.
        timeout_secs: For ranks to answer each other.
    """

    dirpath: Optional[str] = MISSING  # noqa: UP045
    timeout_secs: Union[float, int, str] = 600.0  # noqa: UP007


@dataclass
class RetentionConfig:
    """Which checkpoints stay: see ``moe_ckpt.RetentionPolicy``."""

    _target_: str = "moe_ckpt.RetentionPolicy"
    keep_last: int = 2
    keep_every_n_steps: Optional[int] = None  # noqa: UP045
    max_age_secs: Optional[Union[float, int, str]] = None  # noqa: UP007, UP045


@dataclass
class MemoryConfig:
    """Snapshots that outlive the process: see ``moe_ckpt.Memory``."""

    _target_: str = "moe_ckpt.Memory"
    directory: Optional[str] = None  # noqa: UP045
    replicas: int = 0
    failure_domain: Optional[str] = None  # noqa: UP045
    storage_every: Union[float, int, str] = 1  # noqa: UP007
    survivor_secs: Union[float, int, str] = 20.0  # noqa: UP007
    upstream_bytes: Optional[Union[float, int, str]] = None  # noqa: UP007, UP045


@dataclass
class CheckpointConfig:
    """Arguments of ``MoECheckpoint``. ``policy`` takes any node with a ``_target_``: your own policies too.

    Attributes:
        dirpath, timeout_secs: As the callback's own arguments are called; None: those of ``store``.
    """

    _target_: str = "moe_ckpt.conf.build_callback"
    policy: Any = MISSING
    dirpath: Optional[str] = None  # noqa: UP045
    timeout_secs: Optional[Union[float, int, str]] = None  # noqa: UP007, UP045
    store: StoreConfig = field(default_factory=StoreConfig)
    retention: Any = None
    memory: Any = None
    resume: str = "auto"
    save_last: bool = True
    guard: Optional[str] = None  # noqa: UP045
    plt_budget: Optional[Union[float, int, str]] = None  # noqa: UP007, UP045
    mlt_budget: Optional[Union[float, int, str]] = None  # noqa: UP007, UP045
    host_memory_bytes: Optional[Union[float, int, str]] = None  # noqa: UP007, UP045
    budget_fraction: float = 1.0
    when_busy: str = "skip"
    profile: Optional[str] = None  # noqa: UP045
    weights_from: Optional[str] = None  # noqa: UP045
    on_read_error: str = "stop"
    access: str = "private"


SCHEMAS: dict[str, type] = {
    "checkpoint": CheckpointConfig,
    "dense": DenseConfig,
    "checkfreq": CheckFreqConfig,
    "gemini": GeminiConfig,
    "moc": MoCConfig,
    "moetion": MoEtionConfig,
    "moevement": MoEvementConfig,
    "gradient_log": GradientLogConfig,
    "any_of": AnyOfConfig,
    "store": StoreConfig,
    "retention": RetentionConfig,
    "memory": MemoryConfig,
}


def portion_of(number: int, portion: float) -> int:
    """``${moe_ckpt.portion_of:${model.experts},0.125}``: so much of ``number``, in whole, at least 1."""
    return max(1, int(number * portion))


def job_directory() -> str:
    """Returns what tells the stores of a multirun's jobs from each other: their overrides, as in a restart."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        return ""
    return "/" + (str(HydraConfig.get().job.override_dirname).replace("/", ".") or "job")


def register() -> bool:
    """Store the schemas in Hydra's ConfigStore, and the resolvers of computed values. Harmless when repeated.

    Returns:
        Whether Hydra is installed.
    """
    try:
        from hydra.core.config_store import ConfigStore
        from omegaconf import OmegaConf
    except ImportError:
        return False
    OmegaConf.register_new_resolver("moe_ckpt.portion_of", portion_of, replace=True)
    OmegaConf.register_new_resolver("moe_ckpt.job", job_directory, replace=True)
    for name, node in SCHEMAS.items():
        ConfigStore.instance().store(group="moe_ckpt/schema", name=name, node=node, provider="moe_ckpt")
    return True
