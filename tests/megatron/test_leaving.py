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


def end_stale(rank: int, world_size: int, root: str) -> list[tuple[set[int], int, int]]:
    from moe_ckpt import megatron
    from moe_ckpt.policies import MoC
    from moe_ckpt.reading.reader import StoreReader
    from moe_ckpt.storage import open_storage
    from tests.support import megatron_gpt

    built = megatron_gpt.build(Setup(layers=2, num_microbatches=1), 1)
    found = []
    for steps, save_last in ((3, False), (0, True), (0, True)):
        parts = built.chunks, built.optimizer, built.scheduler
        with megatron.attach(*parts, policy=MoC(k=1), dirpath=root, save_last=save_last, when_busy="wait") as ckpt:
            begun = ckpt.resume().iteration
            for iteration in range(begun, begun + steps):
                megatron_gpt.forward_backward(built, iteration)
                ckpt.before_step()
                megatron_gpt.update(built)
                ckpt.after_step(iteration + 1)
        reader = StoreReader(open_storage(root))
        newest = reader.manifest(max(reader.directories()))
        steps_of_operators = {record.step for record in newest.operators.values()}
        found.append((steps_of_operators, newest.generation, len(newest.tokens["faults"])))
    return found


def test_a_loop_that_has_nothing_left_to_do_saves_stale_experts_with_what_they_lost(tmp_path: Path):
    [(partial, whole, again)] = run_ranks(end_stale, 1, str(tmp_path / "store"), preload=WARM)
    assert partial == ({1, 2, 3}, 0, 0)
    assert whole == ({3}, 1, 1)
    assert again == whole
