"""Checkpoints that go to memory only, under kill -9: the run ends as if nothing had happened, storage far behind."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_ckpt.cli.main import main
from moe_ckpt.reading.memory.memory_checkpoints import MOST_STARTS
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    committed,
    differences,
    events,
    exit_code,
    live,
    live_ranks,
    load,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    recomputed,
    split_lives,
    undisturbed,
)
from tests.integration.test_memory_kills import DENSE, in_memory, kill_often, left
from tests.integration.test_moevement_kills import WINDOWS, W
from tests.support.deleting import delete_tree
from tests.support.spoiled import flip

RARELY = 1000
POLICIES = {
    "dense": replace(DENSE, to_storage=RARELY),
    "moc": replace(DENSE, policy=("moc", 1), options={"snapshot_k": 4}, to_storage=RARELY),
    "moevement": replace(WINDOWS, to_storage=RARELY),
    "checkfreq": replace(
        DENSE, policy=("checkfreq", 2), options={"max_overhead": 0.9, "max_interval": 2}, to_storage=RARELY
    ),
    "gradient-log": replace(DENSE, policy=("gradient-log", 3), to_storage=RARELY),
}
every_policy = pytest.mark.parametrize("policy", POLICIES)
LONGEST = {"dense": 1, "moc": 1, "moevement": 1, "checkfreq": 2, "gradient-log": 1}
"""Steps from one copy to the next at most: CheckFreq's come as often as a busy machine lets it."""
BEHIND = {"dense": 2, "moc": 2, "moevement": 2 * W + 1, "checkfreq": 4, "gradient-log": 2}
"""Steps that a life computes again at most: the one under way and one that is not sealed yet, or two windows, or two
intervals."""


def stored(run: Run) -> int:
    """Step of the newest checkpoint on storage; 0 where the run was killed before its first was whole."""
    return max((int(name.split("_")[1]) for name in committed(run.store)), default=0)


def restored(run: Run) -> int:
    return split_lives(events(run))[-1][0]["step"]


@every_policy
@pytest.mark.parametrize("phase", ["copy", "compute"])
@pytest.mark.quick(
    "copy-dense", "compute-dense", "compute-moc", "compute-moevement", "compute-checkfreq", "compute-gradient-log"
)
def test_the_run_goes_on_from_memory(policy, phase, place):  # noqa: F811
    run = in_memory(POLICIES[policy], place)
    for n in (14, 5):
        reached = n // LONGEST[policy] if phase == "copy" else n
        assert live(replace(run, crash=(phase, reached))) == KILLED, output(run)
    before = stored(run)
    assert live(run) == 0, output(run)
    assert restored(run) > before, "storage has only what the first life began with"
    assert_same_run(run)
    assert_promises_kept(run)
    assert_store_sound(run, ended=True)
    assert max(recomputed(run)) <= BEHIND[policy], recomputed(run)
    assert events(run)[-1]["lost"] == 0, "all of it is as of one step, or computed again"
    assert left(run) == []


@every_policy
@pytest.mark.quick("dense", "moevement")
def test_memory_is_used_although_storage_lost_what_it_follows(policy, place):  # noqa: F811
    run = in_memory(POLICIES[policy], place)
    assert live(replace(run, crash=("compute", 14))) == KILLED, output(run)
    for name in committed(run.store):
        Path(run.store, name, "MANIFEST.json").unlink()
    assert live(replace(run, crash=("compute", 4))) == KILLED, output(run)
    assert "is gone from storage, or its MANIFEST.json is" in output(run)
    assert restored(run) > 14 - 2 - BEHIND[policy]
    assert live(run) == 0, output(run)
    assert_same_run(run)
    assert_promises_kept(run)
    assert_store_sound(run, ended=True)
    assert events(run)[-1]["lost"] == 0


def ends(policy: str) -> list[Run]:
    """Of an epoch whose end comes again in the next life, and of steps, after which nothing does."""
    run = POLICIES[policy]
    return [run, replace(run, trainer={"max_steps": run.epochs * 10})]


@pytest.mark.parametrize(
    "run",
    [
        *(pytest.param(run, id=f"dense {run.trainer}") for run in ends("dense")),
        *(
            pytest.param(run, id=f"{policy} {run.trainer}", marks=pytest.mark.slow)
            for policy in ("moc", "moevement")
            for run in ends(policy)
        ),
    ],
)
@pytest.mark.quick("dense {'max_steps': 20}")
def test_killed_at_the_end_the_last_step_gets_to_storage(run, place):  # noqa: F811
    """The next life has nothing left to train, and lets go of memory only when storage has the step."""
    run, last = in_memory(run, place), run.epochs * 10
    first = replace(run, crash=("train end", 1), callback={**run.callback, "save_last": False})
    assert live(first) == KILLED, output(run)
    assert stored(run) < last
    assert live(run) == 0, output(run)
    assert "from memory" in output(run)
    assert (stored(run), left(run)) == (last, [])
    found = list(differences(load(run), undisturbed(run)[0][0]))
    # Where no step is left Lightning does not even begin, nor count the epoch that the run ended in.
    assert [each for each in found if run.trainer == {} or not each.startswith("/progress")] == []
    assert_store_sound(run, ended=True)
    assert live(run) == 0, output(run)
    assert "is finished" in output(run)


