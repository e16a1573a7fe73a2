"""Training that is stopped by an exception or SIGTERM goes on from its newest step, whatever the policy saved of it."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    LIFE_SECS,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    events,
    exit_code,
    free_port,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    recomputed,
    split_lives,
    start,
)
from tests.integration.test_memory_kills import DENSE, in_memory, left
from tests.integration.test_memory_rarely_stored import RARELY, restored
from tests.integration.test_moevement_kills import WINDOWS

POLICIES = {
    "dense every step": replace(DENSE, to_storage=RARELY),
    "dense rarely": replace(DENSE, policy=("dense", 100)),
    "moc": replace(DENSE, policy=("moc", 1), to_storage=RARELY),
    "moevement": replace(WINDOWS, to_storage=RARELY),
}
every_policy = pytest.mark.parametrize("policy", POLICIES)


def said(run: Run) -> str:
    """All that every life said."""
    return Path(f"{run.log}.txt").read_text()


@every_policy
@pytest.mark.parametrize("how", ["raise", "sigterm"])
def test_the_run_goes_on_from_the_newest_step(policy, how, place):  # noqa: F811
    run = in_memory(POLICIES[policy], place)
    for n in (9, 4):
        before = len(events(run))
        assert exit_code(replace(run, crash=(how, n))) == (how == "raise"), "Lightning's own for SIGTERM is 0"
        assert not Path(run.out).exists()
        done = [line["step"] for line in events(run)[before:] if line["event"] == "batch"][-1]
        assert f"keeps its state of step {done} in memory" in said(run)
    assert live(run) == 0, output(run)
    assert restored(run) == done
    assert split_lives(events(run))[-1][0].get("lost", 0) == 0
    assert_same_run(run)
    assert_promises_kept(run)
    assert_store_sound(run, ended=True)
    assert max(recomputed(run)) <= 1
    assert left(run) == []


def lose_rank_1(run: Run, n: int) -> list[int]:
    """Exit codes of two ranks under DDP: the second dies at its ``n``-th backward pass, the first one hears of it."""
    environment = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "lives",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = [
        start(
            replace(run, crash=("forward", n) if rank else None),
            rank,
            {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            process.join(LIFE_SECS)
        return [process.exitcode for process in started]
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


@pytest.mark.parametrize("n", [9, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["moc", "dense every step"])
def test_no_expert_is_stale_that_a_data_parallel_rank_has(policy, n, place):  # noqa: F811
    """MoC saves one expert of four at each step: the rank that lives on seals its own, and those of the other one."""
    run = in_memory(replace(POLICIES[policy], ranks=2), place)
    assert lose_rank_1(run, n) == [1, KILLED]
    assert f"keeps its state of step {n - 1} in memory" in said(run)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == n - 1
    assert split_lives(events(run))[-1][0].get("lost", 0) == 0
    assert_same_run(run)
    assert left(run) == []


def test_a_torn_step_is_not_sealed(place):  # noqa: F811
    """An exception in the middle of an update leaves neither the old step nor the new one."""
    run = in_memory(POLICIES["dense every step"], place)
    assert exit_code(replace(run, sabotage="update fails")) == 1
    assert "keeps its state" not in said(run)
    assert "the newest step is not sealed after RuntimeError: parameters are between two steps" in said(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)


def test_tensors_that_appeared_without_a_checkpoint_are_sealed(place):  # noqa: F811
    run = in_memory(replace(POLICIES["dense rarely"], beside=("rebinding",)), place)
    assert exit_code(replace(run, crash=("raise", 9))) == 1
    assert "keeps its state of step 8 in memory" in said(run)
    assert live(run) == 0, output(run)
    assert restored(run) == 8
    assert_same_run(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_stopped_at_random_times(seed, place):  # noqa: F811
    """Of whatever moment, in whatever part of a step: what is sealed is a state that the run has had."""
    rng = random.Random(seed)
    run = in_memory(replace(POLICIES[rng.choice(["dense rarely", "moevement"])], epochs=4), place)
    for _ in range(10):
        process = start(run)
        seen = len(events(run))
        try:
            while process.is_alive() and len(events(run)) == seen:
                time.sleep(0.002)
            time.sleep(rng.uniform(0.0, 0.3))
            if process.is_alive():
                os.kill(process.pid, signal.SIGTERM)
            process.join(LIFE_SECS)
        finally:
            process.close()
        if Path(run.out).exists():
            break
    if not Path(run.out).exists():
        assert live(run) == 0, output(run)
    assert_same_run(run)
    assert left(run) == []
