"""A run that is really killed, beside the simulation of it from its own profile."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from benchmarks import sim_reality
from benchmarks.sim_reality_compare import compare, final_step, measured, piped, trace
from benchmarks.sim_reality_contestants import CONTESTANTS
from benchmarks.sim_reality_runs import Life, RealRun, kill_times, run, steps_again
from moe_ckpt_sim.failures.failures import FailureEvent
from moe_ckpt_sim.planner.profile import read_profile
from tests.sim.builders import scenario
from tests.support.inprocess_job import has_extension

BY_NAME = {one.name: one for one in CONTESTANTS}


def real_run(lives, secs=100.0, **more):
    return RealRun(None, secs, 0.0, (), tuple(lives), 0.0, 0.0, 0, 0.0, **more)


def test_kills_are_the_same_for_a_seed_and_within_the_time():
    times = kill_times(2, 18.0, 210.0)
    assert len(times) >= 10
    assert times == kill_times(2, 18.0, 210.0) != kill_times(3, 18.0, 210.0)
    assert list(times) == sorted(times)
    assert times[-1] < 210
    assert kill_times(2, 18.0, 400.0)[: len(times)] == times


def test_what_was_seen_of_lives_adds_up():
    lives = [
        Life(-5.0, -1.0, tuple((step, step - 1.0) for step in range(1, 12)), 10.5),  # reached 11, restored at 8
        Life(10.5, None, (), 12.0),  # killed before it trained
        Life(12.0, 15.0, ((9, 16.5), (10, 17.5), (11, 18.5)), 19.0),
    ]
    told = measured(real_run(lives, secs=19.0), clean_secs=1.0)
    assert told.steps == 10
    assert told.ettr == pytest.approx(10 / 19)
    assert told.down == pytest.approx(1.5 + 3.5)  # to the next kill; to an iteration before 16.5
    assert told.lost == pytest.approx(3 + 0.5 + 0.5)  # steps 9 to 11, and two parts
    assert told.slowed == pytest.approx(0)


def step(number, **more):
    return {"step": number, "train/loss": 0.0, **more}


def test_rank_iterations_that_were_done_before():
    """Rank 0 is the witness. In the second life rank 1 alone goes back by two, in the third both do by one."""
    witness = [[step(1), step(2), step(3)], [{"event": "training"}, step(4)], [step(4), step(5)]]
    other = [[step(1), step(2)], [step(2), step(3), step(4)], [step(4)]]
    assert steps_again([witness, other], 0) == 2 + 2
    assert steps_again([witness], 0) == 1


def test_who_fails_in_the_simulation():
    real = real_run((), took_node=(False, True), victims=(1, 1))
    real = replace(real, kills=(5.0, 9.0))
    assert trace(BY_NAME["peers"], real).recorded == (
        FailureEvent(5.0, 1, process=True),
        FailureEvent(9.0, 1),
        FailureEvent(9.0, 1, joins=True),
    )
    both = replace(real, took_node=(False, False), victims=(2, 0))
    assert [event.node for event in trace(BY_NAME["localized"], both).recorded] == [2, 0], "a stage is a node"
    assert [event.node for event in trace(BY_NAME["survivors"], real).recorded] == [0, 0, 0]
    moved = trace(BY_NAME["localized"], both, seed=1).recorded
    assert [0 < abs(event.at_secs - at) <= 2 for event, at in zip(moved, (5.0, 9.0), strict=True)] == [True, True]


def test_a_stage_alone_has_no_bubbles():
    """Eight micro-batches through four stages take eleven slots, of which one stage fills eight."""
    known = scenario()
    found = piped(known, BY_NAME["localized"])
    assert found.iteration.stage_secs == pytest.approx(8 / 11 * known.iteration.open_secs)
    assert found.batch.micro_batches(1) == 8
    assert piped(known, BY_NAME["in_place"]) is known


@pytest.mark.slow
@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda one: one.name)
def test_simulation_is_near_a_run_that_was_killed(tmp_path, contestant, monkeypatch):
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):  # which processes that forks come from are told
        monkeypatch.setenv(name, os.environ.get(name, "1" if name == "OMP_NUM_THREADS" else ""))
    if contestant.loop is not None:
        pytest.importorskip("megatron.core", reason="pip install 'moe_ckpt[megatron]'")
    if contestant.in_place and not has_extension():
        pytest.skip("pip install 'moe_ckpt[inprocess]'")
    kills = (10.0, 34.0, 36.0)
    real = run(contestant, tmp_path / "run", kills, 62.0, seed=1)
    assert len(real.lives) == 4
    late = 20 if contestant.in_place else 2  # in place a kill waits until training is back
    assert all(asked <= sent < asked + late for asked, sent in zip(kills, real.kills, strict=True))
    profile = read_profile(real.profile_path)
    assert sum(1 for life in profile.lives if life.steps) == sum(1 for life in real.lives if life.steps) >= 2
    assert final_step(real) > 0
    found = compare(contestant, real, profile.pace.iteration_secs, 60.0)
    # Few failures, and other programs beside it: what a restart takes may be twice another's.
    assert abs(found.difference) < 0.25
    assert found.real.down == pytest.approx(found.simulated.down, rel=0.4)
    assert sum(found.parts.values()) == pytest.approx(found.difference)
    assert found.real.snapshot_bytes == pytest.approx(found.simulated.snapshot_bytes, rel=0.3)
    if contestant.name == "localized":
        assert 0 < found.real.again <= 3 * 2 * 4, "three failures, one rank each, at most two windows"
        assert found.real.logged == found.real.brought == found.simulated.logged == 8 * 2 * 32 * 128 * 4
        assert found.real.log_held == pytest.approx(found.simulated.log_held, rel=0.3)


@pytest.mark.slow
def test_the_command_writes_what_it_found(tmp_path, capsys):
    results = tmp_path / "found.json"
    args = ["--minutes", "0.4", "--mtbf", "10", "--calibration", "5", "--policies", "dense", "--results", str(results)]
    assert sim_reality.main(args) in (0, 1)
    body = json.loads(results.read_text())
    (one,) = body["runs"]
    assert one["kills"]
    assert body["settings"]["mtbf"] == 10
    text = results.with_suffix(".md").read_text()
    assert f"{one['difference']:+.2%}" in text
    assert str(tmp_path) not in text + results.read_text()
    assert "Dense every 10" in capsys.readouterr().out
