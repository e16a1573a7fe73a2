"""Imports Megatron-Bridge on a CPU, for ``run_ranks(..., preload=...)``: in the process that ranks are forked from.

It imports packages that only a GPU can use, or that no index has for this Python. They have stand-ins here, which must
not be called; and what Bridge asks of CUDA beyond what Megatron-Core asks is answered. Its training is Bridge's own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing
from typing import Any

from tests.support import megatron_warm

ABSENT = ("transformer_engine", "nvidia_resiliency_ext", "megatron.energon")
FIRST = (
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies.nvrx",
    "modelopt.torch.distill.plugins.megatron",
)
"""They do without what is absent, if it is."""


class _Absent(type):
    """A class that has every attribute, for annotations and base classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        is_absent = any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> _Module:
        module = _Module(spec.name)
        module.__path__, module.__version__ = [], "0.0.0"
        return module

    def exec_module(self, module: Any) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _import() -> None:
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    megatron_warm.quiet()
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda method: method
    for name in FIRST:
        importlib.import_module(name)
    sys.meta_path.append(_Finder())
    cuda: Any = importlib.import_module("torch").cuda
    cuda.set_device, cuda.device_count = _nothing, lambda: 1
    setup: Any = importlib.import_module("megatron.bridge.training.setup")
    initialize: Any = importlib.import_module("megatron.bridge.training.initialize")
    for name in ("megatron.bridge.training.pretrain", "megatron.bridge.training.gpt_step", "moe_ckpt.megatron.bridge"):
        importlib.import_module(name)
    begin = initialize.initialize_megatron
    setup.initialize_megatron = lambda **arguments: begin(**arguments, allow_no_cuda=True)
    setup.set_jit_fusion_options = initialize.compile_helpers = _nothing


_import()
