"""Lives that fail and start again, many times in one process: nothing piles up in memory, descriptors or threads."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from moe_ckpt import Memory
from moe_ckpt.policies import Dense
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers import host_memory
from tests.support.spoiled import files_of_slots
from tests.unit.engine_parts import Life, ThreadRanks, run_threads
from tests.unit.test_engine_host_tier import come_back


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_kib() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


@pytest.mark.parametrize("rounds", [20, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.quick("1-20")
def test_crashes_leave_nothing_behind(tmp_path, caplog, rounds, replicas):
    """Two ranks, each a node. Each life takes a few checkpoints and fails."""
    nodes = [tmp_path / "node_0", tmp_path / "node_1"]
    for node in nodes:
        node.mkdir()

    def one(number):
        def body(comm):
            memory = Memory(directory=nodes[comm.rank], storage_every=1000, replicas=replicas)
            with Life(LocalStorage(tmp_path / "store"), policy=Dense(), memory=memory, comm=comm) as life:
                if number:
                    come_back(life)
                life.go(3, settle=True)

        run_threads(ThreadRanks(2), body)

    def state():
        caplog.clear()  # records keep errors, those their frames, and those the bytes that were sent
        gc.collect()
        data = [path for node in nodes for path in files_of_slots(node)]
        return len(data), open_files(), threading.active_count()

    found = []
    for number in range(rounds):
        one(number)
        if number == rounds // 2:
            resident = resident_kib()
        found.append(state())
    settled = found[rounds // 4 :]
    for now, what in zip(zip(*settled, strict=True), ("slots", "descriptors", "threads"), strict=True):
        assert max(now[len(now) // 2 :]) <= max(now[: len(now) // 2]) + 4, f"{what} grow: {now}"
    assert resident_kib() < resident + 20_000
    host_memory.release_host_memory()
    assert not [path for node in nodes for path in files_of_slots(node)]
