"""Lightning on two nodes with copies of each other: one stands still (SIGSTOP) while a copy is on its way to it.

For less than the timeout, or for more; then training goes on, and a node is lost.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    LIFE_SECS,
    assert_same_run,
    assert_store_sound,
    events,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    shards_read,
    started_ranks,
)
from tests.integration.pauses import is_stopped, steps_of
from tests.integration.test_memory_kills import in_memory, left
from tests.integration.test_memory_layouts import CASES, LAYOUTS, PAIRED, lose, under_way
from tests.integration.test_memory_rarely_stored import RARELY, restored
from tests.support.waiting import retry_until
from tests.support.warm import Started

pytestmark = pytest.mark.slow

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
paused_ranks = pytest.mark.parametrize("paused", [0, 1], ids=["rank 0", "rank 1"])
lost_nodes = pytest.mark.parametrize("lost", [None, "the other", "the paused"])
AT, MORE = 9, 8
"""The pass in which the rank stands still, and the steps that all make afterwards."""
COPY_SECS = 1.0
"""That ranks take to copy a snapshot: one that has ended a step stands still long before its peer has sealed it."""
TIMEOUT_SECS, SHORT_SECS = 4.0, 1.5
MISSED = r"PeerLostError: rank {} .{{,80}}waiting for all ranks to come to the same step"
"""Time has run out, or the peer has ended since."""


def run_of(layout: Run, place: Path, **callback: float) -> Run:  # noqa: F811
    return in_memory(replace(layout, to_storage=RARELY, samples=320, watched=True, callback=callback), place)


def steps_at(run: Run, node: int, rank: int) -> list[int]:
    """Of the sealed slots on a node that hold what a rank saved."""
    return steps_of(Path(run.memory, f"node_{node}"), rank)


def reached(run: Run) -> int:
    return max((line["step"] for line in events(run) if line["event"] == "batch"), default=0)


@contextmanager
def standing_still(run: Run, how: str, paused: int) -> Iterator[list[Started]]:
    """All ranks, of which one stands still, once the other one has sealed the newest step, whose copy is on its way."""
    other = 1 - paused
    slow = replace(run, slow_copy_secs=COPY_SECS)
    with started_ranks(slow, lambda rank: (how, AT) if rank == paused else None) as processes:
        assert retry_until(lambda: is_stopped(processes[paused].pid), LIFE_SECS), output(run)
        assert retry_until(lambda: AT - 1 in steps_at(run, other, other)), (steps_at(run, other, other), output(run))
        yield processes


def kill_all(run: Run, processes: Sequence[Started]) -> None:
    """At once: no rank hears of another's death."""
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        assert process.exitcode == KILLED, output(run)


def comes_back(run: Run, lost: int | None) -> int:
    """The step that the run resumes from, without a node; it then ends as if nothing had been."""
    unwritten = under_way(run)
    if lost is not None:
        lose(run, lost)
    assert live_ranks(run) == [0, 0], output(run)
    assert shards_read(run) == [[], []], "all of it comes from memory"
    step = restored(run)
    assert_same_run(run, unwritten)
    assert_store_sound(run, ended=True)
    assert left(run) == []
    return int(step)


@layouts
@paused_ranks
def test_a_short_pause_costs_time_and_nothing_else(paused, layout, place):  # noqa: F811
    """The copy that was on its way arrives, and all after it: nothing is lost with the node that they are of."""
    run, other = run_of(layout, place), 1 - paused
    with standing_still(run, "stop", paused) as processes:
        time.sleep(SHORT_SECS)
        assert AT - 1 not in steps_at(run, paused, other), "its copy is on its way"
        assert reached(run) == AT - 1, "training waits in its own collectives"
        os.kill(processes[paused].pid, signal.SIGCONT)
        assert retry_until(lambda: AT - 1 in steps_at(run, paused, other)), "it arrives"
        assert retry_until(lambda: reached(run) >= AT + MORE, LIFE_SECS), output(run)
        kill_all(run, processes)
        newest = reached(run)
    assert "gets no more copies" not in output(run)
    assert comes_back(run, other) >= newest - 2


