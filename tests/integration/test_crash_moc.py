"""MoC under kill -9: what came back, how old it is and what it lost, against a recount from the routers' log."""

from __future__ import annotations

import random
from dataclasses import replace

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

WAIT = {"when_busy": "wait"}
MOC_1 = Run(None, policy=("moc", 1), epochs=4, hashes=True, callback=WAIT)
MOC_2 = replace(
    MOC_1, policy=("moc", 2), epochs=6, model={"stacked": False, "top_k": 1}, trainer={"accumulate_grad_batches": 2}
)
MOC_3_OF_6 = replace(MOC_1, policy=("moc", 3), model={"experts": 6, "layers": 3})


def _check(run: Run, *, every_step_saved: bool = True) -> Recount:
    experts = run.model.get("experts", 4)
    layers, stacked = run.model.get("layers", 2), run.model.get("stacked", True)
    recount = Recount(layers, experts, run.policy[1], tuple(range(experts)), stacked)
    check_history(recount, [split_lives(events(run))], every_step_saved=every_step_saved)
    assert_promises_kept(run)
    assert_store_sound(run, ended=True)
    return recount


def _killed_at_random(run: Run, seed: int, kills: int) -> Recount:
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(kills):
        if live(run, kill_after_secs=rng.uniform(0.02, 0.2)) != KILLED:
            break
        assert_store_sound(run, ended=False)
    assert live(run) == 0 or events(run)[-1]["event"] == "end", output(run)
    return _check(run, every_step_saved=run.callback == WAIT)


def test_killed_in_several_phases(place):  # noqa: F811
    """Far enough into the run for experts of several ages, and two kills with no commit between them."""
    run = placed(MOC_1, place)
    for crash in [("manifest", 7), ("fsync", 20), ("compute", 1), ("copy", 1), ("rename", 16), ("gc", 9), ("write", 9)]:
        assert live(replace(run, crash=crash)) == KILLED, output(run)
        assert_store_sound(run, ended=False)
    assert live(run) == 0, output(run)
    recount = _check(run)
    assert len(recount.faults) >= 4
    assert recount.lost > 0
    ages = {life[0]["step"] - step for life in split_lives(events(run))[1:] for step in _versions(life[0])}
    assert ages == {0, 1, 2, 3}, "experts of every age that K = 1 of 4 can give"


def _versions(begin):
    return [record[0] for name, record in begin["manifest"]["operators"].items() if name.startswith("expert/")]


@pytest.mark.parametrize("run", [MOC_1, MOC_2], ids=["k-1", "k-2-listed-accumulated"])
def test_killed_at_random_times(run, place):  # noqa: F811
    _killed_at_random(placed(run, place), random.SystemRandom().randrange(1 << 32), kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize(
    "run",
    [MOC_1, MOC_2, MOC_3_OF_6, replace(MOC_1, callback={})],
    ids=["k-1", "k-2-listed-accumulated", "k-3-of-6", "k-1-skipping-when-busy"],
)
def test_killed_at_random_times_often(run, seed, place):  # noqa: F811
    _killed_at_random(placed(run, place), seed, kills=6)


def test_nothing_is_lost_when_all_experts_are_saved(place):  # noqa: F811
    run = placed(replace(MOC_1, policy=("moc", 4), epochs=2), place)
    assert live(replace(run, crash=("manifest", 5))) == KILLED
    assert live(run) == 0
    assert _check(run).lost == 0
