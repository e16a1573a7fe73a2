"""Lightning on two nodes with networks of their own, one of them behind a link on which a copy takes many steps.

Only the way of copies is slow: training's own groups, made before, are not.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from tests.integration.test_memory_kills import in_memory, left
from tests.integration.test_memory_layouts import CASES, LAYOUTS, lose, under_way
from tests.integration.test_memory_pauses import WINDOWS, comes_back, kill_all, reached, run_of, steps_at
from tests.integration.test_memory_rarely_stored import RARELY, restored
from tests.support.networks import Network, network_or_skip
from tests.support.waiting import retry_until

pytestmark = pytest.mark.slow

SLOW_NODE = 1
WELL_STEPS, COPY_STEPS, LATE, COPIES = 12, 30, 8, 2
"""Steps before the link gets slow, and in the time that a copy takes then; with so many it is late; such copies."""
MOST_SECS = 5.0
BEHIND = 6
"""Steps that a copy is behind then, under policies other than Dense."""
LINK_MBIT_PER_SEC = {"gradient-log": 0.2}
"""Of such: 1, if not said otherwise."""
LINES = 3
"""Steps between the last of these and the end. Before one of them, at least, the step before is sealed."""


def metrics(run: Run, rank: int = 0) -> list[dict[str, Any]]:
    """What the trainer's logger got at each step."""
    return [line for line in events(run, rank) if line["event"] == "metrics"]


def lags(run: Run) -> list[float]:
    return [line["replica_lag_steps"] for line in metrics(run)]


def late_copies(run: Run) -> int:
    """Of rank 0, those that the lag shows."""
    return sum(before - after > LATE for before, after in pairwise(lags(run)))


def told(run: Run, rank: int) -> int:
    """The newest step that the rank's peer has, by its last lines: the lag is that of the step before, if sealed."""
    return round(min(line["step"] - line["replica_lag_steps"] for line in metrics(run, rank)[-LINES:])) - 1


def slow_down(run: Run, network: Network) -> None:
    """A copy of rank 0 takes as long as many steps from here on."""
    assert retry_until(lambda: len(metrics(run)) > 3, LIFE_SECS), output(run)
    began, before = time.monotonic(), len(metrics(run))
    assert retry_until(lambda: len(metrics(run)) >= before + WELL_STEPS, LIFE_SECS), output(run)
    secs_of_copy = min(MOST_SECS, COPY_STEPS * (time.monotonic() - began) / WELL_STEPS)
    sent = [line["replica_sent_bytes"] for line in metrics(run)[before:]]
    network.slow(SLOW_NODE, 8e-6 * (sent[-1] - sent[0]) / (len(sent) - 1) / secs_of_copy)


def killed_behind(run: Run, network: Network) -> None:
    """All processes die when a copy has just come through: the next one is far from that."""
    with started_ranks(replace(run, networks=tuple(network.nodes))) as processes:
        slow_down(run, network)
        assert retry_until(lambda: late_copies(run) >= COPIES, LIFE_SECS), (lags(run), output(run))
        lines = len(metrics(run))
        assert retry_until(lambda: len(metrics(run)) >= lines + LINES, LIFE_SECS)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            assert process.exitcode == KILLED, output(run)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("lost", [0, 1], ids=["the other one lost", "the slow one lost"])
def test_a_slow_link_costs_the_steps_that_are_told_and_no_bit(lost, name, place):  # noqa: F811
    """Rank 0's copies lie on the slow node. Those of rank 1 do not, and only the answers to them are slow."""
    run = replace(LAYOUTS[name], to_storage=RARELY, samples=4800, epochs=1, logged=True, watched=True)
    run = replace(run, slow_copy_secs=0.1)
    run = in_memory(replace(run, callback={"timeout_secs": 120.0}), place)
    with network_or_skip(2, slow=True) as network:
        killed_behind(run, network)
    words = Path(f"{run.log}.txt").read_text()
    assert "peers have not taken the copies of earlier checkpoints" in words
    assert "gets no more copies" not in words, "slow is not dead"
    newest, peer_has = metrics(run)[-1], told(run, lost)
    assert newest["memory_step"] >= newest["step"] - 3, "each step is in memory, and training waits for no copy"
    assert max(lags(run)) > LATE
    unwritten = under_way(run)
    lose(run, lost)
    run = replace(run, slow_copy_secs=0.0)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == peer_has if lost == 0 else peer_has <= restored(run) <= newest["step"]
    assert shards_read(run) == [[], []]
    assert_same_run(run, unwritten)
    assert_store_sound(run, ended=True)
    assert left(run) == []


def behind(run: Run) -> int:
    """Steps that the slow node has yet to get of rank 0."""
    return max(steps_at(run, 0, 0), default=0) - max(steps_at(run, SLOW_NODE, 0), default=0)


@pytest.mark.parametrize("name", [name for name in CASES if name not in LAYOUTS])
@pytest.mark.parametrize("lost", [0, 1], ids=["the other one lost", "the slow one lost"])
def test_under_every_exact_policy_a_slow_link_costs_no_bit(lost, name, place):  # noqa: F811
    """As above. A policy makes fewer checkpoints where copies are late, or smaller ones."""
    run = replace(run_of(CASES[name], place, timeout_secs=120.0), samples=2400, epochs=1)
    with network_or_skip(2, slow=True) as network:
        with started_ranks(replace(run, networks=tuple(network.nodes))) as processes:
            assert retry_until(lambda: reached(run) >= WELL_STEPS, LIFE_SECS), output(run)
            network.slow(SLOW_NODE, LINK_MBIT_PER_SEC.get(name.partition("-")[2], 1.0))
            assert retry_until(lambda: behind(run) >= BEHIND, LIFE_SECS), (behind(run), reached(run), output(run))
            kill_all(run, processes)
        newest = reached(run)
    assert "gets no more copies" not in output(run), "slow is not dead"
    step = comes_back(run, lost)
    if lost == SLOW_NODE:
        assert newest - WINDOWS - BEHIND <= step
    else:
        assert WELL_STEPS - WINDOWS <= step < newest, "its newest copies had yet to arrive"
