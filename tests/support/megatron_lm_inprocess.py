"""One process of Megatron-LM's script under its ``--inprocess-restart``: ``python -m`` this module, and JSON of the
fields of ``megatron_lm.Life``.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as a launcher sets them. What runs is Megatron-LM's own wrapper around its
own ``pretrain``. Between two calls the extension's ``ThreadedFinalize`` asks for CUDA, which is answered here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def _answer_for_cuda() -> None:
    finalize: Any = importlib.import_module("nvidia_resiliency_ext.inprocess.finalize")
    there = lambda: True  # noqa: E731
    cuda = SimpleNamespace(is_available=there, is_initialized=there, set_device=lambda device: None)
    finalize.torch = SimpleNamespace(cuda=cuda, device=lambda number: number)


if __name__ == "__main__":
    importlib.import_module("tests.support.megatron_lm_warm")
    _answer_for_cuda()
    from tests.support.megatron_lm import Life, live

    told = json.loads(sys.argv[1])
    kill = None if told["kill"] is None else tuple(told["kill"])
    life = Life(told["arguments"], told["journal"], told["line"], kill)
    live(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), life)
