"""Starts that fail, or find something odd: what they leave in memory, count there, and say."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt import Memory
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.storage import LocalStorage
from tests.support.mapped import deleted_slots
from tests.unit.engine_parts import MODEL, Life, ThreadRanks, run_threads
from tests.unit.test_engine_host_tier import come_back

STEPS = 6


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for node in ("A", "B"):
        (tmp_path / node).mkdir()
    return tmp_path


def life(root, node="A", policy=None, storage=None, **given) -> Life:
    memory = Memory(directory=root / node, storage_every_n_steps=1000)
    return Life(storage or LocalStorage(root / "store"), policy=policy or Dense(), memory=memory, **given)


def of_four(root, comm, nodes) -> Life:
    """Two ranks to a node."""
    return life(root, nodes[comm.rank // 2], comm=comm, local_ranks=2)


def test_a_start_that_fails_before_its_first_step_costs_no_other_rank_its_memory(root):
    """Nodes are numbered the other way round then, so that one rank of each node has what two ranks left."""

    def first(comm):
        with of_four(root, comm, "AB") as one:
            one.go(STEPS, settle=True)

    run_threads(ThreadRanks(4), first)
    turn = [threading.Event() for _ in range(5)]
    turn[0].set()

    def second(comm):
        one = of_four(root, comm, "BA")
        one.session.open()
        come_back(one)
        comm.everyone(b"")
        assert turn[comm.rank].wait(60)
        one.session.close(5.0)
        turn[comm.rank + 1].set()

    run_threads(ThreadRanks(4), second)
    assert len(list(root.rglob("*.head"))) == 4, "those of the step that was resumed from"
    found = []

    def third(comm):
        with of_four(root, comm, "AB") as one:
            found.append(come_back(one)[0].manifest.step)

    run_threads(ThreadRanks(4), third)
    assert found == [STEPS] * 4


def test_what_was_written_to_storage_is_held_no_longer(root):
    """The first checkpoint is whole, and those after it are not: its slot fits none of them, and is removed."""
    larger = {name: (*shape[:-1], 2000 * shape[-1]) for name, shape in MODEL.parameters.items() if name.endswith(".w")}
    with life(root, policy=MoC(k=1), model=replace(MODEL, parameters={**MODEL.parameters, **larger})) as one:
        one.go(30, settle=True)
        gc.collect()
        assert not deleted_slots(root)
