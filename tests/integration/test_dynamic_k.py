"""Dynamic-K in real runs that are killed again and again: the budget holds in every life, as recounted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_store_sound,
    events,
    live,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
)
from tests.integration.recount import Recount, check_history

BASE = Run(
    None,
    policy=("moc", 1),
    options={"plt_budget": 0.05},
    samples=48,
    epochs=12,
    model={"experts": 8},
    hashes=True,
    callback={"when_busy": "wait"},
)


def _killed(run: Run, seed: int, kills: int) -> list[list[dict[str, Any]]]:
    """The run's lives: ``kills`` of them ended by kill -9 at a random moment, the last by itself."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(kills):
        # Counted in steps: on a busy machine half a second may be over before one is.
        if live(run, rng.uniform(0.0, 0.05), kill_after_lines=rng.randrange(6, 60)) != KILLED:
            break
    assert live(run) == 0 or events(run)[-1]["event"] == "end", output(run)
    experts = run.model["experts"]
    recount = Recount(2, experts, run.policy[1], tuple(range(experts)))
    lives = split_lives(events(run))
    check_history(recount, [lives], every_step_saved=False)  # recounts every life's loss from the routers' log
    assert_promises_kept(run)
    assert_store_sound(run, ended=True)
    return lives


def _assert_held(lives: list[list[dict[str, Any]]], budget: float) -> None:
    starts = [life[0] for life in lives if life[0]["step"]]
    assert all(start["plt"] <= budget for start in starts), [start["plt"] for start in starts]
    assert lives[-1][-1]["plt"] <= budget


@pytest.mark.parametrize("selector", ["sequential", "load_aware"])
@pytest.mark.quick("load_aware")
def test_the_budget_holds_across_restarts(place, selector):  # noqa: F811
    run = placed(replace(BASE, options={"plt_budget": 0.05, "selector": selector}), place)
    lives = _killed(run, random.SystemRandom().randrange(1 << 32), kills=3)
    assert len(lives) > 1
    _assert_held(lives, 0.05)


def test_without_a_budget_the_same_kills_lose_more(place):  # noqa: F811
    """So the budget above is not held by chance."""
    run = placed(replace(BASE, options={}), place)
    lives = _killed(run, 1, kills=3)
    assert max(life[0]["plt"] for life in lives if life[0]["step"]) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("budget", [0.01, 0.0375, 0.075, 0.3])
def test_the_budget_holds_however_often_it_is_killed(place, seed, budget):  # noqa: F811
    run = placed(replace(BASE, options={"plt_budget": budget}, epochs=20), place)
    lives = _killed(run, seed, kills=8)
    _assert_held(lives, budget)
    for life in lives:
        ks = [event["k"] for event in life if event["event"] == "batch" and event["k"]]
        assert ks == sorted(ks, reverse=True), "within a life K only falls, as more is routed"
