"""Under Megatron, what one rank alone holds becomes NaN: the step before it is the newest that a start takes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.megatron.exactness import (
    Case,
    finish,
    life_of,
    require_equal,
    require_killed,
    start_life,
    uninterrupted,
)
from tests.support.megatron_gpt import Setup

SPOILED = 4
KILL = (0, 7, "train")


def spoils() -> None:
    """Each of rank 1's updates of that iteration writes NaN into a moment."""
    updates = Counter[int]()

    def spoil(optimizer: torch.optim.Optimizer, *_: object) -> None:
        updates[id(optimizer)] += 1
        if updates[id(optimizer)] == SPOILED and os.environ["RANK"] == "1":
            next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] = float("nan")

    register_optimizer_step_post_hook(spoil)


@pytest.mark.parametrize("memory", [False, True], ids=["storage", "memory"])
def test_one_rank_alone_holds_what_is_not_finite(memory, tmp_path):
    setup = Setup(ep=2, num_microbatches=2, precision="bf16", dist_opt=True)
    case = Case(setup, ("Dense", {"every_n_steps": 1}), (KILL,), ranks=2, steps=8, memory=memory)
    require_killed(start_life(case, replace(life_of(case, tmp_path), kill=KILL, seed=1, sabotage=spoils)), KILL)
    reader = StoreReader(open_storage(str(tmp_path / "store")))
    stored = [reader.manifest(directory) for directory in reader.directories()]
    assert {each.step: bool(each.not_finite) for each in stored}[SPOILED - 1] is False
    assert stored[0].step > SPOILED
    assert stored[0].not_finite
    ended = finish(case, tmp_path)
    assert ended.resumed == [SPOILED - 1]
    assert "it is passed over" in ended.said
    require_equal(uninterrupted(case.setup, case.ranks, case.steps), ended.results)