@layouts
@paused_ranks
@lost_nodes
def test_a_long_pause_costs_what_only_the_lost_node_had(lost, paused, layout, place):  # noqa: F811
    """The rank that stood still gets no more copies, and goes on sending its own: so the other node's loss costs the
    steps since, and its own none. Training waits in its own collectives, and goes on."""
    run, other = run_of(layout, place, timeout_secs=TIMEOUT_SECS), 1 - paused
    said = f"rank {paused} gets no more copies of rank {other} until the run is restarted: no byte was transferred for"
    with standing_still(run, "stop", paused) as processes:
        copied = max(steps_at(run, paused, other))
        assert AT - 3 <= copied < AT - 1, "the copy of the newest step is on its way"
        assert AT - 1 not in steps_at(run, other, paused), "its own has yet to begin"
        time.sleep(TIMEOUT_SECS / 2)
        assert said not in output(run), "not before the timeout"
        assert retry_until(lambda: said in output(run), 5 * TIMEOUT_SECS), output(run)
        assert f"{said} {TIMEOUT_SECS:g} s ({AT - 1 - copied} steps behind)" in output(run)
        assert reached(run) == AT - 1
        os.kill(processes[paused].pid, signal.SIGCONT)
        assert retry_until(lambda: reached(run) >= AT + MORE, LIFE_SECS), output(run)
        kill_all(run, processes)
        newest = reached(run)
    assert f"rank {other} gets no more copies" not in output(run), "the other way is not cut"
    assert output(run).count(said) == 1
    if lost == "the other":
        assert comes_back(run, other) == copied
    else:
        assert comes_back(run, paused if lost else None) >= newest - 2


@layouts
@paused_ranks
@lost_nodes
def test_a_rank_that_does_not_come_to_the_end_of_a_step_ends_training(lost, paused, layout, place):  # noqa: F811
    """The other one has ended the step, and waits by messages of the library's. Each says that it missed a rank, and
    keeps its newest step. All go on from there, or, without one node, from the newest step that has copies."""
    run, other = run_of(layout, place, timeout_secs=TIMEOUT_SECS), 1 - paused
    with standing_still(run, "stop updated", paused) as processes:
        left_with = {None: AT, "the other": max(steps_at(run, paused, other)), "the paused": AT - 1}[lost]
        assert left_with >= AT - 2
        assert max(steps_at(run, other, paused)) == AT - 1, "all of its copies have arrived"
        time.sleep(2 * TIMEOUT_SECS)
        os.kill(processes[paused].pid, signal.SIGCONT)
        for process in processes:
            process.join(LIFE_SECS)
        assert [process.exitcode for process in processes] == [1, 1], output(run)
    words = Path(f"{run.log}.txt").read_text()
    missed = [re.search(MISSED.format(rank), words) for rank in (other, paused)]
    assert all(missed)
    assert missed[0].start() < missed[1].start(), "the one that waited notices first"
    for rank in (0, 1):
        assert f"training stops (PeerLostError): rank {rank} keeps its state of step {AT} in memory" in words
    assert comes_back(run, {None: None, "the other": other, "the paused": paused}[lost]) == left_with


WINDOWS = 6
"""Steps of two windows or rounds of three, the most that a return goes back to begin again."""


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize(("is_long", "lost"), [(False, 0), (True, 0), (True, 1)])
def test_under_every_exact_policy_a_pause_costs_no_bit(is_long, lost, name, place):  # noqa: F811
    """Rank 1 stands still for less than the timeout, or for longer: no more copies then. A node is lost later."""
    run = run_of(CASES[name], place, timeout_secs=TIMEOUT_SECS)
    with standing_still(run, "stop", 1) as processes:
        is_under_way = AT - 1 not in steps_at(run, 1, 0)
        time.sleep(3 * TIMEOUT_SECS if is_long else SHORT_SECS)
        os.kill(processes[1].pid, signal.SIGCONT)
        assert retry_until(lambda: reached(run) >= AT + MORE, LIFE_SECS), output(run)
        kill_all(run, processes)
        newest = reached(run)
    is_cut_off = "rank 1 gets no more copies of rank 0" in output(run)
    assert is_cut_off == (is_long and is_under_way)
    assert is_under_way or name.endswith("gradient-log"), "the copy of a log's step ends before the next backward pass"
    step = comes_back(run, lost)
    if is_cut_off and lost == 0:
        assert step < AT, "node 1 has none of node 0's later copies"
    else:
        assert step >= newest - WINDOWS
