"""MoEvement on two ranks (DDP over gloo): either is killed, both start again, and both end as they would have."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from moe_ckpt.testing import Kill, KillSchedule
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    committed,
    events,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    recomputed,
    split_lives,
)
from tests.support.deleting import delete_tree

CLIPPED = {"gradient_clip_val": 0.1}
TWO = Run(None, policy=("moevement", 3), epochs=4, ranks=2, callback={"when_busy": "wait"}, trainer=CLIPPED)
MIXED = replace(TWO, trainer={"precision": "bf16-mixed"}, model={"optimizer": "sgd"})
LISTED_5 = replace(
    TWO,
    policy=("moevement", 5),
    model={"stacked": False, "experts": 2},  # few, so that each gets tokens on each rank, as DDP demands
    trainer={"precision": "bf16-true", **CLIPPED},
)
ACCUMULATED = replace(TWO, trainer={"accumulate_grad_batches": 3, **CLIPPED}, epochs=8)


def _die_and_come_back(run: Run, *kills: Kill) -> None:
    """One life for each kill, and one that is not killed."""
    for kill in kills:
        schedule = KillSchedule((kill,))
        codes = live_ranks(replace(run, kills=schedule.to_json()))
        assert KILLED in codes, f"{kill}: exit codes {codes}\n{output(run)}"
        assert kill in schedule.fired(f"{run.log}.kills")
        assert_store_sound(run, ended=False)
    assert live_ranks(run) == [0, 0], output(run)
    assert_store_sound(run, ended=True)
    assert_promises_kept(run)
    assert_same_run(run)
    print(f"recomputed {recomputed(run)}")


def test_one_rank_dies_and_then_the_other_one_during_the_replay(place):  # noqa: F811
    run = placed(TWO, place)
    _die_and_come_back(run, Kill(10, 1, "compute"), Kill(1, 0, "compute"))
    lives = split_lives(events(run))
    assert 1 < lives[1][0]["step"] == lives[2][0]["step"], "both came back to the same window"
    assert not any(line["event"] == "batch" and line["step"] >= lives[1][0]["step"] for line in lives[1])


def test_another_number_of_ranks_takes_the_newest_dense_checkpoint(place):  # noqa: F811
    run = placed(replace(TWO, policy=("moevement", 2), options={"dense_overhead": 0.25}, sampler="recoverable"), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 10)))
    reader = StoreReader(open_storage(run.store))
    manifests = [reader.manifest(directory) for directory in reader.directories()]
    dense = [manifest for manifest in manifests if not manifest.window]
    assert manifests[0].window
    assert len(dense) == 1
    assert 4 <= dense[0].step < manifests[0].step, "dense checkpoints are made between windows, and the newest is kept"
    live(replace(run, ranks=1))
    said = output(run)
    assert f"{manifests[0].directory} is a sparse window that 2 ranks computed, and this run has 1" in said
    assert f"dense checkpoint {dense[0].directory} is used instead: {manifests[0].step - dense[0].step} steps" in said


def test_another_number_of_ranks_is_refused_without_a_dense_checkpoint(place):  # noqa: F811
    run = placed(TWO, place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 12)))
    reader = StoreReader(open_storage(run.store))
    for directory in reader.directories():  # as releases before did, which kept none
        if not reader.manifest(directory).window:
            delete_tree(os.path.join(run.store, directory))
    before = committed(run.store)
    with pytest.raises(AssertionError, match="exit code 1"):
        live(replace(run, ranks=1))
    said = output(run)
    assert "OtherLayoutError" in said
    assert "is a sparse window that 2 ranks computed, and this run has 1" in said
    assert "Start 2 ranks" in said
    assert committed(run.store) == before


@pytest.mark.slow
@pytest.mark.parametrize("run", [TWO, MIXED, LISTED_5, ACCUMULATED], ids=["plain", "mixed", "listed-5", "accumulated"])
@pytest.mark.parametrize(
    "kills",
    [
        (Kill(1, 0, "write"), Kill(3, 1, "compute"), Kill(1, 1, "copy")),
        (Kill(8, 0, "manifest"), Kill(11, 0, "gc")),
        (Kill(7, 1, "copy"), Kill(8, 0, "rename"), Kill(13, 1, "fsync")),
    ],
    ids=["first-window", "rank-0-only", "writing"],
)
def test_ranks_die_in_any_phase(run, kills, place):  # noqa: F811
    _die_and_come_back(placed(run, place), *kills)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_ranks_die_at_random(seed, place):  # noqa: F811
    number = random.Random(seed).randint(2, 4)
    schedule = KillSchedule.draw(seed, kills=number, ranks=2, first_step=1, last_step=16)
    _die_and_come_back(placed(TWO, place), *schedule.kills)
