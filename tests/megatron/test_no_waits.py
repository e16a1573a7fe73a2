"""Nothing on the training thread waits for the device: real iterations of Megatron-Core on a GPU that is acted."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from moe_ckpt.gradient_log import capture
from moe_ckpt.memory.options import Memory
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.run.agreement import Deferred
from moe_ckpt.slices import copying
from moe_ckpt.storage import LocalStorage
from tests.support import megatron_gpt, run_ranks
from tests.support.acted_gpu import ActedGPU
from tests.support.megatron_gpt import Setup

WARM = "tests.support.megatron_warm"
ITERATIONS = 5
DENSE = ("Dense", {"every_n_steps": 1})
LOG = ("GradientLog", {"window": 2})
ONCE = ("begin_training", "finish", "attach")
"""Calls that may wait: nothing is computed then."""


@dataclass(frozen=True)
class Case:
    setup: Setup
    policy: tuple[str, dict[str, Any]]
    broken: str = ""


def break_on_purpose(what: str) -> None:
    """In the process of one rank."""
    if what == "counts":
        from moe_ckpt.megatron import routing

        routing.counts_on_host = take_as_before
    elif what == "gradients":
        capture.ConsumedGradients.changed = read_by_value
    elif what == "join":
        copying.Copy.join = joined_by_its_thread


def take_as_before(tables: dict[int, torch.Tensor], shape: tuple[int, int]) -> Deferred[np.ndarray]:
    joined = torch.cat([table[:-1] for table in tables.values()]).cpu().numpy()
    return Deferred(lambda: joined.reshape(shape).copy())


def read_by_value(consumed: capture.ConsumedGradients) -> tuple[str, ...]:
    return tuple(u.name for u, each in zip(consumed.units, consumed.gradients, strict=True) if each.sum().item() > 1e9)


def joined_by_its_thread(copy: copying.Copy) -> None:
    JOIN(copy)
    if (event := copy.issued.result()) is not None:
        event.synchronize()


JOIN = copying.Copy.join


def train(case: Case, store: str) -> None:
    import moe_ckpt.policies
    from moe_ckpt import megatron

    built = megatron_gpt.build(case.setup, 1)
    gpu = ActedGPU.active
    if gpu is not None:
        for chunk in built.chunks:
            for tensor in (*chunk.parameters(), *chunk.module.buffers()):
                gpu.take(tensor)
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                gpu.take(buffer.grad_data)
    name, arguments = case.policy
    place = os.path.join(store, "memory")
    os.makedirs(place)
    with mock.patch.object(torch.cuda, "is_available", return_value=gpu is not None):
        ckpt = megatron.attach(
            built.chunks,
            built.optimizer,
            built.scheduler,
            policy=getattr(moe_ckpt.policies, name)(**arguments),
            dirpath=store,
            when_busy="wait",
            memory=Memory(place, storage_every=1000) if case.policy == LOG else None,
        )
    ckpt.resume()
    for iteration in range(ITERATIONS):
        megatron_gpt.train_step(built, iteration)
        ckpt.after_step(iteration + 1, consumed_samples=iteration)
    ckpt.finish()


def both(rank: int, world_size: int, case: Case, root: str) -> dict[str, Any]:
    """The same run on a CPU and on the acted GPU: who waited, and what manifests say of tokens."""
    break_on_purpose(case.broken)
    train(case, os.path.join(root, "cpu"))
    with ActedGPU() as gpu:
        train(case, os.path.join(root, "gpu"))
    waits = [wait for wait in gpu.waits if not any(led.endswith(ONCE) for led in wait[1])]
    return {"waits": waits, "departures": gpu.departures, "joins": gpu.joins}


def tokens(store: Path) -> dict[str, Any]:
    reader = StoreReader(LocalStorage(store))
    return {name: reader.manifest(name).tokens["applied"] for name in reader.directories()}


SMALL = Setup(layers=2, num_microbatches=1)


@pytest.mark.parametrize(
    "case",
    [
        Case(Setup(layers=2, num_microbatches=1, capacity_factor=0.5), DENSE),
        Case(Setup(layers=2, precision="fp16", dist_opt=True, expert_bias=True), DENSE),
        Case(SMALL, ("MoEvement", {"window": 2, "order": "soft_count"})),
        Case(SMALL, LOG),
        Case(Setup(layers=2, precision="fp16", dist_opt=True, expert_bias=True), LOG),
        Case(Setup(layers=2, precision="bf16"), LOG),
    ],
    ids=["dropping", "fp16", "windows", "log", "log-fp16-sharded", "log-bf16"],
)
@pytest.mark.quick("log", "windows", "fp16")
def test_no_iteration_waits_for_the_device(tmp_path, case):
    [found] = run_ranks(both, 1, case, str(tmp_path), preload=WARM)
    assert found["waits"] == []
    counts_alone = case.policy == LOG  # all else is copied beside training
    assert found["departures"] >= ITERATIONS + (not counts_alone), "nothing left the device, so this shows nothing"
    assert found["joins"] >= ITERATIONS, "nothing was copied beside training, so this shows nothing"
    assert tokens(tmp_path / "gpu") == tokens(tmp_path / "cpu")
    assert sum(map(sum, tokens(tmp_path / "gpu").popitem()[1])) > 0


@pytest.mark.parametrize(
    ("case", "what", "led"),
    [
        (Case(SMALL, DENSE, broken="counts"), "cpu", "megatron.routing.take"),
        (Case(SMALL, LOG, broken="gradients"), "item", "session.session.after_update"),
        (Case(SMALL, LOG, broken="join"), "Event.synchronize", "commit.pipeline.join"),
    ],
    ids=["counts", "gradients", "join"],
)
@pytest.mark.quick("gradients")
def test_whoever_waits_is_named(tmp_path, case, what, led):
    [found] = run_ranks(both, 1, case, str(tmp_path), preload=WARM)
    assert {wait for wait, _ in found["waits"]} - {"_local_scalar_dense"} == {what}
    assert all(led in by for _, by in found["waits"])
