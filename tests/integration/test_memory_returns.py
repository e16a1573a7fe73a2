"""A rank of an earlier start comes back when the run has gone on without it: alive, or as its node's memory.

Its node was cut off, say: the launcher took it for dead, and started the run again with a spare in its place.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
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
    split_lives,
    started_ranks,
)
from tests.integration.test_memory_kills import in_memory, left
from tests.integration.test_memory_layouts import CASES, LAYOUTS, PAIRED, lose
from tests.integration.test_memory_rarely_stored import RARELY, restored, stored
from tests.support.waiting import retry_until
from tests.support.warm import Started

pytestmark = pytest.mark.slow

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
AWAY = 1
"""The rank, and node, that comes back."""


@contextmanager
def stopped_rank(run: Run) -> Iterator[Started]:
    """A start of which rank 0 is dead, and the other one stands still in the middle of training."""
    with started_ranks(run) as processes:
        assert retry_until(lambda: len(events(run)) > 6 or not processes[0].is_alive(), LIFE_SECS)
        os.kill(processes[AWAY].pid, signal.SIGSTOP)
        processes[0].kill()
        processes[0].join()
        yield processes[AWAY]


def continue_after(run: Run, lines: int, process: Started) -> None:
    """Once the run's log has so many lines more, the process goes on."""
    before = len(events(run))
    retry_until(lambda: len(events(run)) > before + lines, LIFE_SECS)
    os.kill(process.pid, signal.SIGCONT)


@layouts
def test_a_rank_of_an_earlier_start_that_goes_on_does_no_harm(layout, place):  # noqa: F811
    """It goes on beside the start that has taken its place: it ends by an error, and nothing of it comes into the run,
    though its node is the one that the next start finds."""
    run = in_memory(replace(layout, to_storage=RARELY, watched=True, samples=320), place)
    with stopped_rank(replace(run, callback={**run.callback, "timeout_secs": 20.0})) as old:
        before = stored(run)
        node = Path(run.memory, f"node_{AWAY}")
        node.rename(node.with_suffix(".away"))
        back = threading.Thread(target=continue_after, args=(run, 3, old))
        back.start()
        codes = live_ranks(replace(run, crash=("compute", 20)))
        back.join()
        assert KILLED in codes, output(run)
        first = split_lives(events(run))[-1][0]["step"]
        assert first > before, "the spare in its place got everything from its peer"
        old.join(LIFE_SECS)
        assert not old.is_alive(), output(run)
        assert old.exitcode != 0
    lose(run, AWAY)
    node.with_suffix(".away").rename(node)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) > first + 10, "what the spare had comes from its peer, and not what the old rank has"
    assert shards_read(run) == [[], []]
    assert_same_run(run)
    assert_store_sound(run, ended=True)
    assert left(run) == []


@pytest.mark.parametrize("name", [*LAYOUTS, *PAIRED])
def test_a_node_that_comes_back_with_memory_of_an_earlier_start_is_not_gone_on_from(name, place):  # noqa: F811
    """Also where its steps are newer than those of the start that went on without it, from storage."""
    run = in_memory(replace(CASES[name], epochs=2, to_storage=10, samples=320), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 29))), output(run)
    away = Path(run.memory, "away")
    away.mkdir()
    nodes = [Path(run.memory, f"node_{node}") for node in (0, 1)]
    for node in nodes:
        node.rename(away / node.name)
    before = stored(run)
    further = 5 if name in LAYOUTS else 8
    assert KILLED in live_ranks(replace(run, crash=("compute", further))), output(run)
    assert restored(run) <= before, "of storage"
    lose(run, AWAY)
    (away / nodes[AWAY].name).rename(nodes[AWAY])
    assert live_ranks(run) == [0, 0], output(run)
    assert before < restored(run) < before + further, "of the start that went on, and not of the one that got further"
    assert_same_run(run)
    assert_store_sound(run, ended=True)
    assert [path for path in left(run) if away not in path.parents] == []
