"""Communicators that are given up, and messages of another life of the run."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch.distributed as dist

from moe_ckpt.comm.communicator import GlooCommunicator
from moe_ckpt.errors import PeerLostError, StoreError
from tests.support import start_ranks

TIMEOUT_SECS = 120.0
SOON_SECS = 60.0
IMPATIENT_SECS = 2.0


def _numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _failure(call) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        call()
    except (PeerLostError, StoreError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _in_thread(call) -> tuple[threading.Thread, list]:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(_failure(call)), daemon=True)
    thread.start()
    return thread, found


def _given_up(rank: int, world_size: int) -> dict:
    """Rank 1 is silent, and rank 0 waits for it in three ways."""
    comms = [GlooCommunicator(secs) for secs in (TIMEOUT_SECS, TIMEOUT_SECS, IMPATIENT_SECS)]
    for comm in comms:
        comm.broadcast(b"all are here")
    found = {}
    if rank == 0:
        aborted, interrupted, impatient = comms
        agreeing = _in_thread(lambda: aborted.agree(_numbers(1), _numbers(1)))
        combining = _in_thread(lambda: aborted.combine([b"mine"]))
        time.sleep(0.5)
        aborted.abort("the operator said so")
        for name, (thread, failure) in {"agree": agreeing, "combine": combining}.items():
            thread.join(SOON_SECS)
            found[name] = failure
        found["later"] = [_failure(lambda: aborted.announce(b""))]
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        found["interrupt"] = [_failure(lambda: interrupted.agree(_numbers(1), _numbers(1)))]
        waiting = _in_thread(lambda: impatient.combine([b"mine"]))
        found["missed"] = [_failure(lambda: impatient.agree(_numbers(1), _numbers(1)))]
        waiting[0].join(SOON_SECS)
        found["persist"] = waiting[1]
    dist.barrier()
    if rank == 1:  # so that no thread of rank 0 waits when its process ends: gloo cannot be told to give up
        for comm in comms[:2]:
            comm.agree(_numbers(1), _numbers(1))
            comm.combine([b"late"])
    else:
        comms[1].combine([b"late"])
        for comm in comms:
            comm.close()
    return found


def _generations(rank: int, world_size: int) -> dict:
    found = {}
    for name, call in {
        "agree": lambda comm: comm.agree(_numbers(1), _numbers(1)),
        "broadcast": lambda comm: comm.broadcast(b"", 1),
        "combine": lambda comm: comm.combine([b""]),
    }.items():
        comm = GlooCommunicator(TIMEOUT_SECS)
        comm.enter(3)
        call(comm)
        comm.enter(3 if rank else 4)
        found[name] = _failure(lambda call=call, comm=comm: call(comm))
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def given_up():
    [first, _] = start_ranks(_given_up, 2)
    assert first.ok, first.error
    return first.value


@pytest.mark.parametrize("way", ["agree", "combine", "later"])
@pytest.mark.quick("agree", "later")
def test_whoever_waits_for_peers_is_free_when_the_communicator_is_given_up(given_up, way):
    [(kind, said, secs)] = given_up[way]
    assert kind == "PeerLostError"
    assert "the operator said so" in said
    assert secs < SOON_SECS


def test_an_interrupt_ends_a_wait_for_peers(given_up):
    [(kind, _, secs)] = given_up["interrupt"]
    assert kind == "KeyboardInterrupt"
    assert secs < SOON_SECS


def test_a_peer_that_training_misses_is_lost_to_the_persist_thread_too(given_up):
    assert given_up["missed"][0][0] == "PeerLostError"
    [(kind, said, _)] = given_up["persist"]
    assert kind == "PeerLostError"
    assert "to come to the same step" in said


def test_messages_of_another_life_of_the_run_are_refused():
    outcomes = start_ranks(_generations, 2)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
    first, second = (outcome.value for outcome in outcomes)
    for found in (first["agree"], second["agree"], first["broadcast"], first["combine"]):
        assert found[0] == "StoreError"
    assert "rank 1 is of generation 3 of the run, and received a message of generations 3 to 4" in second["agree"][1]
    assert "rank 0 is of generation 4 of the run, and received a message of generation 3" in first["combine"][1]
    assert first["agree"][2] < SOON_SECS
