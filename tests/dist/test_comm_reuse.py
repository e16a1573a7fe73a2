"""Sessions one after the other in one process group: no group more for each, and none that some rank cannot use."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import torch.distributed as dist

from moe_ckpt.comm.communicator import GlooCommunicator
from moe_ckpt.errors import PeerLostError
from tests.support import start_ranks

RANKS = 3
SESSIONS = 4
TIMEOUT_SECS, OTHER_SECS, IMPATIENT_SECS = 60.0, 61.0, 2.0
PATIENCE_SECS = 30.0


def _session(secs: float = TIMEOUT_SECS, *, ends: bool = True) -> GlooCommunicator:
    """Both lanes are used, and what comes is what was sent in this one."""
    comm = GlooCommunicator(secs)
    word = os.urandom(4) if comm.rank == 0 else b""
    assert len(set(comm.everyone(comm.broadcast(word)))) == 1
    comm.combine([bytes([comm.rank])])
    assert comm.announce(b"x" if comm.rank == 0 else b"") == b"x"
    if ends:
        comm.close()
    return comm


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _new_groups(call) -> int:
    before = _groups()
    call()
    return _groups() - before


def _one_after_the_other() -> tuple[int, bool]:
    """(new groups, whether nothing is left that the first of them did not leave)."""
    _session()
    before = _groups(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()
    for _ in range(SESSIONS):
        _session()
    dist.barrier()
    after = _groups(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()
    return after[0] - before[0], all(late <= early for early, late in zip(before, after, strict=True))


def _aborted(rank: int) -> None:
    """Only one rank knows that the session did not end well."""
    comm = _session(ends=False)
    if rank == 1:
        comm.abort("a check")
    comm.close()


def _half_sent(rank: int) -> None:
    """A rank sends what nobody takes any more: its thread still waits when the session is over."""
    comm = _session(ends=False)
    if rank == 2:
        threading.Thread(target=lambda: _quietly(lambda: comm.combine([b"stale"])), daemon=True).start()
        time.sleep(0.5)
    comm.close()


def _quietly(call) -> str:
    try:
        call()
    except PeerLostError as error:
        return str(error)
    return ""


def _missed(rank: int) -> str:
    comm = _session(IMPATIENT_SECS, ends=False)
    said = "" if rank == 1 else _quietly(lambda: comm.agree(*(np.zeros(1, dtype=np.int64),) * 2))
    dist.barrier()
    comm.close()
    return said


def _body(rank: int, world_size: int, store: str) -> dict:
    found: dict = {"rows": _one_after_the_other()}
    first = _session(ends=False)
    found["beside"] = _new_groups(_session)
    first.close()
    found["other timeout"] = _new_groups(lambda: _session(OTHER_SECS))
    found["timeouts differ"] = _new_groups(lambda: _session(OTHER_SECS if rank else TIMEOUT_SECS))
    for name, spoil in {"aborted": _aborted, "half sent": _half_sent}.items():
        _session()  # there is one to spoil
        spoil(rank)
        found[name] = _new_groups(_session)
    found["missed"] = _missed(rank)
    found["after it was missed"] = _new_groups(lambda: _session(IMPATIENT_SECS))
    _session()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    found["another world"] = [_new_groups(_session), _new_groups(_session)]
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    found = start_ranks(_body, RANKS, str(tmp_path_factory.mktemp("second") / "store"))
    for outcome in found:
        assert outcome.ok, outcome.error
    return [outcome.value for outcome in found]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("rows", (0, True)),
        ("beside", 1),
        ("other timeout", 1),
        ("timeouts differ", 1),
        ("aborted", 1),
        ("half sent", 1),
        ("after it was missed", 1),
        ("another world", [1, 0]),
    ],
)
@pytest.mark.quick("rows-expected0", "beside-1", "timeouts differ-1", "aborted-1", "another world-expected7")
def test_a_group_is_made_only_where_there_is_none_that_every_rank_can_use(outcomes, case, expected):
    assert [each[case] for each in outcomes] == [expected] * RANKS


def test_a_group_that_a_peer_was_missed_in_is_one_of_those(outcomes):
    assert [bool(each["missed"]) for each in outcomes] == [True, False, True]


def _alone(rank: int, world_size: int) -> dict:
    """A rank has an error of its own before the second session, and the others come without it; then all of them."""
    _session(IMPATIENT_SECS)
    missed = [_quietly(lambda: _session(IMPATIENT_SECS)) for _ in range(2) if rank]
    dist.barrier()
    found = {"missed": [bool(each) for each in missed], "met": _new_groups(lambda: _session(PATIENCE_SECS))}
    found["once more"] = _new_groups(lambda: _session(PATIENCE_SECS))
    dist.barrier()
    if rank == 0:  # is late, so that the others have given up when it comes; they meet it at their next try
        time.sleep(2 * IMPATIENT_SECS)
    for _ in range(2 if rank else 1):
        _quietly(lambda: _session(IMPATIENT_SECS))
    dist.barrier()
    while _quietly(lambda: _session(PATIENCE_SECS)):
        pass
    found["at last"] = _new_groups(lambda: _session(PATIENCE_SECS))
    dist.barrier()
    return found


def test_ranks_that_missed_one_another_meet_at_the_next_try():
    outcomes = start_ranks(_alone, RANKS, timeout=240.0)
    for rank, outcome in enumerate(outcomes):
        assert outcome.ok, outcome.error
        assert outcome.value["missed"] == [True] * (2 if rank else 0)
        assert (outcome.value["met"], outcome.value["once more"]) == (outcomes[0].value["met"], 0)
        assert outcome.value["at last"] == 0
