"""Two ranks under a real torchrun: one is killed, the job restarts by itself and ends as it would have.

Ranks are forks of a warm server here; in the slow tests they are fresh interpreters.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, replace

import pytest

from moe_ckpt.testing import Kill, KillSchedule
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    events,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
)
from tests.integration.recount import Recount, check_history
from tests.support import warm
from tests.support.torchrun import torchrun

DENSE = Run(None, policy=("dense", 1), epochs=4, ranks=2)
DENSE_3 = replace(DENSE, policy=("dense", 3), sampler="plain")
MOC = replace(DENSE, policy=("moc", 1), hashes=True, callback={"when_busy": "wait"})
TWO_RANK_ORDER = (0, 2, 1, 3)


def killed(run: Run, kills: tuple[Kill, ...], python: str = sys.executable) -> Run:
    """Run to the end under torchrun; every kill must have happened. Returns the run as it was told."""
    run = replace(run, kills=KillSchedule(kills).to_json())
    said = torchrun(
        "tests.integration.crash_run", run.to_json(), ranks=run.ranks, restarts=len(kills) + 1, timeout_secs=500,
        python=python,
    )  # fmt: skip
    fired = KillSchedule(kills).fired(f"{run.log}.kills")
    assert sorted(fired) == sorted(kills), f"fired: {json.dumps([asdict(kill) for kill in fired])}\n{said[-3000:]}"
    return run


def _check_dense(run: Run, most_lives: int) -> None:
    """Two ranks may die in one life."""
    assert_store_sound(run, ended=True)
    for rank in range(run.ranks):
        assert 1 < len(split_lives(events(run, rank))) <= most_lives
    assert_promises_kept(run)
    assert_same_run(run)


def _check_moc(run: Run) -> Recount:
    assert_store_sound(run, ended=True)
    assert_promises_kept(run)
    recount = Recount(2, 4, 1, TWO_RANK_ORDER)
    check_history(recount, [split_lives(events(run, rank)) for rank in range(run.ranks)])
    return recount


def test_dense_loses_nothing(place):  # noqa: F811
    """Comes back in the middle of the second epoch, under a sampler that must be told so in time."""
    run = killed(placed(replace(DENSE, sampler="plain"), place), (Kill(8, 1, "write"),), warm.python())
    _check_dense(run, most_lives=2)


@pytest.mark.parametrize(
    ("run", "crash"),
    [
        (DENSE, ("compute", 7)),
        pytest.param(DENSE, ("forward", 2), id="after its first step", marks=pytest.mark.slow),
        pytest.param(
            replace(DENSE, trainer={"accumulate_grad_batches": 3}, epochs=8), ("compute", 20), marks=pytest.mark.slow
        ),
        pytest.param(replace(DENSE, fixed_buckets=True), ("compute", 7), marks=pytest.mark.slow),
    ],
)
def test_three_ranks(run, crash, place):  # noqa: F811
    """A sum over three ranks goes by the order in DDP's buckets, which changes after a process's first step."""
    run = placed(replace(run, ranks=3), place)
    assert KILLED in live_ranks(replace(run, crash=crash))
    assert live_ranks(run) == [0, 0, 0], output(run)
    assert "last bits" not in output(run)
    assert "another order" not in output(run)
    _check_dense(run, most_lives=2)


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_moc_loses_what_it_says(fresh, place):  # noqa: F811
    """fresh: in interpreters of their own, as users start them."""
    run = killed(placed(MOC, place), (Kill(9, 0, "manifest"),), sys.executable if fresh else warm.python())
    recount = _check_moc(run)
    assert recount.lost > 0


@pytest.mark.slow
@pytest.mark.parametrize("run", [DENSE, DENSE_3], ids=["dense-1", "dense-3"])
@pytest.mark.parametrize(
    "kills",
    [
        (Kill(5, 0, "compute"), Kill(12, 1, "compute")),
        (Kill(4, 0, "manifest"), Kill(10, 0, "gc")),
        (Kill(6, 0, "copy"), Kill(6, 1, "fsync"), Kill(13, 0, "rename")),
    ],
    ids=["compute", "rank-0-only", "writing"],
)
def test_dense_loses_nothing_however_often(run, kills, place):  # noqa: F811
    run = killed(placed(run, place), kills)
    _check_dense(run, most_lives=len(kills) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_moc_loses_what_it_says_however_often(seed, place):  # noqa: F811
    schedule = KillSchedule.draw(seed, kills=random.Random(seed).randint(2, 3), ranks=2, first_step=3, last_step=17)
    _check_moc(killed(placed(MOC, place), schedule.kills))
