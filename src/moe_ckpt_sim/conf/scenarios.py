"""Turns a composed config of the group ``simulate`` into a scenario that ``moe_ckpt_sim`` can run.

Needs Hydra. Every error in the config is a ``ConfigError`` that names the field.
"""

from __future__ import annotations

from inspect import Parameter, signature
from pathlib import Path
from pydoc import locate
from typing import Any, TypeVar, cast

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moe_ckpt.conf import register
from moe_ckpt.errors import ConfigError, MoECheckpointError
from moe_ckpt_sim.cluster.cluster import Cluster, ClusterLayout, Parallel
from moe_ckpt_sim.failures.failures import Failures
from moe_ckpt_sim.run.scenario import Scenario
from moe_ckpt_sim.run.system import SimulatedMemory, System
from moe_ckpt_sim.workload.iteration import Timing, estimate
from moe_ckpt_sim.workload.load import ExpertLoad
from moe_ckpt_sim.workload.model import ModelSpec, Precision, SimModel
from moe_ckpt_sim.workload.swin import SwinSpec
from moe_ckpt_sim.workload.training import Batch, Iteration

CONFIG_DIR = Path(__file__).parent / "simulate"
"""Directory of the primary config ``simulate`` and its groups."""

_T = TypeVar("_T")


def failures_of(cfg: DictConfig) -> Failures:
    """The source of failures that ``cfg`` describes. Raises ``ConfigError`` as ``scenario_of``."""
    return cast(Failures, _made(cfg, "failures", object))


def scenario_of(cfg: DictConfig) -> Scenario:
    """The scenario that ``cfg`` describes, a config composed from ``simulate``.

    A ``_target_`` may also be the user's own code: that of ``model`` may make a ``SimModel``, that of ``iteration`` an
    ``Iteration``.

    Raises:
        ConfigError: a value is missing or invalid, or two contradict each other.
    """
    register()
    _require_complete(cfg)
    layout = layout_of(cfg)
    precision, batch = _made(cfg, "precision", Precision), _made(cfg, "batch", Batch)
    return Scenario(
        layout=layout,
        precision=precision,
        batch=batch,
        iteration=_iteration(cfg, layout, batch, precision),
        failures=failures_of(cfg),
        system=_system(cfg),
        load=_made(cfg, "load", ExpertLoad),
        duration_secs=value_of(cfg, "duration_secs"),
        seed=value_of(cfg, "seed"),
    )


def _system(cfg: DictConfig) -> System:
    system = _made(cfg, "policy", System)
    return _made(cfg, "memory", SimulatedMemory).applied_to(system) if _known(cfg, "memory") else system


def layout_of(cfg: DictConfig) -> ClusterLayout:
    """The layout of the model on the cluster. Raises ``ConfigError`` as ``scenario_of``."""
    spec: ModelSpec | SwinSpec | SimModel = _made(cfg, "model", ModelSpec, SwinSpec, SimModel)
    model = spec if isinstance(spec, SimModel) else spec.build()
    return ClusterLayout(model, _made(cfg, "cluster", Cluster), _made(cfg, "parallel", Parallel))


def _iteration(cfg: DictConfig, layout: ClusterLayout, batch: Batch, precision: Precision) -> Iteration:
    timing = _made(cfg, "iteration", Timing, Iteration)
    return estimate(layout, batch, precision, timing) if isinstance(timing, Timing) else cast(Iteration, timing)


def _require_complete(cfg: DictConfig) -> None:
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
    except OmegaConfBaseException as error:
        raise _cause(error.full_key or "config", error) from error
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be given: {' '.join(f'{name}=...' for name in missing)}")


def _made(cfg: DictConfig, group: str, kind: type[_T], *others: type) -> _T:
    """Make the object that ``_target_`` of ``group`` names, which must be a ``kind`` or one of ``others``."""
    node = _known(cfg, group)
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise ConfigError(f"{group}: nothing with a _target_ was chosen; choose one with {group}=..., see --help")
    try:
        made = instantiate(node)
    except (HydraException, OmegaConfBaseException) as error:
        raise _misfit(group, node) or _cause(group, error) from error
    kinds = (kind, *others)
    if not isinstance(made, kinds):
        expected = " or ".join(cls.__name__ for cls in kinds)
        raise ConfigError(f"{group}: {node._target_} made a {type(made).__name__}, not a {expected}")
    return cast(_T, made)


def value_of(cfg: DictConfig, name: str) -> Any:
    """A value such as ``seed`` or ``cluster.nodes``. Raises ``ConfigError`` if it is null, missing or unreadable."""
    value = _known(cfg, name)
    if value is None:
        raise ConfigError(f"{name} must be given: {name}=...")
    return value


def _known(cfg: DictConfig, name: str) -> Any:
    try:
        return OmegaConf.select(cfg, name)
    except OmegaConfBaseException as error:
        raise _cause(name, error) from error


def _misfit(path: str, node: Any) -> ConfigError | None:
    """The error for keys of ``node`` or its children that do not fit their target's parameters; None if all fit."""
    if not isinstance(node, DictConfig) or OmegaConf.is_missing(node, "_target_"):
        return None
    keys = [str(key) for key in node]
    for key in keys:
        if not OmegaConf.is_interpolation(node, key) and (misfit := _misfit(f"{path}.{key}", node[key])):
            return misfit
    fits = _parameters(node.get("_target_"))
    if fits is None or "_args_" in keys:
        return None
    names = [key for key in keys if not key.startswith("_")]
    needed = [name for name, one in fits.items() if one.default is one.empty and name not in keys]
    beyond = [key for key in names if key not in fits]
    if beyond:
        return ConfigError(f"{path}.{beyond[0]}: {node._target_} has no such parameter; it has {', '.join(fits)}")
    return ConfigError(f"{path}.{needed[0]} must be given: {path}.{needed[0]}=...") if needed else None


def _parameters(target: Any) -> dict[str, Parameter] | None:
    """The target's parameters by name; None if it takes any, or cannot be imported."""
    try:
        fits = signature(cast(Any, locate(target))).parameters
    except Exception:  # another message names what cannot be imported
        return None
    return None if any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in fits.values()) else dict(fits)


def _cause(group: str, error: BaseException) -> MoECheckpointError:
    """The library's own error inside Hydra's, or else an error with Hydra's message but without its wrappers."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MoECheckpointError):
            return cause
        cause = cause.__cause__
    inner = error
    while isinstance(inner, (HydraException, ImportError)) and inner.__cause__ is not None:
        inner = inner.__cause__
    kind = "" if isinstance(inner, (HydraException, OmegaConfBaseException)) else f"{type(inner).__name__}: "
    return ConfigError(f"{group}: {kind}{' '.join(str(inner).split())}")
