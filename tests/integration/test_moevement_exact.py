"""MoEvement under kill -9: the run that comes back by computing a window again ends like the one that never failed.

Equal means to the last bit: parameters, buffers, optimizer state, schedulers, random numbers, and the loss of every
batch, those of replayed steps included.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    live,
    output,
    place,  # noqa: F401 - a fixture
    placed,
)

BASE = Run(None, policy=("moevement", 3), epochs=3, callback={"when_busy": "wait"})


@pytest.mark.parametrize("step", [1, 2, 5, 9, 14])
def test_killed_while_computing(place, step):  # noqa: F811
    run = placed(BASE, place)
    assert live(replace(run, crash=("compute", step))) == KILLED
    assert live(run) == 0, output(run)
    assert_store_sound(run, ended=True)
    assert_promises_kept(run)
    assert_same_run(run)


FROZEN = replace(BASE, policy=("moevement", 5), model={"stacked": False}, trainer={"gradient_clip_val": 0.3})


@pytest.mark.parametrize("stacked", [True, False])
def test_what_is_left_out_while_replaying_changes_nothing(place, stacked):  # noqa: F811
    """Gradients of whole experts, updates of all that is not anchored yet, and so the norm that clipping goes by."""
    run = placed(replace(FROZEN, model={"stacked": stacked}), place)
    assert live(replace(run, crash=("compute", 14))) == KILLED
    assert live(run) == 0, output(run)
    assert_same_run(run)
