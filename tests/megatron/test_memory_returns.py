"""Megatron: a rank that stood still for longer than the timeout goes on beside the start that has taken its place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from tests.megatron.exactness import LIFE_SECS, WARM, Case, life_of, require_killed, start_life
from tests.megatron.test_memory import newest
from tests.megatron.test_memory_phases import DATA, PIPELINE, ends_alike, lose
from tests.support.megatron_run import Journal, live
from tests.support.processes import Outcome, start_ranks
from tests.support.waiting import retry_until

pytestmark = pytest.mark.slow

LAYOUTS = {"pp2-ep2": PIPELINE, "ep2-dp2": DATA}
AWAY, OLD = 1, 2
"""The node that is taken for dead, and its rank that is not."""
TIMEOUT_SECS = 4.0
KILLED_AT, STEPS = 20, 24


def note_pid(directory: str) -> None:
    Path(directory, f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))


@dataclass
class Old:
    """The rank that stands still: its process, and how the ranks of its start ended once that is known."""

    pid: int
    outcomes: list[Outcome]


def iterations(case: Case, directory: Path, rank: int, life: int) -> int:
    """That a rank has computed in one life."""
    lines = Journal(life_of(case, directory).journal, rank).lines()
    begins = [at for at, line in enumerate(lines) if line.get("life") == life]
    return sum("iteration" in line for line in lines[begins[0] :]) if begins else 0


@contextmanager
def standing_still(case: Case, directory: Path) -> Iterator[Old]:
    """The first start, of which one rank stands still in mid-training, for longer than its timeout; all others died."""
    life = replace(life_of(case, directory), sabotage=partial(note_pid, str(directory)), survives=True)
    life = replace(life, options={**life.options, "timeout_secs": TIMEOUT_SECS})
    old = Old(0, [])

    def run() -> None:
        old.outcomes += start_ranks(live, case.ranks, life, timeout=LIFE_SECS, grace=LIFE_SECS, preload=WARM)

    running = threading.Thread(target=run)
    running.start()
    try:
        assert retry_until(lambda: iterations(case, directory, 0, 0) > 5, LIFE_SECS)
        pids = [int((directory / f"pid_{rank}").read_text()) for rank in range(case.ranks)]
        old.pid = pids[OLD]
        os.kill(old.pid, signal.SIGSTOP)
        for rank, pid in enumerate(pids):
            if rank != OLD:
                os.kill(pid, signal.SIGKILL)
        time.sleep(TIMEOUT_SECS)
        yield old
        running.join(LIFE_SECS)
    finally:
        if running.is_alive():
            os.kill(old.pid, signal.SIGKILL)
            running.join()


def continue_in(case: Case, directory: Path, life: int, old: Old) -> None:
    """It goes on, once that life is in the middle of training."""
    retry_until(lambda: iterations(case, directory, 0, life) > 3, LIFE_SECS)
    os.kill(old.pid, signal.SIGCONT)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("spare", [True, False], ids=["a spare in its place", "on the same node"])
def test_a_rank_of_an_earlier_start_that_goes_on_does_no_harm(spare, layout, tmp_path):
    """It ends by an error, and nothing of it comes into the run: not when its node is the one that the next start
    finds, nor when it held its slots while the new start was on the same node."""
    case = replace(layout, steps=STEPS, kills=((OLD, KILLED_AT, "train"),) * 2)
    node = tmp_path / "memory" / f"node_{AWAY}"
    with standing_still(case, tmp_path) as old:
        stored = int(newest(tmp_path).split("_")[1])
        if spare:
            node.rename(node.with_suffix(".away"))
        second = replace(life_of(case, tmp_path), kill=case.kills[1], seed=2, number=1)
        back = threading.Thread(target=continue_in, args=(case, tmp_path, 1, old))
        back.start()
        outcomes = start_life(case, second)
        back.join()
        require_killed(outcomes, case.kills[1])
    ended = old.outcomes[OLD]
    assert not ended.ok
    assert ended.exitcode == 1, (ended.exitcode, ended.error)
    if spare:
        lose(tmp_path, AWAY)
        node.with_suffix(".away").rename(node)
    first, last = ends_alike(case, tmp_path).resumed
    assert first > stored, "what the rank held came from its peer"
    assert last >= KILLED_AT - 3, "of the start that went on"
