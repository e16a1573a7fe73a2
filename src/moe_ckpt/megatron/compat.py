"""The names of Megatron-Core that this adapter uses, looked up once and checked, and wrapped where it has no hooks.

Megatron-Core has no stable interface for them, so each is listed: a version in which one has moved is refused by that
name when training starts, rather than failing when a checkpoint is needed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from moe_ckpt.errors import MissingPackageError, UnsupportedError

OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"

CLASSES = {
    "moe_layer": ("megatron.core.transformer.moe.moe_layer", "BaseMoELayer"),
    "optimizer": (OPTIMIZER, "MegatronOptimizer"),
    "fp32_optimizer": (OPTIMIZER, "FP32Optimizer"),
    "float16_optimizer": (OPTIMIZER, "Float16OptimizerWithFloat16Params"),
    "distributed_optimizer": (_DISTRIBUTED, "DistributedOptimizer"),
    "chained_optimizer": (OPTIMIZER, "ChainedOptimizer"),
}
"""Attribute of ``megatron_core()`` -> (module, name in it)."""
HOOK_POINTS: tuple[tuple[str, str], ...] = (
    *CLASSES.values(),
    (_DISTRIBUTED, "DistributedOptimizer._get_model_param_range_map"),
    ("megatron.core.transformer.moe.router", "TopKRouter.routing"),
    ("megatron.core.transformer.cuda_graphs", "is_graph_capturing"),
    ("megatron.core.transformer.cuda_graphs", "_set_capture_start"),
    ("megatron.core.transformer.cuda_graphs", "_set_capture_end"),
    ("megatron.core.tensor_parallel.random", "get_cuda_rng_tracker"),
    ("megatron.core.parallel_state", "get_data_parallel_group"),
    ("megatron.core.parallel_state", "get_expert_data_parallel_group"),
    ("megatron.core.parallel_state", "get_tensor_model_parallel_group"),
    ("megatron.core.parallel_state", "get_expert_tensor_parallel_group"),
    ("megatron.core.parallel_state", "get_pipeline_model_parallel_rank"),
    ("megatron.core.parallel_state", "get_expert_model_parallel_rank"),
)
"""(module, name in it)."""


@lru_cache(maxsize=1)
def megatron_core() -> SimpleNamespace:
    """Imports Megatron-Core. Not done at import of this package, whose pure parts work without it.

    Returns:
        Its ``version``, its module ``parallel_state``, and the classes of ``CLASSES``.

    Raises:
        MissingPackageError: It is not installed.
        UnsupportedError: A name in ``HOOK_POINTS`` is missing.
    """
    try:
        importlib.import_module("megatron.core")
    except ImportError as error:
        raise MissingPackageError("megatron-core", "moe_ckpt.megatron", "megatron") from error
    for module, name in HOOK_POINTS:
        look_up(module, name)
    return SimpleNamespace(
        version=version(),
        parallel_state=importlib.import_module("megatron.core.parallel_state"),
        **{name: look_up(*source) for name, source in CLASSES.items()},
    )


def rng_tracker() -> Any:
    """Returns the tracker of model-parallel random number generators."""
    return look_up("megatron.core.tensor_parallel.random", "get_cuda_rng_tracker")()


def version() -> str:
    """Returns the version of the installed megatron-core."""
    return str(getattr(importlib.import_module("megatron.core"), "__version__", "of unknown version"))


def look_up(module: str, name: str) -> Any:
    """Returns ``name`` (dotted) in ``module``. Raises ``UnsupportedError`` that names it if it is not there."""
    value: ModuleType | Any
    try:
        value = importlib.import_module(module)
        for attribute in name.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"megatron-core {version()} has no {module}.{name}, which moe_ckpt.megatron needs. Versions 0.16.1 to "
            "0.19.2 have it: install one of them, or a newer moe_ckpt."
        ) from error
    return value


def runs_on_samples() -> bool:
    """Returns whether Megatron-Core runs a forward pass on samples, before it captures a CUDA graph of it."""
    is_capturing = look_up("megatron.core.transformer.cuda_graphs", "is_graph_capturing")()
    return is_capturing and not torch.cuda.is_current_stream_capturing()


class Wrapped:
    """A function that is wrapped until ``close``.

    If others have wrapped it since, theirs stays in place, and ours only calls the original.

    Args:
        owner: The object, class or module that has the function.
        name: Name of the function.
        around: Called in its place, with the original and the arguments of the call.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self._is_open else original(*args, **kwargs)

        self._owner, self._name, self._wrapper = owner, name, wrapper
        self._replaced = vars(owner).get(name)
        self._is_open = True
        setattr(owner, name, wrapper)

    def close(self) -> None:
        """Removes the wrapper. May be called twice."""
        self._is_open = False
        if vars(self._owner).get(self._name) is not self._wrapper:
            return
        if self._replaced is None:  # it is of the class
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._replaced)


@contextmanager
def changed_attributes(target: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of ``target`` to other values until the block ends. Those that it lacks are left out."""
    old = {name: getattr(target, name) for name in values if hasattr(target, name)}
    for name in old:
        setattr(target, name, values[name])
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(target, name, value)
