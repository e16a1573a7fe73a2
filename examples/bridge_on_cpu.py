"""Lets Megatron-Bridge 0.6 train on a CPU: imported instead of what it needs a GPU for. Its training is its own.

``pip install --no-deps megatron-core==0.19.2 megatron-bridge==0.6.2`` is enough: packages that training of a GPT does
without, such as those that only a GPU can use, have stand-ins here, which must not be called.
"""

import importlib
import os
import sys
import typing
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from moe_ckpt.testing import megatron_cpu

ABSENT = ("transformer_engine", "nvidia_resiliency_ext", "megatron.energon", "modelopt", "peft", "datasets")
ABSENT += ("transformers.modeling_attn_mask_utils", "tensorboard", "google", "wandb")


class _Absent(type):
    """A class that has every attribute, for annotations and base classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _Absent.__getattr__(_Absent, name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_absent = any(f"{name}.".startswith(f"{absent}.") for absent in ABSENT)
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        module.__path__, module.__version__ = [], "9"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _import() -> None:
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    warnings.simplefilter("ignore")  # of packages for GPUs that are not installed here
    torch.set_num_threads(1)
    megatron_cpu.install()
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined]
    for name in ("serialization", "strategies.nvrx"):  # they do without what is absent, if it is
        importlib.import_module(f"megatron.core.dist_checkpointing.{name}")
    sys.meta_path.append(_Finder())  # the last, so that what is installed is imported
    torch.cuda.set_device, torch.cuda.device_count = _nothing, lambda: 1
    setup, initialize, train, evaluate = (
        importlib.import_module(f"megatron.bridge.training.{name}") for name in ("setup", "initialize", "train", "eval")
    )
    begin = initialize.initialize_megatron
    setup.initialize_megatron = lambda **arguments: begin(**arguments, allow_no_cuda=True)
    setup.set_jit_fusion_options = initialize.compile_helpers = _nothing
    train.get_tensor_shapes_adjust_fn_for_distillation = _nothing
    evaluate.get_tensor_shapes_adjust_fn_for_distillation = _nothing


_import()
