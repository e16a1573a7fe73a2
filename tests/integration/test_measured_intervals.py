"""Intervals from what a run measures, by Young's and Daly's formulas, in real processes: README's "auto", and Gemini.

The formulas are written out here, and fed with what the ranks had agreed on at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_same_run,
    assert_store_sound,
    events,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    split_lives,
)
from tests.integration.test_memory_kills import in_memory, left
from tests.integration.test_memory_layouts import DDP

pytestmark = pytest.mark.slow

PRIOR_SECS = 0.3
MTBF_SECS = 2.0


def young(cost: float, mtbf: float) -> float:
    return sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    if cost >= 2 * mtbf:
        return mtbf
    return young(cost, mtbf) * (1 + sqrt(cost / (2 * mtbf)) / 3 + cost / (18 * mtbf)) - cost


def metrics(run: Run, rank: int) -> list[list[dict[str, Any]]]:
    """What the trainer's logger got at each step, by life."""
    lives = split_lives(events(run, rank))
    return [[line for line in life if line["event"] == "metrics"] for life in lives]


def steps_with(run: Run, rank: int, what: str) -> list[list[int]]:
    return [[line["step"] for line in life if line[what]] for life in metrics(run, rank)]


def test_auto_gives_storage_a_checkpoint_after_youngs_interval(place):  # noqa: F811
    """Before and after a failure, which counts."""
    run = replace(DDP, callback={}, to_storage="auto", prior_mtbf_secs=PRIOR_SECS, samples=2000, epochs=1, logged=True)
    run = in_memory(run, place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 130))), output(run)
    assert live_ranks(run) == [0, 0], output(run)
    went = steps_with(run, 0, "to_storage")
    again = steps_with(run, 1, "to_storage")
    assert went[1] == again[1], "equal on all ranks"
    assert set(went[0]) ^ set(again[0]) <= {130, 131}, "but for the step in which they died"
    last, found = None, []
    for failures, life in enumerate(metrics(run, 0)):
        for line in life:
            if not line["begun"]:
                continue
            measured = line["measured"]
            cost, iteration = measured["persist_secs"], measured["iteration_secs"] or measured["recent_iteration_secs"]
            steps = None
            if cost and iteration:
                mtbf = (PRIOR_SECS + line["step"] * iteration) / (1 + failures)
                steps = max(1, ceil(max(cost, young(cost, mtbf)) / iteration))
            due = last is None or (steps is not None and line["step"] - last >= steps)
            assert bool(line["to_storage"]) == due, (line, last, steps)
            if due:
                last = line["step"]
                found.append(steps)
    assert len(found) > 4, found
    assert_same_run(run)
    assert_store_sound(run, ended=True)
    assert left(run) == []


@pytest.mark.parametrize("formula", [young, daly])
def test_gemini_saves_after_the_interval_of_what_was_measured(formula: Callable[..., float], place: Path):  # noqa: F811
    options = {"mtbf_secs": MTBF_SECS, "profile_steps": 5}
    run = replace(DDP, policy=("gemini", formula.__name__), options=options, samples=2000, epochs=1, logged=True)
    run = in_memory(replace(run, callback={}, slow_copy_secs=0.05), place)
    assert live_ranks(run) == [0, 0], output(run)
    [saved], [again] = (steps_with(run, rank, "begun") for rank in (0, 1))
    assert saved == again, "equal on all ranks"
    last, found = None, []
    for line in metrics(run, 0)[0]:
        step, measured = line["step"], line["measured"]
        iteration, cost, persist = (measured[f"{n}_secs"] for n in ("iteration", "checkpoint_cost", "persist"))
        steps = None
        if last is not None and iteration and cost is not None and persist is not None:
            steps = max(1, ceil(max(formula(cost, MTBF_SECS), persist) / iteration))
            assert (step in saved) == (step - last >= steps), (line, last, steps)
            if step in saved:
                found.append((steps, formula(cost, MTBF_SECS) > persist))
        last = step if step in saved else last
    assert len(found) > 4, found
    assert any(by_formula for _, by_formula in found), "and not by the time that one takes to be written"
    assert_same_run(run)
    assert left(run) == []
