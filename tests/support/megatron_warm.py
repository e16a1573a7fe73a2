"""What every rank of a Megatron test imports, for ``run_ranks(..., preload=...)``: ranks then start in no time.

Also what a rank would import only when it begins to train (two seconds in each): torch's compiler, torchmetrics.
Imported in the process that ranks are forked from (``tests.support.warm``), never in pytest's own.
"""

from __future__ import annotations

import importlib
import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: a process with threads must not be forked

MODULES = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.moe.moe_layer",
    "moe_ckpt.megatron",
    "moe_ckpt.metrics",
    "moe_ckpt.policies",
    "tests.support.megatron_run",
    "torch._dynamo",
)


def quiet() -> None:
    """Megatron-Core says that Apex is absent and its defaults are deprecated, and calls torch by old names."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")


def _import() -> None:
    quiet()
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    load = torch.storage._load_from_bytes
    importlib.import_module("moe_ckpt.testing.megatron_cpu").install()
    # Since 0.17 it is a function of Megatron's, by which unpickling a rank's tensors would import Megatron in pytest.
    torch.storage._load_from_bytes = load
    for name in MODULES:
        importlib.import_module(name)


_import()
