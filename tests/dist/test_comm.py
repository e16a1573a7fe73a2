"""The gloo communicator between real processes: right answers from two threads at once, and no hanging."""

from __future__ import annotations

import logging.handlers
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch.distributed as dist

from moe_ckpt.comm.communicator import GlooCommunicator, SoloCommunicator, make_communicator
from moe_ckpt.errors import PeerLostError
from tests.support import processes, start_ranks

RANKS = 3
ROUNDS = 40
SILENCE_SECS = 2.0
TIMEOUT_SECS = 4.0
PATIENCE_SECS = 120.0
"""Of calls that end before: when a peer's process has ended."""
LATE_SECS = 50.0
TORCH_LOOKS_SECS = 10.0
"""While groups are made, torch looks again for peers only so often."""
SIZES = (0, 1, 7, 1000, 300_000)


def _payload(rank: int, at: int) -> bytes:
    """Different sizes on different ranks in the same round, empty ones among them."""
    return bytes([rank + 1]) * SIZES[(rank + at) % len(SIZES)]


def _training_thread(comm: GlooCommunicator) -> list[str]:
    wrong = []
    for at in range(ROUNDS):
        counts = np.arange(6, dtype=np.int64).reshape(2, 3) * (comm.rank + 1) + at
        mine = np.array([comm.rank, -comm.rank, at * (comm.rank == 1), -(2**62)], dtype=np.int64)
        before = counts.copy(), mine.copy()
        summed, largest = comm.agree(counts, mine)
        if not np.array_equal(summed, np.arange(6).reshape(2, 3) * 6 + 3 * at):
            wrong.append(f"round {at}: sum {summed.tolist()}")
        if largest.tolist() != [2, 0, at, -(2**62)]:
            wrong.append(f"round {at}: maximum {largest.tolist()}")
        if not (np.array_equal(counts, before[0]) and np.array_equal(mine, before[1])):
            wrong.append(f"round {at}: the arguments were changed")
        nothing, largest = comm.agree(np.zeros((0, 0), dtype=np.int64), mine)
        if nothing.shape != (0, 0) or largest[0] != 2:
            wrong.append(f"round {at}: agreement without token counts")
        if comm.broadcast(_payload(comm.rank, at)) != _payload(0, at):
            wrong.append(f"round {at}: broadcast")
    return wrong


def _persist_thread(comm: GlooCommunicator) -> list[str]:
    wrong = []
    for at in range(ROUNDS):
        joined = comm.combine([_payload(comm.rank, at), b"", _payload(comm.rank, at + 1)])
        columns = [b"".join(_payload(r, of) for r in range(RANKS)) for of in (at, at + 1)]
        if joined != (None if comm.rank else [columns[0], b"", columns[1]]):
            wrong.append(f"round {at}: combine")
        # Another content than the broadcast of the same round: the lanes must not mix.
        if comm.announce(_payload(comm.rank, at + 3)) != _payload(0, at + 3):
            wrong.append(f"round {at}: announce")
    return wrong


def _at_once(comm: GlooCommunicator) -> list[str]:
    wrong: list[str] = ["the persist thread ended early"]

    def persist() -> None:
        wrong[:] = _persist_thread(comm)

    thread = threading.Thread(target=persist, daemon=True)
    thread.start()
    found = _training_thread(comm)
    thread.join(PATIENCE_SECS)
    return found + wrong


def _failure(call) -> tuple[str | None, float]:
    """(what was raised, seconds until then). Any other error than the one that callers are promised fails the rank."""
    began = time.monotonic()
    try:
        call()
    except PeerLostError as error:
        return str(error), time.monotonic() - began
    return None, time.monotonic() - began


