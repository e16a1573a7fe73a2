"""Megatron-LM's training scripts in a process without a GPU, for ``run_ranks(..., preload=...)``.

Where they are is said by the variable MEGATRON_LM. As ``megatron_warm``, but with ``megatron.training`` besides, which
asks CUDA more than ``megatron.core`` does. What it asks is answered here; what it would warm up, build or report on a
GPU is left out. Never imported by pytest's own process.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import sys
import typing
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.support import megatron_warm

TREE = os.environ["MEGATRON_LM"]


IMPORTED_LATER = (
    "megatron.core.datasets.helpers",
    "megatron.legacy.model",  # gone since 0.18
    "pretrain_gpt",
    "tests.support.megatron_lm",
)
SAMPLES = 1000
"""Documents of the mock data, of up to 4096 tokens each; runs here read a few dozen samples of 16 tokens."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _answer_for_cuda() -> None:
    cuda: Any = importlib.import_module("torch").cuda
    cuda.device_count = lambda: 1
    cuda.set_device = _nothing
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.get_device_properties = lambda *args: SimpleNamespace(name="none", major=9, minor=0, total_memory=0)


class _Kernels(ModuleType):
    """Kernels in triton, which has no CPU; they are imported and not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _spare_every_rank() -> None:
    """What takes each rank two seconds: reading the help of options out of sources three times, shuffling 12 million
    samples.
    """
    datasets: Any = importlib.import_module("megatron.core.datasets.gpt_dataset")
    datasets.MockGPTLowLevelDataset.size = SAMPLES
    factory: Any = importlib.import_module("megatron.training.argument_utils").ArgumentGroupFactory
    read, known = factory._get_field_docstrings, dict[type, dict[str, str]]()

    def read_once(self: Any, kind: type) -> dict[str, str]:
        if kind not in known:
            known[kind] = read(self, kind)
        return dict(known[kind])

    factory._get_field_docstrings = read_once
    arguments: Any = importlib.import_module("megatron.training.arguments")
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _import() -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    megatron_warm.quiet()
    _answer_for_cuda()
    sys.path.insert(0, TREE)
    if importlib.util.find_spec("triton") is None:  # 0.19 cannot do without; before, one file imports it
        kernels = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
        sys.modules[kernels] = _Kernels(kernels)
    if not hasattr(typing, "override"):  # of Python 3.12, for megatron.training of 0.19
        typing.override = lambda method: method
    initialize: Any = importlib.import_module("megatron.training.initialize")
    training: Any = importlib.import_module("megatron.training.training")
    training.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    training.set_jit_fusion_options = _nothing
    training.report_memory = _nothing
    initialize._compile_dependencies = _nothing
    for module in IMPORTED_LATER:
        if module.startswith("megatron.legacy") and importlib.util.find_spec("megatron.legacy") is None:
            continue
        importlib.import_module(module)
    _spare_every_rank()


_import()
