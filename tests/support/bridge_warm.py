"""Imports Megatron-Bridge on a CPU, for ``run_ranks(..., preload=...)``: in the process that ranks are forked from."""

from __future__ import annotations

import importlib

from examples import bridge_on_cpu  # noqa: F401
from tests.support import megatron_warm  # noqa: F401

for name in ("megatron.bridge.training.pretrain", "megatron.bridge.training.gpt_step", "moe_ckpt.megatron.bridge"):
    importlib.import_module(name)