def _warnings_of_start(shared: bool) -> tuple[GlooCommunicator, list[str]]:
    """The communicator, and what it says on the way, under a torchrun that restarts."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE=str(shared), TORCHELASTIC_MAX_RESTARTS="3")
    said = logging.handlers.BufferingHandler(1000)
    logging.getLogger("moe_ckpt").addHandler(said)
    comm = make_communicator(60.0)
    logging.getLogger("moe_ckpt").removeHandler(said)
    return comm, [record.getMessage() for record in said.buffer if record.levelno >= logging.WARNING]


def _body(rank: int, world_size: int) -> dict:
    _, said_with_own = _warnings_of_start(False)
    comm, said_with_shared = _warnings_of_start(True)
    found = {"kind": type(comm).__name__, "place": (comm.rank, comm.world_size), "wrong": _at_once(comm)}
    found["said"] = said_with_own, said_with_shared
    dist.barrier()  # so that whoever is late is so because of what is tried here
    impatient = GlooCommunicator(SILENCE_SECS)
    impatient.broadcast(b"all are here")
    found["slow writers"] = []
    for slow in (1, 0):  # each of whose writes hangs for longer than the timeout
        if rank == slow:
            time.sleep(1.5 * SILENCE_SECS)
        joined = impatient.combine([bytes([rank])])
        found["slow writers"].append((joined, impatient.announce(b"committed" if rank == 0 else b"")))
    if rank != 2:  # which is alive, but silent
        found["silent"] = _failure(lambda: impatient.agree(*(np.zeros(2, dtype=np.int64),) * 2))
    dist.barrier()
    left_alone = [GlooCommunicator(PATIENCE_SECS), GlooCommunicator(TIMEOUT_SECS)]
    for each in left_alone:
        each.broadcast(b"all are here")
        each.combine([b"here"])
    if rank == 2:
        if found["wrong"]:
            raise AssertionError(found["wrong"])
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:  # what rank 0's two threads do when a peer dies
        found["combine"] = _failure(lambda: left_alone[0].combine([b"mine"]))
        found["agree"] = _failure(lambda: left_alone[1].agree(*(np.zeros(2, dtype=np.int64),) * 2))
    else:
        left_alone[0].combine([b"mine"])
        found["agree"] = _failure(lambda: left_alone[1].agree(*(np.zeros(2, dtype=np.int64),) * 2))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(rank == 0)
    found["start"] = _failure(lambda: make_communicator(TIMEOUT_SECS))  # rank 2 never comes
    if rank == 1:  # for rank 0's word, which does not come before its process ends
        found["announce"] = _failure(lambda: left_alone[0].announce(b""))
    comm.close()
    return found


@pytest.fixture(scope="module")
def outcomes():
    """One start of the processes serves all tests; rank 2 is killed at the end."""
    return start_ranks(_body, RANKS, grace=processes.PATIENCE_SECS)


def test_two_threads_at_once_get_right_answers(outcomes):
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.error
        assert outcome.value["kind"] == "GlooCommunicator"
        assert outcome.value["place"] == (outcome.rank, RANKS)
        assert outcome.value["wrong"] == []
    assert outcomes[2].exitcode == -signal.SIGKILL, outcomes[2].error


def test_a_silent_peer_raises_when_the_timeout_has_passed(outcomes):
    error, secs = outcomes[0].value["silent"]
    assert error is not None, "agreement without a rank"
    assert secs < SILENCE_SECS + LATE_SECS, "later than the timeout"


def test_a_write_that_hangs_is_waited_for_longer_than_the_timeout(outcomes):
    parts = [bytes(range(RANKS))]
    for rank in (0, 1):
        assert outcomes[rank].value["slow writers"] == [(None if rank else parts, b"committed")] * 2


LOST = "lost the connection to a peer while"
EITHER = f"(timed out|{LOST})"
"""A neighbour of the dead one, or one that has waited for that neighbour until it gave up."""
WAITED_FOR = {
    (0, "combine"): f"rank 0 {LOST} waiting for rank ",
    (0, "agree"): f"rank 0 {EITHER} waiting for all ranks to come to the same step",
    (1, "announce"): f"rank 1 {LOST} waiting for rank 0 to say whether a checkpoint is committed",
    (1, "agree"): f"rank 1 {EITHER} waiting for all ranks to come to the same step",
    (0, "start"): "rank 0 timed out waiting for all ranks to start checkpointing",
    (1, "start"): "rank 1 timed out waiting for all ranks to start checkpointing",
}


@pytest.mark.parametrize(("rank", "call"), list(WAITED_FOR))
@pytest.mark.quick("0-combine", "1-agree", "0-start")
def test_a_dead_peer_raises_instead_of_hanging(outcomes, rank, call):
    """At once where it was the dead one's turn to speak, else when a neighbour has been silent for the timeout."""
    error, secs = outcomes[rank].value[call]
    assert error is not None
    if call in ("agree", "start"):
        assert secs < TIMEOUT_SECS + LATE_SECS + (TORCH_LOOKS_SECS if call == "start" else 0)
    if call == "combine":
        assert secs < PATIENCE_SECS, "only the timeout ended it"
    assert re.match(WAITED_FOR[rank, call], error)
    assert "first error in the other ranks' output" in error
    assert (f"timeout_secs={TIMEOUT_SECS:g}" in error) == (LOST not in error)


def test_a_start_in_a_store_shared_by_restarts_says_so(outcomes):
    """Where peers do not come, and torchrun lets restarts read what dead processes wrote, that is the first suspect."""
    with_shared, with_own = (outcomes[rank].value["start"][0] for rank in (0, 1))
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in with_shared
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in with_own


def test_a_job_whose_restarts_would_fail_is_told_at_its_first_start(outcomes):
    (own, shared), others = outcomes[0].value["said"], outcomes[1].value["said"]
    assert own == []
    assert len(shared) == 1
    assert "--standalone" in shared[0]
    assert others == ([], []), "rank 0 speaks for all"


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    comm = make_communicator(1.0)
    assert isinstance(comm, SoloCommunicator)
    counts, numbers = np.arange(4), np.array([7])
    assert [x.tolist() for x in comm.agree(counts, numbers)] == [[0, 1, 2, 3], [7]]
    assert comm.broadcast(b"x") == comm.announce(b"x") == b"x"
    assert comm.combine([b"x", b"y"]) == [b"x", b"y"]
    comm.close()
