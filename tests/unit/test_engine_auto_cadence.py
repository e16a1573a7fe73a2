"""``storage_every="auto"`` with a checkpoint in memory at each step: what ranks have measured decides."""

from __future__ import annotations

import time
from math import ceil, sqrt
from typing import Any

import pytest

from moe_ckpt import Memory
from moe_ckpt.core import cadence
from moe_ckpt.policies import Dense
from moe_ckpt.run.events import StepEnded
from moe_ckpt.tiers import host_memory
from tests.support.bad_disks import SlowDisk
from tests.unit.engine_parts import Life, ThreadRanks, run_threads
from tests.unit.test_engine_host_tier import come_back

RANKS, STEPS = 2, 200
PRIOR_SECS = 0.3
"""As if the run had failed once in so long before it began: Young's interval is tens of steps then."""
WRITE_SECS, ITERATION_SECS = 0.02, 0.005


@pytest.fixture(autouse=True)
def often_failing(monkeypatch):
    monkeypatch.setattr(cadence, "PRIOR_MTBF_SECS", PRIOR_SECS)
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


def one_life(tmp_path, failures: int) -> list[list[StepEnded]]:
    """What each rank was told at each step of one more life, which fails."""
    told: list[list[StepEnded]] = [[] for _ in range(RANKS)]

    def body(comm: Any) -> None:
        memory = Memory(directory=tmp_path / f"node_{comm.rank}", storage_every="auto")
        disk = SlowDisk(tmp_path / "store", WRITE_SECS)

        def note(event: Any) -> None:
            if isinstance(event, StepEnded):
                told[comm.rank].append(event)

        with Life(disk, policy=Dense(), memory=memory, comm=comm, observers=[note]) as each:
            if failures:
                come_back(each)
            assert len(each.session.run_ledger.tokens.faults) == failures
            for _ in range(STEPS):
                time.sleep(ITERATION_SECS)
                each.go()
            each.settle()

    run_threads(ThreadRanks(RANKS), body)
    return told


def young_steps(event: StepEnded, failures: int) -> int | None:
    """The interval by the formula, written out, from what the ranks had measured; None before anything is measured."""
    cost, iteration = event.measured.persist_secs, event.measured.iteration_secs or event.measured.recent_iteration_secs
    if cost is None or iteration is None:
        return None
    mtbf = (PRIOR_SECS + event.record.step * iteration) / (1 + failures)
    return max(1, ceil(max(cost, sqrt(2 * cost * mtbf)) / iteration))


def test_storage_gets_a_checkpoint_after_youngs_interval_of_what_was_measured(tmp_path):
    for rank in range(RANKS):
        (tmp_path / f"node_{rank}").mkdir()
    last, intervals_seen = None, []
    for failures in range(3):
        told = one_life(tmp_path, failures)
        went = [[event.record.step for event in events if event.record.to_storage] for events in told]
        assert went[0] == went[1], "equal on all ranks"
        begun = [event for event in told[0] if event.record.begun]
        assert len(begun) > STEPS / 2, "but where a rank was still sealing those before"
        for event in begun:
            step, steps = event.record.step, young_steps(event, failures)
            due = last is None or (steps is not None and step - last >= steps)
            assert (step in went[0]) == due, (step, last, steps, went[0])
            last = step if due else last
            if due and steps is not None:
                intervals_seen.append(steps)
    assert intervals_seen, "one was due after the first (a busy machine writes slowly: intervals are long then)"
    assert min(intervals_seen) > 3, intervals_seen
