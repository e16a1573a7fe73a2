"""MoEvement under kill -9, wherever and however often: in every phase of a window, around windows, and during replay.

How the run is set up is the matter of ``test_moevement_setups``; here it is always the same.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    committed,
    events,
    killed_at_random,
    live,
    manifests,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    recomputed,
    split_lives,
)

W = 3
CLIPPED = {"gradient_clip_val": 0.3}
WINDOWS = Run(None, policy=("moevement", W), epochs=3, callback={"when_busy": "wait"}, trainer=CLIPPED)
LAG = 2
"""Steps that may pass from a window's last step to its commit: as many snapshots may be under way."""

# Each chain is one run that dies again and again, in every phase once: in its very first window and before, in the
# middle of a window, and while it computes a window again.
CHAINS = {
    "early": ["compute 1", "copy 1", "write 1", "fsync 2", "rename 3", "manifest 1", "compute 3", "gc 1", "manifest 2"],
    "later": ["write 20", "manifest 3", "gc 6", "fsync 29", "rename 17", "copy 7", "compute 5", "compute 2"],
    "last": ["gc 12", "rename 41", "compute 4", "manifest 3", "fsync 16", "write 12", "copy 5"],
}


def _die(run: Run, crash: str) -> None:
    phase, n = crash.split()
    code = live(replace(run, crash=(phase, int(n))))
    assert code == KILLED, f"{crash} was never reached\n{output(run)}"
    assert_store_sound(run, ended=False)


def _end(run: Run) -> None:
    assert live(run) == 0, output(run)
    assert_store_sound(run, ended=True)
    assert_promises_kept(run)
    assert_same_run(run)


def _assert_bounded(run: Run, size: int = W) -> None:
    """The issue's bound, 2 W, holds as soon as a commit is done within the step after the window's last one."""
    assert max(recomputed(run), default=0) <= 2 * size - 1 + LAG, recomputed(run)


@pytest.mark.parametrize("name", ["early", pytest.param("later", marks=pytest.mark.slow)])
def test_killed_in_every_phase(name, place):  # noqa: F811
    run = placed(WINDOWS, place)
    for crash in CHAINS[name]:
        _die(run, crash)
    _end(run)
    _assert_bounded(run)


@pytest.mark.slow
def test_killed_in_every_phase_at_other_moments(place):  # noqa: F811
    run = placed(replace(WINDOWS, epochs=6), place)
    for crash in CHAINS["last"]:
        _die(run, crash)
    _end(run)


def test_killed_twice_in_a_row_during_the_replay(place):  # noqa: F811
    """The window is still there each time, and no later checkpoint stands in for it."""
    run = placed(WINDOWS, place)
    _die(run, "compute 17")
    before = committed(run.store)
    for batch in (1, 2):
        _die(run, f"compute {batch}")
        assert committed(run.store) == before
    lives = split_lives(events(run))
    assert [life[0]["step"] for life in lives[1:]] == [int(before[-1].split("_")[1].split(".")[0])] * 2
    assert all(line["step"] < lives[1][0]["step"] for life in lives[1:] for line in life if line["event"] == "batch")
    _end(run)
    _assert_bounded(run)


def test_killed_while_coming_back(place):  # noqa: F811
    """The n-th read of the store kills: while the window is verified, loaded, and read from during the replay."""
    run = placed(WINDOWS, place)
    _die(run, "compute 12")
    for n in (1, 4, 9, 16):
        assert live(replace(run, crash=("read", n))) == KILLED, output(run)
        assert_store_sound(run, ended=False)
    _end(run)


@pytest.mark.parametrize("phase", ["write", "copy"])
@pytest.mark.quick("copy")
def test_killed_in_the_very_first_window(phase, place):  # noqa: F811
    """Only step 0 is committed, which is whole."""
    run = placed(WINDOWS, place)
    _die(run, {"write": "write 9", "copy": "copy 3"}[phase])
    assert [manifest.step for manifest in manifests(run.store)] == [0]
    _end(run)
    assert split_lives(events(run))[-1][0]["step"] == 0


@pytest.mark.parametrize("moment", ["gc 3", "compute 8"])
@pytest.mark.quick("gc 3")
def test_killed_between_two_windows(moment, place):  # noqa: F811
    """Right after the commit of steps 4 to 6, or in the first step of the window after it."""
    run = placed(WINDOWS, place)
    _die(run, moment)
    _end(run)


def test_a_finished_run_started_again_ends_as_it_ended(place):  # noqa: F811
    """Random numbers too, though no step is trained that would put them back."""
    run = placed(WINDOWS, place)
    assert live(run) == 0, output(run)
    _end(run)


def _killed_at_random(run: Run, seed: int, kills: int) -> None:
    print(f"seed {seed}")
    killed_at_random(run, random.Random(seed), kills=kills, most_secs=0.4)
    _end(run)
    _assert_bounded(run, run.policy[1])


def test_killed_at_random_times(place):  # noqa: F811
    _killed_at_random(placed(WINDOWS, place), seed=random.SystemRandom().randrange(1 << 32), kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [2, 3, 5])
def test_killed_at_random_times_often(size, seed, place):  # noqa: F811
    _killed_at_random(placed(replace(WINDOWS, policy=("moevement", size)), place), seed, kills=6)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["compute", "copy", "write", "fsync", "rename", "manifest", "gc"])
@pytest.mark.parametrize("n", range(1, 17))
def test_killed_once(phase, n, place):  # noqa: F811
    run = placed(WINDOWS, place)
    if live(replace(run, crash=(phase, n))) == 0:
        pytest.skip(f"{phase} happens fewer than {n} times")
    assert_store_sound(run, ended=False)
    _end(run)
    _assert_bounded(run)
