"""MoEtion under kill -9: what came back, how old it is and what it lost, against a recount from the routers' log."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_store_sound,
    committed,
    events,
    live,
    live_ranks,
    manifests,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
)
from tests.integration.recount import Recount, check_history

BY_BUDGET = Run(
    None,
    policy=("moetion", 1),
    epochs=4,
    hashes=True,
    model={"experts": 4},
    # Less than any run can afford: one expert per layer, whatever the machine.
    callback={"when_busy": "wait", "save_last": False, "budget_fraction": 1e-9},
)
FIXED = replace(BY_BUDGET, options={"experts": 2}, model={"experts": 6, "layers": 3})
IN_TURN = replace(BY_BUDGET, policy=("moetion in turn", 1), options={"experts": 1})
ALL_OF_THEM = replace(BY_BUDGET, options={"experts": 4}, epochs=2)


def _check(run: Run) -> Recount:
    experts, layers = run.model.get("experts", 4), run.model.get("layers", 2)
    recount = Recount(layers, experts)
    ranks = [split_lives(events(run, rank)) for rank in range(run.ranks)]
    check_history(recount, ranks, every_step_saved=False)
    assert_promises_kept(run)
    assert_store_sound(run, ended=True)
    return recount


def _killed(run: Run, *crashes: tuple[str, int]) -> Recount:
    for crash in crashes:
        assert live(replace(run, crash=crash)) == KILLED, output(run)
        assert_store_sound(run, ended=False)
    assert live(run) == 0, output(run)
    return _check(run)


def _experts_saved(run: Run) -> list[int]:
    """Of the newest checkpoints: experts that each saved itself."""
    return [
        sum(op.startswith("expert/") and record.step == manifest.step for op, record in manifest.operators.items())
        for manifest in manifests(run.store)
    ]


@pytest.mark.parametrize(
    ("run", "each"), [(BY_BUDGET, 2), (FIXED, 6), (IN_TURN, 2)], ids=["by-budget", "fixed", "round-robin"]
)
@pytest.mark.quick("by-budget", "fixed")
def test_killed_in_several_phases(run, each, place):  # noqa: F811
    """The store names no expert twice in one manifest, so ``each`` counts what a checkpoint wrote."""
    run = placed(run, place)
    recount = _killed(run, ("manifest", 7), ("fsync", 20), ("copy", 1), ("write", 9))
    assert len(recount.faults) >= 3
    assert recount.lost > 0
    assert all(count == each for count in _experts_saved(run))
    assert committed(run.store)


def test_nothing_is_lost_when_all_experts_are_saved(place):  # noqa: F811
    run = placed(ALL_OF_THEM, place)
    assert _killed(run, ("manifest", 5)).lost == 0


def test_two_ranks_are_killed_together_and_lose_what_both_routed(place):  # noqa: F811
    run = placed(replace(BY_BUDGET, ranks=2, epochs=6), place)
    assert KILLED in live_ranks(replace(run, crash=("manifest", 6))), output(run)
    assert live_ranks(run) == [0, 0], output(run)
    assert _check(run).lost > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("run", [BY_BUDGET, FIXED, IN_TURN], ids=["by-budget", "fixed", "round-robin"])
def test_killed_at_random_times_often(run, seed, place):  # noqa: F811
    print(f"seed {seed}")
    run, rng = placed(run, place), random.Random(seed)
    for _ in range(5):
        if live(run, kill_after_secs=rng.uniform(0.02, 0.2)) != KILLED:
            break
        assert_store_sound(run, ended=False)
    assert live(run) == 0 or events(run)[-1]["event"] == "end", output(run)
    _check(run)
