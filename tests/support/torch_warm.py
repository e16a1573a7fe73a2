"""What most processes of tests import: they are forks of a process that has imported it (``warm``).

Also what they import only when they begin to work (torch's compiler, two seconds in each), and what the modules of
tests import, in which the functions are that ranks run.
"""

from __future__ import annotations

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: a process with threads must not be forked

MODULES = (
    "hydra",
    "hypothesis",
    "lightning.pytorch",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torchdata.stateful_dataloader",
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
