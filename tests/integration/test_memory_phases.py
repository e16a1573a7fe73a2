"""Killed while slots are reserved, sealed, used again, removed, sent, verified or acknowledged: the run is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
)
from tests.integration.test_memory_kills import DENSE, in_memory, left
from tests.integration.test_memory_rarely_stored import RARELY, restored, stored
from tests.support.deleting import delete_tree

RUN = replace(DENSE, to_storage=RARELY)


@pytest.mark.parametrize(
    ("phase", "n"), [("reserve", 3), ("seal", 9), ("sealed", 9), ("unseal", 5), ("remove", 1), ("sweep", 1)]
)
@pytest.mark.quick("reserve-3", "seal-9", "unseal-5", "remove-1")
def test_killed_with_a_slot_in_hand(phase, n, place):  # noqa: F811
    run = in_memory(RUN, place)
    first = None if phase in ("remove", "sweep") else (phase, n)
    assert live(replace(run, crash=first or ("compute", 9))) == KILLED, output(run)
    if first is None:  # what an earlier life left is taken over, and removed
        assert live(replace(run, crash=(phase, n))) == KILLED, output(run)
    before = stored(run)
    assert live(run) == 0, output(run)
    assert phase == "reserve" or restored(run) > before, "storage has only what the first life began with"
    assert_same_run(run)
    assert_promises_kept(run)
    assert_store_sound(run, ended=True)
    assert left(run) == []


@pytest.mark.parametrize(("phase", "n"), [("send", 20), ("verified", 6), ("acknowledge", 6)])
@pytest.mark.parametrize("lost", [None, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 1))])
@pytest.mark.quick("None-send-20", "None-verified-6")
def test_killed_with_a_copy_in_hand(phase, n, lost, place):  # noqa: F811
    """Two ranks under DDP, each a node; one may be lost besides."""
    run = in_memory(replace(RUN, ranks=2, replicas=1), place)
    assert KILLED in live_ranks(replace(run, crash=(phase, n))), output(run)
    if lost is not None:
        delete_tree(Path(run.memory, f"node_{lost}"))
    assert live_ranks(run) == [0, 0], output(run)
    assert_same_run(run)
    assert left(run) == []
