"""From a composed config of the group ``simulate`` to a scenario that ``moe_ckpt.sim`` can run.

Needs Hydra. Every error in the config is a ``ConfigError`` that names the field.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moe_ckpt import conf
from moe_ckpt.errors import ConfigError, MoECheckpointError
from moe_ckpt.sim.cluster import Cluster, Layout, Parallel
from moe_ckpt.sim.failures import Failures
from moe_ckpt.sim.iteration import Timing, estimate
from moe_ckpt.sim.load import ExpertLoad
from moe_ckpt.sim.model import ModelSpec, Precision, SimModel
from moe_ckpt.sim.scenario import Scenario
from moe_ckpt.sim.swin import SwinSpec
from moe_ckpt.sim.system import System
from moe_ckpt.sim.training import Batch, Iteration

CONFIG_DIR = Path(conf.__file__).parent / "simulate"
"""Where the primary config ``simulate`` and its groups are."""

_T = TypeVar("_T")


def failures_of(cfg: DictConfig) -> Failures:
    """Where failures come from. Raises ``ConfigError`` as ``scenario_of``."""
    return cast(Failures, _made(cfg, "failures", object))


def scenario_of(cfg: DictConfig) -> Scenario:
    """What ``cfg`` describes, a config composed from ``simulate``.

    A group may also name what one has oneself: ``model`` what makes a ``SimModel``, ``iteration`` an ``Iteration``.

    Raises:
        ConfigError: a value is missing or makes no sense, or two contradict each other.
    """
    conf.register()
    _require_complete(cfg)
    layout = layout_of(cfg)
    precision, batch = _made(cfg, "precision", Precision), _made(cfg, "batch", Batch)
    return Scenario(
        layout=layout,
        precision=precision,
        batch=batch,
        iteration=_iteration(cfg, layout, batch, precision),
        failures=failures_of(cfg),
        system=_made(cfg, "policy", System),
        load=_made(cfg, "load", ExpertLoad),
        duration_secs=_value(cfg, "duration_secs"),
        seed=_value(cfg, "seed"),
    )


def layout_of(cfg: DictConfig) -> Layout:
    """The model on the cluster. Raises ``ConfigError`` as ``scenario_of``."""
    spec: ModelSpec | SwinSpec | SimModel = _made(cfg, "model", ModelSpec, SwinSpec, SimModel)
    model = spec if isinstance(spec, SimModel) else spec.build()
    return Layout(model, _made(cfg, "cluster", Cluster), _made(cfg, "parallel", Parallel))


def _iteration(cfg: DictConfig, layout: Layout, batch: Batch, precision: Precision) -> Iteration:
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
    """What the ``_target_`` of ``group`` makes, which must be a ``kind`` or one of ``others``."""
    node = _value(cfg, group)
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise ConfigError(f"{group}: nothing with a _target_ was chosen; choose one with {group}=..., see --help")
    try:
        made = instantiate(node)
    except (HydraException, OmegaConfBaseException) as error:
        raise _cause(group, error) from error
    kinds = (kind, *others)
    if not isinstance(made, kinds):
        wanted = " or ".join(each.__name__ for each in kinds)
        raise ConfigError(f"{group}: {node._target_} made a {type(made).__name__}, not a {wanted}")
    return cast(_T, made)


def _value(cfg: DictConfig, name: str) -> Any:
    try:
        return cfg.get(name)
    except OmegaConfBaseException as error:
        raise _cause(name, error) from error


def _cause(group: str, error: BaseException) -> MoECheckpointError:
    """Our own error inside of Hydra's, or one that says what Hydra's does without its stack of wrappers."""
    deepest, inner = error, error.__cause__
    while inner is not None:
        if isinstance(inner, MoECheckpointError):
            return inner
        deepest, inner = inner, inner.__cause__
    lines = " ".join(str(deepest).split())
    return ConfigError(f"{group}: {lines}")
