"""All ranks die by ``kill -9``, each a node of its own: memory brings them back, and storage what memory has not."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.comm.communicator import GlooCommunicator
from tests.dist.test_host_tier import FATAL_STEP, Life, check_survivor, come_back
from tests.support.deleting import delete_tree
from tests.support.processes import run_ranks, start_ranks
from tests.support.spoiled import bytes_of, slots_of, spoil_experts


def first_life(rank: int, _: int, root: str, fsdp: bool, memory: dict) -> None:
    """Trains to the fatal step, all of whose checkpoints are committed, and dies."""
    train_and_die(Life(root, fsdp, seed=0, memory=memory), root, rank, {}, FATAL_STEP - 1)


def train_and_die(life: Life, root: str, rank: int, history: dict, steps: int, *, each_is_copied: bool = False) -> None:
    """All ranks train, and die by ``kill -9`` when peers have the copies. history: of the state of each step, is saved
    in a file. each_is_copied: they wait for that at each step."""
    for number in range(1, steps + 1):
        life.train()
        history[life.step] = life.whole()
        if each_is_copied or number == steps:
            life.session.drain(life.step)
            wait_for_copies(life)
    if rank == 0:
        torch.save(history, f"{root}/history.pt")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_copies(life: Life) -> None:
    replicator = life.session.tier.replicator
    while replicator is not None and replicator.lag_steps:
        time.sleep(0.001)


def second_life(rank: int, _: int, root: str, fsdp: bool, memory: dict) -> dict:
    life, told = come_back(root, fsdp, memory=memory)
    check_survivor(torch.load(f"{root}/history.pt", weights_only=True), told)
    life.train()
    life.session.finish(life.step, lambda: {"plain": life.state.plain()}, save_last=True)
    return {key: value for key, value in told.items() if key != "state"}


sharding = pytest.mark.parametrize("fsdp", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fsdp2", "plain"])


def killed(root: Path, fsdp: bool, ranks: int = 2, **memory: int) -> None:
    ended = start_ranks(first_life, ranks, str(root), fsdp, memory)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL] * ranks, [each.error for each in ended]


def started_again(root: Path, fsdp: bool, ranks: int = 2, **memory: int) -> dict:
    """What all ranks tell alike."""
    one, *others = run_ranks(second_life, ranks, str(root), fsdp, memory)
    assert others == [one] * (ranks - 1)
    return one


def lose(root: Path, *nodes: int) -> None:
    """With their memory. What comes in their place has an empty one."""
    for node in nodes:
        delete_tree(root / f"node_{node}")


@sharding
def test_memory_brings_back_what_storage_never_had(tmp_path: Path, fsdp: bool):
    killed(tmp_path, fsdp)
    spoil_experts(tmp_path / "store" / f"step_{FATAL_STEP - 1:08d}")
    one = started_again(tmp_path, fsdp)
    assert one["step"] == FATAL_STEP - 1
    stale = {op for op, step in one["stored"].items() if step < one["step"]}
    assert one["newer"] == stale != set(), "K is 1 on storage, and all of them in memory"
    assert one["fault"].lost_tokens == 0
    assert [path for path in tmp_path.glob("node_*/**/*") if path.is_file()] == []


@sharding
def test_a_lost_node_takes_its_experts_along(tmp_path: Path, fsdp: bool):
    """Experts of which it had a part come from storage, older; their tokens are counted."""
    killed(tmp_path, fsdp)
    lose(tmp_path, 1)
    one = started_again(tmp_path, fsdp)
    stale = {op for op, step in one["stored"].items() if step < one["step"]}
    assert one["newer"] == {op for op in stale if int(op.rpartition("/")[2]) < 3} != set()
    assert one["fault"].lost_tokens > 0


@sharding
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_comes_back_from_its_peer(tmp_path: Path, fsdp: bool, lost: int):
    """Storage has the first step only; every bit of the last one comes from the node that is left."""
    killed(tmp_path, fsdp, replicas=1, storage_every=1000)
    lose(tmp_path, lost)
    told = started_again(tmp_path, fsdp, replicas=1, storage_every=1000)
    assert told["step"] == FATAL_STEP - 1
    assert told["fault"].lost_tokens == 0
    assert [path for path in tmp_path.glob("node_*/**/*") if path.is_file()] == []


def counted_life(rank: int, ranks: int, root: str, fsdp: bool, memory: dict) -> Counter[int]:
    """The second life. Returns rank -> bytes that this one gave it: of parts that are divided, and of state and headers
    beside them. Not of step counts, which all ranks hold alike; each has written some of them and lacks the others."""
    given_to: Counter[int] = Counter()
    plain = GlooCommunicator.swap

    def counted(self, given, expected):
        assert self.world_size == ranks, "numbers are those of the world"
        for to, tensors in given.items():
            given_to[to] += sum(tensor.nbytes for tensor in tensors if tensor.nbytes > MOST_COUNTS_NBYTES)
        plain(self, given, expected)

    GlooCommunicator.swap = counted
    assert second_life(rank, ranks, root, fsdp, memory)["step"] == FATAL_STEP - 1
    return +given_to


MOST_COUNTS_NBYTES = 3 * torch.tensor(0.0).nbytes
"""Of what is given in one piece: counts that lie one after the other. What is divided has rows of 8 numbers."""


@pytest.mark.parametrize(
    ("ranks", "replicas", "lost"),
    [
        (3, 1, (1,)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(3, 1, ()), (3, 2, (0, 2)), (4, 1, (0,))]),
    ],
    ids=lambda value: str(value),
)
def test_only_nodes_that_lost_their_memory_receive_bytes(tmp_path: Path, ranks: int, replicas: int, lost: tuple):
    """Under FSDP2, where each rank has its own part of everything: as much as these parts have, and no rank else."""
    settings = {"replicas": replicas, "storage_every": 1000}
    killed(tmp_path, True, ranks, **settings)
    slots = {rank: slots_of(tmp_path / f"node_{rank}", rank)[0] for rank in lost}
    nbytes = {rank: [bytes_of(path)[2], path.with_suffix(".head").stat().st_size] for rank, path in slots.items()}
    lose(tmp_path, *lost)
    given = run_ranks(counted_life, ranks, str(tmp_path), True, settings)
    assert [given[rank] for rank in lost] == [{}] * len(lost), "who lost all has nothing to give"
    received = sum(given, Counter[int]())
    assert received.keys() == set(lost)
    for rank, (data, header) in nbytes.items():
        assert 0.9 * data <= received[rank] <= data + header, (rank, received)


def step_returned_to(rank: int, _: int, root: str, fsdp: bool, memory: dict) -> int:
    life, told = come_back(root, fsdp, memory=memory)
    life.session.close()
    return told["step"]


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp2", "plain"])
def test_as_many_nodes_as_copies_may_be_lost_and_no_more(tmp_path: Path, fsdp: bool):
    settings = {"replicas": 2, "storage_every": 1000}
    root, kept = tmp_path / "run", tmp_path / "kept"
    root.mkdir()
    killed(root, fsdp, 3, **settings)
    shutil.copytree(root, kept)
    lose(root, 0, 2)
    assert started_again(root, fsdp, 3, **settings)["step"] == FATAL_STEP - 1
    lose(kept, 0, 1, 2)
    steps = run_ranks(step_returned_to, 3, str(kept), fsdp, settings)
    assert steps == [1] * 3, "of storage"
