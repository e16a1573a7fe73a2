"""What ranks of most tests import, for ``run_ranks``: they are forks of a process that has imported it (``warm``)."""

from __future__ import annotations

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: a process with threads must not be forked

MODULES = (
    "lightning.pytorch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchmetrics",
    "moe_ckpt.callbacks",
    "moe_ckpt.data",
    "moe_ckpt.policies",
    "tests.support.store_builder",
    "tests.support.tiny_moe",
)


def _import() -> None:
    importlib.import_module("torch").set_num_threads(1)
    for name in MODULES:
        importlib.import_module(name)


_import()
