"""Counts what one rank does to come back along a gradient log: a ``sabotage`` that breaks nothing."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter

import torch.distributed as dist

_SAYS = "counted on return: "


def count() -> None:
    """From now on this process says, once it has come back, what it read from slots, and how many updates it made."""
    from moe_ckpt.format.shard import GRADIENT
    from moe_ckpt.gradient_log import returning as logs
    from moe_ckpt.gradient_log.optimizers import OptimizerReplay
    from moe_ckpt.gradient_log.replaying import LogReplayer
    from moe_ckpt.reading import reader
    from moe_ckpt.reading import restore as restoring
    from moe_ckpt.reading.memory.memory_checkpoints import SURVIVORS_SUFFIX

    found: Counter[str] = Counter()

    def kind(stored) -> str:
        if not stored.entry.operator:
            return "plain"
        if SURVIVORS_SUFFIX in stored.path:
            return "sealed"
        return "gradients" if stored.entry.key.startswith(GRADIENT) else "anchors"

    def counted(module, name) -> None:
        original = getattr(module, name)

        def wrapped(storage, wanted, *more):
            wanted = list(wanted)
            found.update(map(kind, wanted))
            return original(storage, wanted, *more)

        setattr(module, name, wrapped)

    counted(reader, "read_slices")
    counted(restoring, "find_damage")
    counted(logs, "find_damage")
    step, finish = OptimizerReplay.step, LogReplayer.finish

    def stepped(self, update, gradients):
        made = step(self, update, gradients)
        found["updates"] += bool(made)
        return made

    def finished(self) -> None:
        finish(self)
        line = f"{_SAYS}{json.dumps({'rank': dist.get_rank() if dist.is_initialized() else 0, **found})}\n"
        os.write(sys.stderr.fileno(), line.encode())

    OptimizerReplay.step, LogReplayer.finish = stepped, finished


def told(text: str) -> dict[int, Counter[str]]:
    """Rank -> what it counted last: slices ("anchors", "gradients", "sealed", "plain") and "updates"."""
    lines = [json.loads(line) for line in re.findall(rf"{_SAYS}(\{{.*?\}})", text)]
    return {line.pop("rank"): Counter(line) for line in lines}
