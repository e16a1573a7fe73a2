"""Imports torchtitan on a CPU, for ``run_ranks(..., preload=...)``: in the process that ranks are forked from."""

from __future__ import annotations

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: a process with threads must not be forked

from examples import torchtitan_on_cpu  # noqa: F401 - before torchtitan

for name in ("torchtitan.trainer", "torchtitan.models.qwen3", "moe_ckpt.torchtitan", "moe_ckpt.policies"):
    importlib.import_module(name)
