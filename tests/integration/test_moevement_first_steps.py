"""MoEvement that sizes its windows itself: what a failure in the first steps of a run comes back to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_same_run,
    assert_store_sound,
    events,
    live,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
)

RUN = Run(None, policy=("moevement", None), epochs=2, callback={"when_busy": "wait"})


@pytest.mark.parametrize(("step", "when", "least"), [(5, "compute", 0), (9, "compute, stored", 2)])
def test_a_kill_in_the_first_steps_does_not_cost_all_of_them(place, step, when, least):  # noqa: F811
    """Killed in the forward pass after so many steps. A window of at most four slots begins at step 2."""
    run = placed(RUN, place)
    assert live(replace(run, crash=(when, step + 1))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert_store_sound(run, ended=True)
    assert_same_run(run)
    first, second = split_lives(events(run))
    assert max(line["step"] for line in first if line["event"] == "batch") == step
    assert second[0]["step"] >= least
