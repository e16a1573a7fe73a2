"""Run the unmodified Megatron-Core on a machine without a GPU: gloo between processes, tensors on the CPU.

For tests and CPU recipes only; nothing else of this package imports it. It replaces names in ``torch`` and in a few
modules of ``megatron.core`` for the life of the process, never a file of either package, and nothing puts them back:
call it in a process that does nothing else. ``torch.cuda.is_available()`` stays False. For Megatron-Core
0.16.1 to 0.19.2::

    from moe_ckpt.testing import megatron_cpu

    megatron_cpu.install()  # before the first import of megatron.core
    from megatron.core import parallel_state

What works: tensor, pipeline (interleaved too), expert and data parallelism, fp32, bf16 and fp16, the distributed
optimizer, SequentialMLP, and GroupedMLP in bf16, the only type its own ``forward`` accepts. What a CPU cannot show:
overlap of communication with computation, the grouped GEMM's own kernel, Transformer Engine, fp8, NCCL, speed.
"""

from __future__ import annotations

import sys

import torch

from moe_ckpt.errors import ConfigError
from moe_ckpt.testing.megatron_cpu import megatron_names, torch_names

__all__ = ["install"]

_installed = False


def install() -> None:
    """Make ``megatron.core`` importable and trainable here; call once per process before importing it.

    A second call does nothing. Imports ``megatron.core`` itself.

    Raises:
        ConfigError: This machine has a GPU, or ``megatron.core`` is imported already.
        MissingPackageError: Megatron-Core is not installed.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise ConfigError(
            "megatron_cpu.install() makes torch.cuda answer for the CPU, but torch can use a GPU of this machine. "
            "Run Megatron as it is here, or hide the GPU by setting CUDA_VISIBLE_DEVICES to an empty string."
        )
    early = sorted(name for name in sys.modules if name == "megatron.core" or name.startswith("megatron.core."))
    if early:
        raise ConfigError(
            f"megatron_cpu.install() was called after {early[0]} had been imported, which has taken torch.compile and "
            "other names as they were. Call install() before the first import of megatron.core."
        )
    torch_names.install()
    megatron_names.install()
    _installed = True
