"""kill -9 of the only process, anywhere: the run that comes back ends like the run that never failed.

Equal means to the last bit: parameters, buffers, optimizer state, schedulers, random numbers, and the
loss of every batch.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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
    split_lives,
)

DENSE_1 = Run(None, policy=("dense", 1), epochs=3)
DENSE_3 = Run(None, policy=("dense", 3), epochs=4)

# Each chain is one run that dies again and again, in every phase once. The numbers differ so that a
# phase is met in different files of a checkpoint, at the very first and at later ones, and while an old
# life's rubbish is being cleared away.
CHAINS = {
    "dense-1-early": (DENSE_1, ["compute 3", "copy 1", "write 1", "fsync 1", "rename 1", "manifest 1", "gc 1"]),
    "dense-1-later": (DENSE_1, ["write 6", "manifest 3", "gc 6", "fsync 11", "rename 7", "copy 4", "compute 5"]),
    "dense-1-last": (DENSE_1, ["gc 3", "rename 9", "compute 2", "manifest 2", "fsync 6", "write 12", "copy 2"]),
    "dense-3-early": (DENSE_3, ["manifest 1", "write 2", "fsync 3", "rename 2", "gc 1", "copy 1", "compute 4"]),
    "dense-3-later": (DENSE_3, ["rename 4", "fsync 8", "gc 2", "write 4", "manifest 2", "compute 5", "copy 2"]),
}


def _run_chain(run: Run, chain: list[str]) -> None:
    for number, text in enumerate(chain):
        phase, n = text.split()
        code = live(replace(run, crash=(phase, int(n))))
        assert code == KILLED, f"life {number}: {text} was never reached\n{output(run)}"
        assert_store_sound(run, ended=False)
    assert live(run) == 0
    assert_store_sound(run, ended=True)
    assert_promises_kept(run)
    assert_same_run(run)


@pytest.mark.parametrize("name", ["dense-1-early", "dense-1-later", "dense-3-later"])
@pytest.mark.quick("dense-1-early", "dense-3-later")
def test_killed_in_every_phase(name, place):  # noqa: F811
    run, chain = CHAINS[name]
    _run_chain(placed(run, place), chain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense-1-last", "dense-3-early"])
def test_killed_in_every_phase_at_other_moments(name, place):  # noqa: F811
    run, chain = CHAINS[name]
    _run_chain(placed(run, place), chain)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["compute", "copy", "write", "fsync", "rename", "manifest", "gc"])
@pytest.mark.parametrize("n", range(1, 13))
@pytest.mark.parametrize("run", [DENSE_1, DENSE_3], ids=["dense-1", "dense-3"])
def test_killed_once(run, phase, n, place):  # noqa: F811
    run = placed(run, place)
    code = live(replace(run, crash=(phase, n)))
    if code == 0:
        pytest.skip(f"{phase} happens fewer than {n} times")
    assert_store_sound(run, ended=False)
    assert live(run) == 0
    assert_promises_kept(run)
    assert_same_run(run)


def _killed_at_random(run: Run, seed: int, kills: int) -> None:
    print(f"seed {seed}")
    killed_at_random(run, random.Random(seed), kills=kills, most_secs=0.25)
    assert live(run) == 0
    assert_promises_kept(run)
    assert_same_run(run)


def test_killed_at_random_times(place):  # noqa: F811
    _killed_at_random(placed(DENSE_1, place), seed=random.SystemRandom().randrange(1 << 32), kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("run", [DENSE_1, DENSE_3], ids=["dense-1", "dense-3"])
def test_killed_at_random_times_often(run, seed, place):  # noqa: F811
    _killed_at_random(placed(run, place), seed, kills=8)


def test_killed_while_coming_back(place):  # noqa: F811
    """The n-th read of the store kills; twice in a row, at several places of the resume."""
    run = placed(DENSE_1, place)
    assert live(replace(run, crash=("compute", 12))) == KILLED
    for n in (1, 2, 3, 5, 9, 9, 12):
        assert live(replace(run, crash=("read", n))) == KILLED, output(run)
        assert_store_sound(run, ended=False)
    assert len(split_lives(events(run))) == 1, "no life came through the resume"
    assert live(run) == 0
    assert split_lives(events(run))[-1][0]["step"] >= 8
    assert_promises_kept(run)
    assert_same_run(run)


@pytest.mark.slow
def test_killed_by_hand_in_a_process_of_its_own(place):  # noqa: F811
    """The whole way of a user: an interpreter of its own each time, and SIGKILL from outside."""
    run = placed(DENSE_1, place)
    command = [sys.executable, "-m", "tests.integration.crash_run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    first = subprocess.run([*command, replace(run, crash=("manifest", 5)).to_json()], env=environment, timeout=400)
    assert first.returncode == KILLED
    subprocess.run([*command, run.to_json()], env=environment, timeout=400, check=True)
    assert split_lives(events(run))[1][0]["step"] >= 4
    assert_same_run(run)


@pytest.mark.parametrize("policy", [("dense", 1), ("moevement", 3)], ids=["dense", "windows"])
def test_the_good_checkpoint_outlives_the_damaged_one_that_was_passed_over(policy, place):  # noqa: F811
    """The run came back to the older of two, and its next one is damaged too: the older one must still be there."""
    run = placed(replace(DENSE_1, policy=policy, callback={"when_busy": "wait"}), place)
    assert live(replace(run, crash=("compute", 14))) == KILLED
    damaged, good = (manifest.directory for manifest in manifests(run.store)[:2])
    _damage_one_shard(run.store, damaged)
    assert live(replace(run, crash=("manifest", 2))) == KILLED  # one checkpoint of the new life, and not a second
    newest = manifests(run.store)[0].directory
    assert newest not in (damaged, good)
    assert good in committed(run.store)
    _damage_one_shard(run.store, newest)
    assert live(run) == 0, output(run)
    assert_same_run(run)


def _damage_one_shard(store: str, directory: str) -> None:
    path = next(Path(store, directory).glob("*_non_expert.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
