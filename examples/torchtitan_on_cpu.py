"""Lets torchtitan 0.3 train on a CPU: imported before it, in place of the accelerator that it takes for granted.

Its name, its memory and its kernels have stand-ins here; attention is causal, since torch.compile makes its masks. All
else is torchtitan's own.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def _attend(self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, scale: Any = None, **more: Any) -> Any:
    q, k, v = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))  # shardings go by these names
    settings = {"dropout_p": 0.1 * self.training, "scale": scale, "enable_gqa": more.get("enable_gqa", False)}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **settings).transpose(1, 2)


def _import() -> None:
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a process with threads must not be forked
    torch.set_num_threads(1)
    from torchtitan.tools import utils

    torch.cpu.set_device = torch.cpu.empty_cache = lambda *_: None
    torch.cpu.device_count = lambda: 1
    utils.device_type, utils.device_module = "cpu", torch.cpu  # before other modules import them
    utils.get_local_device = lambda: torch.device("cpu")

    from torchtitan.components import metrics
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common import attention, decoder

    sizes = ("max_active_gib", "max_active_pct", "max_reserved_gib", "max_reserved_pct")
    statistics = SimpleNamespace(**dict.fromkeys((*sizes, "num_alloc_retries", "num_ooms"), 0))
    monitor = {"reset_peak_stats": lambda: None, "get_peak_stats": lambda: statistics, "device_name": "H100"}
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(**monitor)
    distributed.set_pg_timeouts = lambda **_: None
    FSDPModule.set_gradient_divide_factor = lambda self, factor: self.set_force_sum_reduction_for_comms(True)

    attention.FlexAttention.forward = _attend
    decoder.Decoder.get_attention_masks = lambda self, positions: None


_import()
