"""Nodes with networks of their own: cut off for less and for more than the timeout, and healed."""

from __future__ import annotations

import socket
import time

import pytest
import torch.distributed as dist

from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.peers import wire
from tests.dist.test_replication import LARGE, PATIENCE_SECS, _failure, texts, warnings_of
from tests.support.networks import Network, network_or_skip
from tests.support.processes import run_ranks
from tests.support.replicas import Rank

pytestmark = pytest.mark.slow

TIMEOUT_SECS = 6.0
NODES = 3
"""Each rank a node, with its copy on the next one."""
NEARLY = 0.75
"""Of the timeout. TCP tries again after 3 s, and then after 6.2, unless it is told not to wait for so long."""
VICTIM = 1


def _cut_off(me: int, _: int, root: str, network: Network) -> dict:
    """Training's own group stays as it is: what is cut is the way of the copies of node 1, and to it."""
    comm = make_communicator(PATIENCE_SECS)
    network.enter(me)
    rank = Rank(root, 1, 1, TIMEOUT_SECS, comm=comm)
    said, found = warnings_of(), {}

    def submit(sequence: int):
        return rank.replicator.submit(sequence, rank.seal(sequence, LARGE)[1])

    def holds(sequence: int) -> list[int]:
        return [source for source in range(NODES) if rank.holds(source, sequence, LARGE)]

    found["well"] = submit(1).result(PATIENCE_SECS)
    dist.barrier()
    _switch(network.cut)
    began = time.monotonic()
    pending = submit(2)
    while time.monotonic() < began + TIMEOUT_SECS / 3:
        time.sleep(0.1)
    found["while cut"] = pending.done(), rank.replicator.lag_steps, holds(2)
    dist.barrier()
    _switch(network.heal)
    found["healed"] = pending.result(PATIENCE_SECS)
    dist.barrier()
    found["held"], found["lag"] = holds(2), rank.replicator.lag_steps
    dist.barrier()
    _switch(network.cut)
    began, pending = time.monotonic(), submit(3)
    while time.monotonic() < began + (NEARLY if retries_are_bounded() else 1 / 3) * TIMEOUT_SECS:
        time.sleep(0.1)
    dist.barrier()
    _switch(network.heal)
    found["nearly"] = _failure(pending)[0]
    dist.barrier()
    _switch(network.cut)
    pending = submit(4)
    found["long"] = _failure(pending)[0]
    dist.barrier()
    _switch(network.heal)
    found["later"] = _failure(submit(5))[0]
    dist.barrier()
    found["lost"], found["said"] = sorted(rank.replicator.lost), texts(said)
    found["held later"] = holds(4), holds(5)
    dist.barrier()
    found["closed"] = rank.close(TIMEOUT_SECS)
    return found


def _switch(turn) -> None:
    """By one rank; the others go on when it is done."""
    if dist.get_rank() == 0:
        turn(VICTIM)
    dist.barrier()


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory) -> list[dict]:
    with network_or_skip(NODES) as network:
        root = tmp_path_factory.mktemp("cut_off")
        return run_ranks(_cut_off, NODES, str(root), network, timeout=4 * PATIENCE_SECS)


def test_a_short_partition_only_delays(cut_off):
    assert [rank["well"] for rank in cut_off] == [1, 1, 1]
    # 0 sends to the victim, the victim to 2, and 2 to 0: two of three copies cannot come through.
    assert [rank["while cut"] for rank in cut_off] == [(False, 1, [2]), (False, 1, []), (True, 0, [])]
    assert [rank["healed"] for rank in cut_off] == [1, 1, 1]
    assert [rank["held"] for rank in cut_off] == [[2], [0], [1]]
    assert [rank["lag"] for rank in cut_off] == [0, 0, 0]


def test_nearly_the_timeout_only_delays_too(cut_off):
    """Where the kernel can be told how long to wait before it tries again."""
    if not retries_are_bounded():
        pytest.skip("this kernel does not know TCP_RTO_MAX_MS (Linux 6.15); run this test on a newer one")
    assert [rank["nearly"] for rank in cut_off] == ["", "", ""]


def retries_are_bounded() -> bool:
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, wire._TCP_RTO_MAX_MS, wire._MOST_RETRY_MS)
        except OSError:
            return False
    return True


def test_a_long_partition_costs_the_copies_that_go_through_it_and_no_others(cut_off):
    assert [bool(rank["long"]) for rank in cut_off] == [True, True, False]
    assert "timed out waiting for rank 1 to take the copy of step 4: TimeoutError" in cut_off[0]["long"]
    assert [rank["lost"] for rank in cut_off] == [[1], [2], []], "for good, as what follows shows"
    assert [rank["later"] for rank in cut_off] == [rank["long"] for rank in cut_off]
    assert [rank["held later"] for rank in cut_off] == [([2], [2]), ([], []), ([], [])]
    assert all(rank["closed"] for rank in cut_off)
