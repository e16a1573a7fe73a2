"""The plain state of the newest steps is sealed in the background."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from moe_ckpt.core.step import Step
from moe_ckpt.format.sealed import unseal
from moe_ckpt.format.slot import SlotHeader, decode_slot
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.slices.snapshot import side_tensors
from moe_ckpt.survivors.newest_step import StateKeeper
from tests.support.waiting import retry_until


def of_step(number: int, seed: int) -> tuple[Any, Any]:
    """Plain state of a rank, random numbers included."""
    generator = torch.Generator().manual_seed(seed)
    return side_tensors({"step": number, "rng": generator.get_state()}, 0)


def parting(step: int) -> Step:
    return Step("a-run", "a-life", 1, step, step, parting=True)


TOKENS = Deferred(lambda: StepTokens(np.array([[3, 4]])))


@pytest.fixture
def keeper(tmp_path):
    files = MemoryFiles(str(tmp_path), "a-run", 1, "a-life", 0, "a-store")
    keeper = StateKeeper(files, 2)
    yield keeper
    keeper.close(10.0)


def sealed(keeper: StateKeeper) -> dict[int, SlotHeader]:
    """Step -> header, once the thread has done all."""
    keeper.close(10.0)
    headers = [decode_slot(path.read_bytes(), str(path)) for path in keeper._files.path.glob("*.head")]
    assert {header.only for header in headers} <= {"state"}
    return {header.step: header for header in headers}


@pytest.mark.parametrize("steps", range(1, 5))
def test_the_two_newest_steps_are_there(keeper, steps):
    for step in range(1, steps + 1):
        keeper.keep(parting(step), 0, of_step(step, step), TOKENS)
    headers = sealed(keeper)
    assert headers.keys() == {step for step in (steps - 1, steps) if step}
    for step, header in headers.items():
        assert header.facts.counted.tolist() == [[3, 4]]
        assert unseal(header.state, "")["state"]["step"] == step


def test_a_thread_that_is_slower_than_training_takes_no_more_memory_with_each_step(keeper):
    """Such as one that writes a moving average of all weights, or on a file system that is no tmpfs."""
    begun, goes_on = threading.Event(), threading.Event()
    busy = Deferred(lambda: (begun.set(), goes_on.wait(60), StepTokens(np.array([[3, 4]])))[2])
    keeper.keep(parting(1), 0, of_step(1, 1), busy)
    assert begun.wait(60)
    waiting = []
    for step in range(2, 20):
        plain = of_step(step, step)
        waiting.append(weakref.ref(plain[1][0][1]))
        keeper.keep(parting(step), 0, plain, TOKENS)
        del plain
    gc.collect()
    assert sum(tensor() is not None for tensor in waiting) == 2
    goes_on.set()
    assert sealed(keeper).keys() == {18, 19}, "the newest ones"


def test_the_end_of_training_does_not_wait_for_a_device_that_gives_nothing(keeper, caplog):
    gone = threading.Event()
    keeper.keep(parting(1), 0, of_step(1, 1), Deferred(lambda: (gone.wait(60), StepTokens(np.array([[3, 4]])))[1]))
    keeper.close(0.1)
    assert "still not in memory" in caplog.text
    gone.set()


def test_what_cannot_be_sealed_is_said_once_and_the_next_step_is_sealed(keeper, caplog):
    def nothing() -> StepTokens:
        raise RuntimeError("the device is gone")

    for step in (1, 2):
        keeper.keep(parting(step), 0, of_step(step, 1), Deferred(nothing))
    assert retry_until(lambda: caplog.records, 60.0)
    keeper.keep(parting(3), 0, of_step(3, 1), TOKENS)
    assert sealed(keeper).keys() == {3}
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["memory does not hold the plain state of step 1: RuntimeError: the device is gone"]
