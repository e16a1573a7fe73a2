"""A session ends before storage has taken its checkpoint: nothing waits for ever, and the store is free afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_ckpt.comm.communicator import GlooCommunicator, SoloCommunicator
from moe_ckpt.errors import PeerLostError
from moe_ckpt.policies import Dense
from moe_ckpt.storage import LocalStorage
from tests.support import start_ranks
from tests.unit.engine_parts import GatedStorage, Life, manifests

SECS = 60.0
CLOSING_SECS = 0.5
NAMES = ("moe_ckpt-persist", "moe_ckpt-messages")


def _ended(secs: float = 20.0) -> list[str]:
    """Threads of ours that still run after so long."""
    until = time.monotonic() + secs
    while True:
        alive = [thread.name for thread in threading.enumerate() if thread.name in NAMES]
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.02)


class Slow(GatedStorage):
    """Says when a file of a checkpoint waits at the gate."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached = threading.Event()

    def write(self, path, chunks):
        if path.startswith("step_"):
            self.reached.set()
        return super().write(path, chunks)


def _life(root: str, comm, *, gated: bool) -> Life:
    """A session, with a checkpoint that storage holds up on this rank."""
    storage = Slow(Path(root, "store")) if gated else LocalStorage(Path(root, "store"))
    life = Life(storage, comm=comm, policy=Dense(every_n_steps=1), timeout_secs=SECS)
    life.session.open()
    if gated:
        storage.gate.clear()
    life.go(1)
    assert not gated or storage.reached.wait(SECS)
    return life


def _opens_again(root: str, comm) -> str:
    again = Life(LocalStorage(Path(root, "store")), comm=comm, policy=Dense(every_n_steps=1), timeout_secs=SECS)
    again.session.open()
    again.go(1, settle=True)
    again.session.close(SECS)
    return "opened"


def _slow(rank: int, world: int, root: str, slow: tuple[int, ...]) -> tuple:
    life = _life(root, GlooCommunicator(SECS), gated=rank in slow)
    dist.barrier()
    life.session.close(CLOSING_SECS)
    dist.barrier()  # storage answers when all have closed
    waits = _ended() if rank not in slow else []
    if rank in slow:
        life.storage.gate.set()
    alive = _ended()
    dist.barrier()
    return waits, alive, _opens_again(root, GlooCommunicator(SECS))


@pytest.mark.parametrize("slow", [(0, 1), (0,), (1,)])
@pytest.mark.quick("slow0", "slow2")
def test_threads_end_and_the_next_session_in_the_processes_finds_the_store_free(tmp_path, slow):
    for outcome in start_ranks(_slow, 2, str(tmp_path), slow):
        assert outcome.ok, outcome.error
        assert outcome.value == ([], [], "opened")


def _killed(rank: int, world: int, root: str) -> str:
    life = _life(root, GlooCommunicator(SECS), gated=True)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    life.session.close(CLOSING_SECS)
    dist.destroy_process_group()
    life.storage.gate.set()
    assert not _ended()
    return _opens_again(root, SoloCommunicator())


def test_a_rank_whose_peer_was_killed_meanwhile_goes_on_alone_in_its_process(tmp_path):
    survivor, killed = start_ranks(_killed, 2, str(tmp_path), grace=SECS)
    assert (killed.exitcode, survivor.error, survivor.value) == (-signal.SIGKILL, None, "opened")


def _late(rank: int, world: int) -> list[str]:
    """Rank 0 waits in a collective that the other never joins: at the end that has closed, or wants it too late."""
    comm, said = GlooCommunicator(SECS), []

    def combine() -> None:
        try:
            comm.combine([b"column"])
        except PeerLostError as error:
            said.append(str(error))

    waiting = threading.Thread(target=combine)
    if rank == 0:
        waiting.start()
        time.sleep(0.2)
    comm.close()
    if rank == 1:
        waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    assert not _ended()
    dist.barrier()
    return said


def test_what_a_closed_lane_cannot_do_any_more_fails(tmp_path):
    for outcome in start_ranks(_late, 2):
        assert outcome.ok, outcome.error
        [said] = outcome.value
        assert "this rank's session has ended" in said


def test_one_rank_alone_commits_what_was_being_written(tmp_path):
    life = _life(str(tmp_path), SoloCommunicator(), gated=True)
    life.session.close(CLOSING_SECS)
    assert manifests(tmp_path / "store") == []
    life.storage.gate.set()
    assert not _ended()
    assert [found.step for found in manifests(tmp_path / "store")] == [1]
    assert _opens_again(str(tmp_path), SoloCommunicator()) == "opened"
