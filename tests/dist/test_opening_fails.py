"""A rank dies, or fails, while ranks open their memory: the others let go of what they had taken over by then."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import torch.distributed as dist

from moe_ckpt.errors import PeerLostError, StoreError
from moe_ckpt.memory.directory import holder_of, rank_directories
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.policies import Dense
from moe_ckpt.tiers import host_memory
from tests.dist.test_host_tier import Life, join
from tests.support import start_ranks

MEMORY = {"storage_every": 100}
STEPS = 4


def _held(root: str, node: int) -> list[str]:
    """Directories of a node that a process holds."""
    runs = Path(root, f"node_{node}").glob("moe_ckpt-*/*")
    return [path.parent.name for run in runs for _, _, path in rank_directories(run) if holder_of(path)]


def _killed_there(process: int, _: int, root: str) -> tuple:
    """The second session of two processes, in which one is killed; the other goes on alone."""
    life = Life(root, False, 0, MEMORY, Dense(every_n_steps=1))
    for _step in range(STEPS):
        life.train()
    life.session.drain(life.step)
    dist.barrier()
    life.session.close(5.0)
    join(root, "second", process, 2)
    if process == 1:
        MemoryFiles.take_left = lambda self, same_rank: os.kill(os.getpid(), signal.SIGKILL)
    try:
        Life(root, False, 1, MEMORY, Dense(every_n_steps=1))
        raised = False
    except PeerLostError:
        raised = True
    held = _held(root, process)
    join(root, "third", 0, 1)
    last = Life(root, False, 2, MEMORY, Dense(every_n_steps=1))
    found = [each.header.step for each in last.session.tier.left_slots.slots]
    last.session.close(1.0)
    return raised, held, found[:1]


def test_a_peer_that_dies_while_slots_are_taken_over_costs_the_others_none(tmp_path):
    survivor, killed = start_ranks(_killed_there, 2, str(tmp_path), grace=120.0)
    assert (survivor.error, survivor.value, killed.exitcode) == (None, (True, [], [STEPS]), -signal.SIGKILL)


def _fails_late(rank: int, _: int, root: str, name: str, error: type[Exception]) -> tuple:
    def fail(*args, **kwargs):
        raise error("a check")

    if rank == 0:
        setattr(host_memory, name, fail)
    try:
        life = Life(root, False, 0, {"replicas": 1}, Dense(every_n_steps=1))
        life.session.close(0.1)
        raised = None
    except Exception as problem:  # told
        raised = type(problem)
    alive = [each.name for each in threading.enumerate() if each.name.startswith("moe_ckpt-replicate")]
    held = _held(root, rank)
    dist.barrier()
    return raised, alive, held


def test_an_error_behind_the_opening_of_copies_leaves_no_thread(tmp_path):
    first, _ = start_ranks(_fails_late, 2, str(tmp_path), "MemoryTier", RuntimeError)
    assert (first.error, first.value) == (None, (RuntimeError, [], []))


def test_a_directory_that_is_gone_is_told_to_all_ranks_before_copies_are_opened(tmp_path):
    for outcome in start_ranks(_fails_late, 2, str(tmp_path), "node_of", FileNotFoundError):
        assert outcome.error is None
        raised, alive, held = outcome.value
        assert issubclass(raised, StoreError)
        assert (alive, held) == ([], [])
