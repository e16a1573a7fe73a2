"""The helper itself: results in order, failures reported, nobody left running."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import RanksFailed, processes, run_ranks, start_ranks, warm

SLEEP_SECS = 300


def _sum_of_ranks(rank, world_size, add):
    value = torch.tensor([rank + add])
    dist.all_reduce(value)
    return rank, value


def _fails_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("rank one says no")
    return rank


def _killed_on_one(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _sleeps(rank, world_size):
    time.sleep(SLEEP_SECS)


def _fails_or_sleeps(rank, world_size, secs):
    if rank == 0:
        raise ValueError("rank zero says no")
    time.sleep(secs)


@pytest.mark.parametrize("preload", [processes.WARM, None], ids=["forks", "fresh interpreters"])
def test_results_come_back_in_rank_order(preload):
    results = run_ranks(_sum_of_ranks, 2, 10, preload=preload)
    assert [rank for rank, _ in results] == [0, 1]
    assert all(torch.equal(value, torch.tensor([21])) for _, value in results)


def test_an_exception_is_reported_with_its_rank():
    with pytest.raises(RanksFailed, match=r"(?s)1 of 2 ranks failed.*rank 1.*rank one says no"):
        run_ranks(_fails_on_one, 2)


def test_a_killed_rank_is_an_outcome():
    first, second = start_ranks(_killed_on_one, 2)
    assert first.ok
    assert first.value == 0
    assert (second.ok, second.exitcode) == (False, -signal.SIGKILL)


def test_time_is_limited():
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="time was up"):
        run_ranks(_sleeps, 1, timeout=2)
    assert time.monotonic() - began < SLEEP_SECS / 2


def test_after_a_failure_the_others_have_a_grace():
    """In the process that ranks are forked from, too."""
    one, other = start_ranks(_fails_or_sleeps, 2, 1.0, grace=60)
    assert (one.ok, other.ok) == (False, True)
    one, other = start_ranks(_fails_or_sleeps, 2, SLEEP_SECS, grace=0.5)
    assert (one.ok, other.ok) == (False, False)
    assert "killed" in other.error


def _parent(rank, world_size):
    """Its own, its launcher's and its server's."""
    server = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    return os.getpid(), server, "tests.support.moe_models" in sys.modules


def test_ranks_are_forks_of_one_process_that_has_imported_what_they_need():
    found = [*run_ranks(_parent, 2, preload="tests.support.moe_models")]
    found += run_ranks(_parent, 1, preload="tests.support.moe_models")
    pids, servers, imported = zip(*found, strict=True)
    assert len(set(pids)) == 3
    assert len(set(servers)) == 1
    assert servers[0] != os.getpid()
    assert all(imported)


def test_an_answer_that_was_given_up_on_is_nobody_elses(monkeypatch):
    """The answer to a call that a test's time limit cut short must not be taken for that to the next one."""
    monkeypatch.setattr(warm, "MARGIN_SECS", -1e9)
    with pytest.raises(AssertionError, match="did not answer"):
        run_ranks(_parent, 1, preload="tests.support.moe_models")
    monkeypatch.undo()
    assert len(run_ranks(_parent, 2, preload="tests.support.moe_models")) == 2
