"""Hydra config groups of moe_ckpt: ``moe_ckpt/policy``, ``/store``, ``/retention``, ``/memory``, and ``callbacks``.

An app gets them with one line in its primary config::

    hydra:
      searchpath: [pkg://moe_ckpt.conf]

Hydra imports this package when it first looks there, and that registers the typed schemas. Without
Hydra, importing it does nothing.

Each schema is made from the class that it configures, so that a wrong name or type is refused when the config is
composed. They are kept out of the groups themselves (``moe_ckpt/schema/<name>``), so that an error about an unknown
policy lists policies only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, make_dataclass
from typing import (  # OmegaConf knows Union, and not ``int | str``
    TYPE_CHECKING,
    Any,
    Optional,
    Union,
    get_args,
    get_type_hints,
)

from moe_ckpt import policies
from moe_ckpt.errors import ConfigError
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.memory.options import Memory
from moe_ckpt.run.options import Options, OptionValues

if TYPE_CHECKING:
    from moe_ckpt.callbacks import MoECheckpoint
    from moe_ckpt.policies import Policy

__all__ = ["build_callback", "register"]

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


def schema_of(kind: type, target: str) -> type:
    """Makes a schema with a dataclass's options and their defaults.

    Args:
        kind: The dataclass.
        target: What a config of this schema makes.
    """
    hints = get_type_hints(kind)
    rows = [
        (name, _of_config(hints[name]), field(default=MISSING if default is NO_DEFAULT else default))
        for name, default in ((option.name, option.default) for option in fields(kind))
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


_POLICIES = {kind.name: kind for kind in policies.NAMED} | {"guarded": policies.Guarded}
SCHEMAS: dict[str, type] = {
    "checkpoint": _checkpoint(),
    **{name: schema_of(kind, f"moe_ckpt.policies.{kind.__name__}") for name, kind in _POLICIES.items()},
    "any_of": AnyOfConfig,
    "store": StoreConfig,
    "retention": schema_of(RetentionPolicy, "moe_ckpt.RetentionPolicy"),
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


def build_callback(
    policy: Policy,
    store: Mapping[str, Any],
    dirpath: str | None = None,
    timeout_secs: Any = None,
    memory: Memory | None = None,
    **options: Any,
) -> MoECheckpoint:
    """Returns the callback of a composed config: the ``_target_`` of ``moe_ckpt: default``.

    The groups are nested, the callback's arguments are not: ``store`` is spread over them here.

    Args:
        policy: Made from the group ``moe_ckpt/policy``.
        store: The group ``moe_ckpt/store``: ``dirpath``, ``timeout_secs`` and the like.
        dirpath: ``moe_ckpt.dirpath=x`` does what ``moe_ckpt.store.dirpath=x`` does, and goes before it.
        timeout_secs: Likewise.
        memory: Made from the group ``moe_ckpt/memory``; that of ``off`` is empty.
        **options: The callback's other arguments.

    Raises:
        ConfigError: No ``dirpath`` was given, or a value cannot be.
    """
    from moe_ckpt.callbacks import MoECheckpoint

    overrides = {"dirpath": dirpath, "timeout_secs": timeout_secs}
    where = {**store, **{key: value for key, value in overrides.items() if value is not None}}
    if where.get("dirpath") is None:
        raise ConfigError("moe_ckpt.dirpath must be given: a directory, or a URL such as s3://bucket/run")
    return MoECheckpoint(policy, **where, memory=memory or None, **options)


register()
