"""Types of the config groups, so that a wrong name or type is refused when the config is composed.

Each is made from the class that it configures, and stored as ``moe_ckpt/schema/<name>``; the YAML files of the groups
start from it. They are kept out of the groups themselves, so that an error about an unknown policy lists policies only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Optional, Union, get_args, get_type_hints  # OmegaConf knows Union, and not ``int | str``

from moe_ckpt import policies
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.memory.options import Memory
from moe_ckpt.run.options import Options, OptionValues

MISSING: Any = "???"
"""A value that the user must give (OmegaConf's marker)."""
_NUMBER = Union[float, int, str]  # noqa: UP007
"""A number, or text that stands for one, such as 10min or 8GB."""
_PLAIN = (bool, int, float, str, type(None))


def _of_config(hint: Any) -> Any:
    """Returns what OmegaConf checks in place of a type; Any where that is an object, which a config makes."""
    plain = [part for part in get_args(hint) or (hint,) if part in _PLAIN]
    if str in plain and (int in plain or float in plain):
        plain = [_NUMBER, *plain]  # YAML reads 8e9 as a float, and OmegaConf converts nothing that a Union has
    return Any if plain in ([], [type(None)]) else Union[tuple(plain)]  # noqa: UP007


def schema_of(kind: type, target: str, **more: Any) -> type:
    """Makes a schema with a dataclass's options and their defaults.

    Args:
        kind: The dataclass.
        target: What a config of this schema makes.
        **more: Types of options that are given in another form than they have as attributes.
    """
    hints = get_type_hints(kind)
    rows = [
        (option.name, more.get(option.name) or _of_config(hints[option.name]), field(default=option.default))
        for option in fields(kind)
        if option.default is not NO_DEFAULT
    ]
    return make_dataclass(f"{kind.__name__}Config", [("_target_", str, field(default=target)), *rows])


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
    """Settings of the store to which checkpoints go.

    Attributes:
        dirpath: Directory or fsspec URL, the same on every rank.
        timeout_secs: For ranks to answer each other.
    """

    dirpath: Optional[str] = MISSING  # noqa: UP045
    timeout_secs: Union[float, int, str] = 600.0  # noqa: UP007


_ABOVE = ("dirpath", "timeout_secs")
"""Options that the group ``store`` has as well, and that go before it."""


def _checkpoint() -> type:
    """Makes the schema of the arguments of ``MoECheckpoint``; ``policy`` takes any node with a ``_target_``."""
    hints, defaults = get_type_hints(OptionValues), {option.name: option.default for option in fields(Options)}
    made: Mapping[str, Any] = {name: None for name, default in defaults.items() if default is NO_DEFAULT}
    rows = [
        (name, _of_config(hint), field(default=made.get(name, defaults[name])))
        for name, hint in hints.items()
        if name not in _ABOVE
    ]
    first = [
        ("_target_", str, field(default="moe_ckpt.conf.build_callback")),
        ("policy", Any, field(default=MISSING)),
        ("dirpath", Optional[str], field(default=None)),  # noqa: UP045
        ("timeout_secs", Optional[_NUMBER], field(default=None)),  # noqa: UP045
        ("store", StoreConfig, field(default_factory=StoreConfig)),
    ]
    return make_dataclass("CheckpointConfig", [*first, *rows])


_POLICIES = {
    "dense": policies.Dense,
    "checkfreq": policies.CheckFreq,
    "gemini": policies.Gemini,
    "moc": policies.MoC,
    "moetion": policies.MoEtion,
    "moevement": policies.MoEvement,
    "gradient_log": policies.GradientLog,
}
SCHEMAS: dict[str, type] = {
    "checkpoint": _checkpoint(),
    **{name: schema_of(kind, f"moe_ckpt.policies.{kind.__name__}") for name, kind in _POLICIES.items()},
    "any_of": AnyOfConfig,
    "store": StoreConfig,
    "retention": schema_of(
        RetentionPolicy,
        "moe_ckpt.RetentionPolicy",
        max_age_secs=Optional[_NUMBER],  # noqa: UP045
    ),
    "memory": schema_of(Memory, "moe_ckpt.Memory"),
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
