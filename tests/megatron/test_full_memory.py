"""An exception on all ranks, and a loop that is started again in the same processes: no tensor is read from storage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import run_ranks
from tests.support.megatron_gpt import Setup

WARM = "tests.support.megatron_warm"
STEPS = 3
SETUPS = {
    "ep2": Setup(ep=2, layers=2, num_microbatches=1),
    "dp2-dist-opt": Setup(layers=2, num_microbatches=1, precision="bf16", grouped=True, dist_opt=True),
}


def leave_and_come_back(rank: int, world_size: int, root: str, name: str) -> dict[str, Any]:
    from moe_ckpt import megatron
    from moe_ckpt.policies import Dense
    from tests.support import megatron_gpt
    from tests.support.tensor_reads import tensor_bytes_read

    built = megatron_gpt.build(SETUPS[name], 1)

    def attached() -> Any:
        store = os.path.join(root, "store")
        parts = built.chunks, built.optimizer, built.scheduler
        return megatron.attach(*parts, policy=Dense(), dirpath=store, when_busy="wait")

    def train(ckpt: Any, begun: int) -> None:
        megatron_gpt.forward_backward(built, begun)
        ckpt.before_step()
        megatron_gpt.update(built)
        ckpt.after_step(begun + 1)

    before: dict[str, Any] = {}
    try:
        with attached() as ckpt:
            begun = ckpt.resume().iteration
            for iteration in range(begun, STEPS):
                train(ckpt, iteration)
            before = megatron_gpt.fingerprint(built)
            raise InterruptedError("somebody stops the cell of a notebook")
    except InterruptedError:
        pass
    optimizers = getattr(built.optimizer, "chained_optimizers", [built.optimizer])
    states = [state for each in optimizers for state in each.optimizer.state.values()]
    for tensor in [parameter.data for chunk in built.chunks for parameter in chunk.parameters()]:
        tensor.zero_()
    for tensor in [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]:
        tensor.zero_()
    assert megatron_gpt.fingerprint(built) != before
    with attached() as ckpt:
        with tensor_bytes_read() as read:
            begun = ckpt.resume().iteration
        after = megatron_gpt.fingerprint(built)
        train(ckpt, begun)
        ckpt.finish()
    return {"read": read, "step": begun, "equal": before == after, "count": len(before)}


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.quick("ep2")
def test_ranks_that_live_on_read_no_tensor_from_storage(tmp_path: Path, name: str):
    for found in run_ranks(leave_and_come_back, 2, str(tmp_path), name, preload=WARM):
        assert found["read"] == []
        assert found["step"] == STEPS
        assert found["equal"]
        assert found["count"] > 10
