"""The end of a run under ``with``: finished inside or by it, and let go of whatever happens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support import run_ranks
from tests.support.megatron_gpt import Setup

WARM = "tests.support.megatron_warm"


def leave(rank: int, world_size: int, root: str) -> dict[str, Any]:
    from moe_ckpt import megatron
    from moe_ckpt.errors import SaveFailedError
    from moe_ckpt.policies import Dense
    from tests.support import megatron_gpt

    setup = Setup(layers=2, num_microbatches=1)
    built = megatron_gpt.build(setup, 1)
    store = os.path.join(root, "store")

    def attached() -> Any:
        return megatron.attach(built.chunks, built.optimizer, built.scheduler, policy=Dense(), dirpath=store)

    def train(ckpt: Any, begun: int) -> None:
        megatron_gpt.forward_backward(built, begun)
        ckpt.before_step()
        megatron_gpt.update(built)
        ckpt.after_step(begun + 1)

    with attached() as ckpt:
        train(ckpt, ckpt.resume().iteration)
        ckpt.finish()
    found: dict[str, Any] = {}
    try:
        with attached() as ckpt:
            begun = ckpt.resume().iteration
            os.rename(store, store + "_away")
            Path(store).touch()  # a file where the directory was: nothing can be written
            train(ckpt, begun)
    except SaveFailedError as error:
        found["error"] = str(error)
    modules = [module for chunk in built.chunks for module in chunk.modules()]
    found["hooks"] = sum(len(module._forward_hooks) for module in modules if "Router" in type(module).__name__)
    os.remove(store)
    os.rename(store + "_away", store)
    with attached() as ckpt:
        found["came back at"] = ckpt.resume().iteration
    return found


def test_a_run_under_with(tmp_path: Path):
    [found] = run_ranks(leave, 1, str(tmp_path), preload=WARM)
    assert "the checkpoint of step 2 was not committed" in found["error"]
    assert (found["hooks"], found["came back at"]) == (0, 1)
