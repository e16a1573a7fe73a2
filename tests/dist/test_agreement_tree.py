"""Agreement between real processes: right sums for any number of ranks, and as many messages as docs/scale.md says."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
import torch.distributed as dist

from moe_ckpt.comm import communicator as comms
from moe_ckpt.comm.communicator import GlooCommunicator
from moe_ckpt.comm.lane import TreeNode
from tests.support import run_ranks

STEPS = 5


def _agree(rank: int, world_size: int) -> dict:
    sent: Counter[str] = Counter()
    send = dist.isend

    def counted(tensor, *args, **kwargs):
        sent["messages"] += 1
        sent["bytes"] += tensor.nbytes
        return send(tensor, *args, **kwargs)

    comms.dist.isend = counted
    comm = GlooCommunicator(60.0)
    found = []
    for step in range(STEPS):
        counts = np.arange(6, dtype=np.int64).reshape(2, 3) * (rank + 1) + step
        summed, largest = comm.start_agreement(counts.copy, np.array([rank, -rank, step], dtype=np.int64)).result()
        found.append((summed.tolist(), largest.tolist()))
    agreeing = dict(sent)
    sent.clear()
    gathered = comm.combine([f"of {rank};".encode(), b""])
    announced = comm.announce(b"done" if rank == 0 else b"")
    comm.close()
    return {"found": found, "agreeing": agreeing, "commit": dict(sent), "gathered": gathered, "announced": announced}


@pytest.mark.parametrize("ranks", [2, 4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (8, 16))])
def test_messages_are_those_of_the_tree(ranks):
    values = run_ranks(_agree, ranks)
    times = sum(range(1, ranks + 1))
    for rank, value in enumerate(values):
        for step, (summed, largest) in enumerate(value["found"]):
            assert summed == (np.arange(6).reshape(2, 3) * times + ranks * step).tolist()
            assert largest == [ranks - 1, 0, step]
        node = TreeNode(rank, ranks)
        numbers = 6 + 3 + 2  # and the generation, twice
        messages = len(node.children) + (node.parent is not None)
        assert value["agreeing"] == {"messages": STEPS * messages, "bytes": STEPS * messages * 8 * numbers}
        assert value["commit"]["messages"] == 2 * messages, "a length and a body each"
        assert value["gathered"] == (None if rank else [b"".join(f"of {each};".encode() for each in range(ranks)), b""])
        assert value["announced"] == b"done"
    assert max(value["agreeing"]["messages"] for value in values) == STEPS * (ranks - 1).bit_length()


def _held_back(rank: int, world_size: int) -> list[list[int]]:
    """No message of a step can leave before the next step has been computed: whoever waited for one would hang."""
    send, computed = dist.isend, threading.Event()

    def held(*args, **kwargs):
        assert computed.wait(60.0)
        return send(*args, **kwargs)

    comms.dist.isend = held
    comm = GlooCommunicator(60.0)
    found = []
    for step in range(STEPS):
        computed.clear()
        agreed = comm.start_agreement(np.full((1, 2), step, dtype=np.int64).copy, np.array([rank], dtype=np.int64))
        dist.barrier()  # the next step is computed: ranks meet at the reduction of its gradients
        assert not agreed.done()
        computed.set()
        summed, largest = agreed.result()
        found.append([*summed.reshape(-1).tolist(), *largest.tolist()])
    comm.close()
    return found


def test_messages_are_not_waited_for_while_the_next_step_is_computed():
    for found in run_ranks(_held_back, 4):
        assert found == [[4 * step, 4 * step, 3] for step in range(STEPS)]
