"""Imports torchtitan on a CPU, for ``run_ranks(..., preload=...)``: in the process that ranks are forked from.

It takes an accelerator for granted: its name, its memory and its kernels. Those few calls have stand-ins here, and its
masks, which torch.compile makes, are left out: attention is causal. All else is torchtitan's.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

# A process with threads must not be forked: read when torch is imported, and pyarrow, for torchtitan's data sets.
os.environ |= {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

import torch


def _import() -> None:
    torch.set_num_threads(1)
    from torchtitan.tools import utils

    torch.cpu.set_device = lambda *_: None
    torch.cpu.empty_cache = lambda *_: None
    torch.cpu.device_count = lambda: 1
    utils.device_type, utils.device_module = "cpu", torch.cpu  # before other modules import them
    utils.get_local_device = lambda: torch.device("cpu")

    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components import metrics
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common import attention, decoder

    statistics = dict.fromkeys(
        ("max_active_gib", "max_active_pct", "max_reserved_gib", "max_reserved_pct", "num_alloc_retries", "num_ooms"), 0
    )
    monitor = SimpleNamespace(
        reset_peak_stats=lambda: None, get_peak_stats=lambda: SimpleNamespace(**statistics), device_name="H100"
    )
    metrics.build_device_memory_monitor = lambda: monitor
    distributed.set_pg_timeouts = lambda **_: None
    FSDPModule.set_gradient_divide_factor = lambda self, factor: self.set_force_sum_reduction_for_comms(True)

    def attend(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, scale=None, enable_gqa=False, **_: Any):
        q, k, v = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))  # shardings go by these names
        dropout = {"dropout_p": 0.1 * self.training, "is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **dropout).transpose(1, 2)

    attention.FlexAttention.forward = attend
    decoder.Decoder.get_attention_masks = lambda self, positions: None
    for name in ("torchtitan.trainer", "torchtitan.models.qwen3", "moe_ckpt.torchtitan", "moe_ckpt.policies"):
        importlib.import_module(name)


_import()
