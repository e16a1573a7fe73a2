"""``Memory(survivor_secs)`` runs out while the newest step is being copied: what the log says of it is true."""

from __future__ import annotations

import time
from dataclasses import replace

from tests.integration.lives import (
    KILLED,
    LIFE_SECS,
    assert_same_run,
    events,
    exit_code,
    live,
    output,
    place,  # noqa: F401 - a fixture
    recomputed,
    start,
)
from tests.integration.test_memory_kills import DENSE, in_memory, left
from tests.integration.test_memory_rarely_stored import RARELY, restored
from tests.integration.test_survivors import said

SLOW = replace(
    DENSE,
    policy=("dense", 5),
    to_storage=RARELY,
    memory_options={"survivor_secs": 0.5},
    slow_copy_secs=1.0,
    crash=("raise", 9),
)
"""Each copy takes a second; user code fails after step 8. A seal that is quick may be there when that is asked."""
SAYS = "rank 0 may not keep step 8 in memory: not sealed within 0.5 s (Memory(survivor_secs))"


def test_a_copy_past_the_deadline_counts_if_the_process_lives_on(place):  # noqa: F811
    run = in_memory(replace(SLOW, sabotage="seals survivors' late"), place)
    assert exit_code(run) == 1
    assert SAYS in said(run)
    assert "keeps its state" not in said(run)
    assert live(replace(run, crash=None, slow_copy_secs=0.0, sabotage="")) == 0, output(run)
    assert restored(run) == 8, "the copy that had begun was finished before the process ended"
    assert_same_run(run)
    assert left(run) == []


def test_a_launcher_that_kills_after_the_deadline_leaves_the_older_checkpoint(place):  # noqa: F811
    """It is copied by then, but not sealed: that takes some seconds here."""
    run = in_memory(replace(SLOW, slow_copy_secs=0.0, sabotage="seals survivors' late"), place)
    process = start(run)
    try:
        until = time.monotonic() + LIFE_SECS
        while process.is_alive() and not (events(run) and SAYS in said(run)) and time.monotonic() < until:
            time.sleep(0.01)
        process.kill()
        process.join()
        assert process.exitcode == KILLED, output(run)
    finally:
        process.close()
    assert SAYS in said(run)
    assert live(replace(run, crash=None, sabotage="")) == 0, output(run)
    assert restored(run) == 5
    assert "cannot be used" not in said(run), "what was not sealed is not there"
    assert recomputed(run) == [3]
    assert_same_run(run)
    assert left(run) == []
