"""Megatron-LM's own ``pretrain_gpt.py``, with checkpoints: run by torchrun, see README.md.

    pretrain_gpt.py [--dry-run] @deepseek_v3.args --data-path ... [words of pretrain_gpt.py]

MEGATRON_LM names the clone of Megatron-LM, RUN the directory of the run, which all nodes see.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TREE = os.environ.get("MEGATRON_LM", "")
HERE = Path(__file__).resolve().parent


def expanded(words: Iterable[str]) -> Iterator[str]:
    """The words, with those of a file in place of ``@file``; a file is also found beside this one."""
    for word in words:
        if word.startswith("@"):
            path = Path(word[1:]) if Path(word[1:]).exists() else HERE / word[1:]
            yield from shlex.split(path.read_text(), comments=True)
        else:
            yield word


def install() -> None:
    """Everything about checkpoints."""
    from moe_ckpt import Memory, megatron
    from moe_ckpt.policies import Dense

    megatron.install(
        policy=Dense(every_n_steps=1),
        dirpath=f"{os.environ.get('RUN', 'runs/my_run')}/checkpoints",
        # In /dev/shm of each node, with a copy on another; storage gets one in ten minutes.
        memory=Memory(replicas=1 if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1 else 0, storage_every="10min"),
        timeout_secs="5min",
    )


def dry_run() -> None:
    """Checks the flags as Megatron-LM does at its start, without GPUs. WORLD_SIZE: how many there will be."""
    from moe_ckpt.testing import megatron_cpu

    megatron_cpu.install()
    import torch

    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: SimpleNamespace(name="", major=9, minor=0, total_memory=0)
    cuda.get_device_capability = lambda *_: (9, 0)
    from megatron.training.arguments import parse_args, validate_args

    with contextlib.redirect_stdout(None):  # hundreds of flags
        settings: Any = parse_args()
        validate_args(settings)
    experts = settings.expert_model_parallel_size
    print(
        f"{settings.world_size} GPUs: data {settings.data_parallel_size} x "
        f"tensor {settings.tensor_model_parallel_size} x pipeline {settings.pipeline_model_parallel_size} x "
        f"context {settings.context_parallel_size}; "
        f"{settings.num_experts} experts over {experts} ranks, {settings.num_experts // experts} on each"
    )


if __name__ == "__main__":
    if not (Path(TREE) / "pretrain_gpt.py").is_file():
        sys.exit("MEGATRON_LM must name a clone of https://github.com/NVIDIA/Megatron-LM, core_v0.16.1 or core_v0.19.0")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-LM orders its collectives by it
    sys.path.insert(0, TREE)
    words = list(expanded(sys.argv[1:]))
    sys.argv = [f"{TREE}/pretrain_gpt.py", *(word for word in words if word != "--dry-run")]
    if "--dry-run" in words:
        dry_run()
    else:
        install()
        runpy.run_path(sys.argv[0], run_name="__main__")