@pytest.mark.parametrize("policy", ["dense", "moc"])
@pytest.mark.quick("moc")
def test_killed_at_the_end_of_an_average_the_weights_that_were_trained_get_to_storage(policy, place):  # noqa: F811
    """The averaged ones take their place when training ends, and before checkpoints of that end are made."""
    run = in_memory(replace(POLICIES[policy], beside=("ema",), validate=True), place)
    whole = placed(replace(run, memory=None, to_storage=1), place, "whole")
    assert live(whole) == 0, output(whole)
    first = replace(run, crash=("train end", 1), callback={**run.callback, "save_last": False})
    assert live(first) == KILLED, output(run)
    assert live(run) == 0, output(run)
    found, expected = (StoreReader(open_storage(each.store)) for each in (run, whole))
    last = [reader.manifest(max(reader.directories())) for reader in (found, expected)]
    assert last[0].step == last[1].step
    for key in expected.index(last[1]).tensors:
        assert torch.equal(found.tensor(last[0], key), expected.tensor(last[1], key)), key


@every_policy
@pytest.mark.quick("dense", "moc", "gradient-log")
def test_a_flipped_byte_costs_steps_and_no_bit(policy, place):  # noqa: F811
    run = in_memory(POLICIES[policy], place)
    assert live(replace(run, crash=("compute", 14))) == KILLED, output(run)
    for path in left(run):
        if path.suffix == ".head":
            flip(path)
    assert live(run) == 0, output(run)
    assert restored(run) <= stored(run)
    if policy != "moc":  # which then lacks tokens
        assert_same_run(run)


@every_policy
@pytest.mark.quick("dense", "moc")
def test_a_lost_node_goes_back_to_storage(policy, place):  # noqa: F811
    run = in_memory(replace(POLICIES[policy], to_storage=4), place)
    assert live(replace(run, crash=("compute", 14))) == KILLED, output(run)
    for path in left(run):
        path.unlink()
    assert live(run) == 0, output(run)
    assert "no node has a checkpoint of an earlier start in memory" in output(run)
    if policy != "moc":
        assert_same_run(run)
    assert_store_sound(run, ended=True)


@pytest.mark.slow
@every_policy
@pytest.mark.parametrize("seed", range(8))
def test_killed_at_random_times(policy, seed, place):  # noqa: F811
    rng = random.Random(seed)
    run = in_memory(replace(POLICIES[policy], to_storage=rng.choice([1, 3, RARELY])), place)
    kill_often(run, rng)
    assert_same_run(run)
    assert_promises_kept(run)
    assert left(run) == []


@pytest.mark.slow
@every_policy
def test_two_ranks_killed_together(policy, place):  # noqa: F811
    run = in_memory(replace(POLICIES[policy], ranks=2), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 9)))
    before = stored(run)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) > before
    assert_same_run(run)
    assert left(run) == []


@every_policy
@pytest.mark.quick("dense", "moevement")
def test_what_is_on_storage_too_comes_from_memory(policy, place):  # noqa: F811
    run = in_memory(replace(POLICIES[policy], to_storage=1), place)
    assert live(replace(run, crash=("compute", 14))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert "from memory" in output(run)
    assert_same_run(run)
    assert_store_sound(run, ended=True)
    assert left(run) == []


@pytest.mark.slow
def test_a_start_with_a_wrong_number_of_ranks_costs_no_step(place):  # noqa: F811
    """It cannot use the window in memory, but leaves it there until its own steps are complete."""
    run = in_memory(replace(POLICIES["moevement"], ranks=2, sampler="recoverable"), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 9)))
    before = stored(run)
    wrong = replace(run, ranks=1, crash=("compute", 1), log=f"{run.log}.wrong")
    assert live(wrong) == KILLED
    assert "is a sparse window that 2 ranks computed, and this run has 1" in output(wrong)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) > before
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("policy", ["dense", pytest.param("moevement", marks=pytest.mark.slow)])
@pytest.mark.quick("dense-1")
def test_a_lost_node_comes_back_from_its_peer(policy, lost, place):  # noqa: F811
    """Two ranks under DDP, each a node. One is lost with its memory: every bit comes from the other."""
    run = in_memory(replace(POLICIES[policy], ranks=2, replicas=1), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 7)))
    before = stored(run)
    delete_tree(Path(run.memory, f"node_{lost}"))
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) > before
    assert ("peers: other nodes" in output(run)) == (lost == 0), "as rank 0 sees it"
    assert_same_run(run)
    assert left(run) == []


def test_one_more_lost_node_costs_steps_that_are_named(place):  # noqa: F811
    """Two ranks under DDP without copies, each a node. Rank 1's share is gone, with its random numbers."""
    run = in_memory(replace(POLICIES["dense"], ranks=2), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 7)))
    before = stored(run)
    for path in Path(run.memory).rglob("rank_00001"):
        delete_tree(path)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == before
    said = re.search(r"steps (\d+) to (\d+) are lost, .* the part of rank 1 is on no surviving node", output(run))
    assert said is not None, output(run)
    assert int(said[1]) == before + 1
    reached = before + max(recomputed(run))
    assert reached > before + 1
    assert int(said[2]) >= reached - 1, "the newest step may have been on its way into memory"
    assert_same_run(run)
    assert left(run) == []


def test_a_replay_that_diverges_each_time_is_not_begun_for_ever(place):  # noqa: F811
    """Deaths in the middle of it do not count, and the run goes on to its end when the cause is mended."""
    run = in_memory(POLICIES["moevement"], place)
    assert live(replace(run, crash=("compute", 17))) == KILLED
    diverging = replace(run, sabotage="rng not restored")
    for _ in range(MOST_STARTS):
        assert live(replace(run, crash=("compute", 2))) == KILLED, "in the replay"
        assert exit_code(diverging) == 1
        assert "ReplayDivergedError" in output(run)
    assert exit_code(run) == 1
    assert "RecoveryLoopError" in output(run).strip().splitlines()[-1]
    assert main(["memory", "retry", "--directory", run.memory]) == 0
    assert live(run) == 0, output(run)
    assert not list(differences(load(run), undisturbed(run)[0][0]))
