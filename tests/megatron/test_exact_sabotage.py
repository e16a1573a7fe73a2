"""The tests of exactness can fail: leave out one thing of what is loaded, and they do."""

from __future__ import annotations

import shutil

import pytest

from tests.megatron import sabotage
from tests.megatron.exactness import Case, finish, kill, require_exact
from tests.support.megatron_gpt import Setup

MODEL = {"ep": 2, "num_microbatches": 2}
BASES = {
    "dense": Case(
        Setup(**MODEL, precision="bf16", dist_opt=True, expert_bias=True),
        ("Dense", {"every_n_steps": 1}),
        ((1, 5, "train"),),
        ranks=2,
        steps=6,
    ),
    "skipped": Case(
        Setup(**MODEL, precision="fp16", loss_scale=2.0**20),
        ("Dense", {"every_n_steps": 1}),
        ((0, 6, "train"),),
        ranks=2,
    ),
    "windows": Case(
        Setup(**MODEL, precision="bf16", grouped=True), ("MoEvement", {"window": 3}), ((1, 7, "train"),), ranks=2
    ),
}
DIFFERS = r"rank \d: |loss of iteration"
DIVERGED = r"rank \d: |loss of iteration|ReplayDivergedError"
BREAKS = [
    ("dense", sabotage.tracker_not_restored, DIFFERS),
    ("dense", sabotage.generators_not_restored, DIFFERS),
    ("dense", sabotage.master_weights_not_loaded, DIFFERS),
    ("dense", sabotage.compute_weights_not_loaded, DIFFERS),
    ("dense", sabotage.moments_not_loaded, DIFFERS),
    ("dense", sabotage.router_not_loaded, DIFFERS),
    ("dense", sabotage.experts_swapped, DIFFERS),
    ("dense", sabotage.step_count_not_loaded, DIFFERS),
    ("dense", sabotage.buffers_not_loaded, DIFFERS),
    ("dense", sabotage.scheduler_not_loaded, DIFFERS),
    ("skipped", sabotage.loss_scale_not_loaded, DIFFERS),
    ("windows", sabotage.advance_skipped, DIVERGED),
    ("windows", sabotage.replay_one_step_late, DIVERGED),
    ("windows", sabotage.tracker_not_restored, DIVERGED),
    ("windows", sabotage.compute_weights_not_loaded, DIVERGED),
    ("windows", sabotage.master_weights_not_loaded, DIVERGED),
    ("windows", sabotage.experts_swapped, DIVERGED),
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """name of a base -> directory in which its run was killed."""
    found = {}

    def get(name):
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name)
            kill(BASES[name], found[name])
        return found[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_nothing_left_out(name, killed, tmp_path):
    ended = last_life(name, killed, tmp_path, None)
    assert bool(ended.replayed(-1)) == (name == "windows")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "broken", "match"), BREAKS, ids=lambda value: getattr(value, "__name__", None))
def test_one_thing_left_out(name, broken, match, killed, tmp_path):
    with pytest.raises(AssertionError, match=match):
        last_life(name, killed, tmp_path, broken)


def last_life(name, killed, directory, broken):
    shutil.copytree(killed(name), directory, dirs_exist_ok=True)
    case = BASES[name]
    ended = finish(case, directory, broken)
    require_exact(case, directory, ended)
    return ended
