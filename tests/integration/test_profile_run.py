"""Real runs write their profile: Lightning on one process and two, Megatron-Core, killed and started again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from moe_ckpt.policies import MoEvement
from moe_ckpt_sim.failures.failures import Poisson
from moe_ckpt_sim.planner.profile import read_profile, scenario_from
from moe_ckpt_sim.run.system import System
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    events,
    live,
    live_ranks,
    manifests,
    output,
    place,
    placed,
    split_lives,
    start,
)
from tests.support.processes import run_ranks
from tests.support.waiting import retry_until

__all__ = ["place"]

MEGATRON = "tests.support.megatron_warm"


def test_lives_of_a_killed_run_are_all_there(place):
    path = str(place / "profile.json")
    run = placed(Run(None, policy=("moc", 1), crash=("manifest", 6), callback={"profile": path}), place)
    began = time.time()
    assert live(run) == KILLED
    killed = time.time()
    found = read_profile(path)
    (first,) = found.lives
    assert not first.finished
    run = placed(Run(None, policy=("moc", 1), callback={"profile": path}), place)
    assert live(run) == 0
    one, two = read_profile(path).lives
    assert one == first  # what the dead wrote is kept as it is
    assert began - 0.1 <= one.started_unix_secs < one.training_unix_secs <= one.last_unix_secs <= killed
    assert killed - 0.1 <= two.started_unix_secs < two.opened_unix_secs < two.ready_unix_secs
    lives = split_lives(events(run))
    assert two.restored_step == lives[1][0]["step"]
    assert (two.first_step, two.last_step) == (two.restored_step + 1, 20)
    assert two.finished
    assert 0 < two.load_secs < two.ready_unix_secs - two.started_unix_secs
    routed = sum(sum(map(sum, line["routed"])) for line in lives[1] if line["event"] == "batch")
    assert two.assignments == routed
    run_id = manifests(run.store)[0].run_id
    assert (one.run_id, two.run_id) == (run_id, run_id)
    assert [name for name in os.listdir(place) if name.endswith(".tmp")] == []


def test_a_kill_at_any_moment_leaves_a_readable_profile(place):
    path = str(place / "profile.json")
    for attempt in range(3):
        run = placed(Run(None, epochs=10_000, callback={"profile": path}), place, f"run{attempt}")
        began = time.time()
        _killed_in_life(run, path, attempt, 0.3 * attempt)
        found = read_profile(path)
        assert len(found.lives) == attempt + 1
        newest = [line for line in events(run) if line["event"] == "batch"][-1]["step"]
        assert 0 < found.lives[-1].last_step <= newest
        assert found.lives[-1].last_unix_secs > began


def _killed_in_life(run: Run, path: str, number: int, secs: float) -> None:
    """So long after the profile tells of a step of this life."""

    def trains() -> bool:
        lives = read_profile(path).lives if os.path.exists(path) else ()
        return len(lives) > number and lives[number].last_step is not None

    process = start(run)
    try:
        assert retry_until(trains, 120.0), output(run)
        process.join(secs)
    finally:
        process.kill()
        process.join()
        process.close()


def test_steps_computed_again_are_told_apart_from_loading(place):
    path = str(place / "profile.json")
    run = placed(Run(None, policy=("moevement", 3), crash=("compute", 12), callback={"profile": path}), place)
    assert live(run) == KILLED
    run = placed(Run(None, policy=("moevement", 3), callback={"profile": path}), place)
    assert live(run) == 0
    one, two = read_profile(path).lives
    assert (one.restored_step, one.load_secs) == (None, None)
    assert one.ready_unix_secs == one.training_unix_secs
    assert one.last_step < two.restored_step + 3
    assert two.first_step == two.restored_step + 1
    assert (one.plan_secs, one.replayed_steps, two.replayed_steps) == (None, 0, 2)
    assert 0 < two.plan_secs <= two.load_secs
    assert two.training_unix_secs > two.ready_unix_secs > two.opened_unix_secs + two.load_secs - 0.01
    assert read_profile(path).restarts.replay_secs == two.training_unix_secs - two.ready_unix_secs


def test_two_ranks_agree_on_one_profile(place):
    path = str(place / "profile.json")
    run = placed(Run(None, ranks=2, policy=("moevement", 3), callback={"profile": path, "when_busy": "wait"}), place)
    assert live_ranks(run) == [0, 0]
    found = read_profile(path)
    (only,) = found.lives
    assert (only.ranks, only.ranks_per_node, only.pp, only.dp, only.ep) == (2, 2, 1, 2, 1)
    batches = [[line for line in events(run, rank) if line["event"] == "batch"] for rank in (0, 1)]
    assert only.steps == len(batches[0]) == 10
    assert only.assignments == sum(sum(map(sum, line["routed"])) for rank in batches for line in rank)
    assert found.tokens_per_step * only.steps * 2 * 2 == only.assignments  # two layers, top-2
    cluster = found.cluster()
    assert (cluster.nodes, cluster.gpus) == (1, 2)
    assert cluster.storage_bytes_per_sec == 2 * only.persist_bytes_per_sec > 0
    assert found.restarts.restart_secs > 0
    # What the simulator would cut its windows from is what the run cut its own from.
    scenario = scenario_from(found, Poisson(3600.0), System("moevement", MoEvement(window=3)))
    full = sum(size.full for size in scenario.layout.model.sizes(scenario.precision).values())
    saved = sum(file.nbytes - file.header_nbytes for file in _dense(run).files)
    assert full <= saved <= full * 1.2  # side tensors and padding besides


def _dense(run: Run):
    """The last checkpoint, which a run that ended well leaves complete."""
    newest = manifests(run.store)[0]
    assert not newest.window
    assert len({record.step for record in newest.operators.values()}) == 1
    return newest


def test_fitting_on_in_one_process_begins_a_life_of_its_own(tmp_path):
    from tests.integration.crash_run import build, loaders

    run = placed(Run(None, epochs=1, callback={"profile": str(tmp_path / "p.json")}), tmp_path)
    trainer, module, _ = build(run)
    trainer.fit(module, *loaders(run))
    between = time.time()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, *loaders(run))
    one, two = read_profile(tmp_path / "p.json").lives
    assert one.finished
    assert two.finished
    assert one.started_unix_secs < one.last_unix_secs - 0.1
    assert one.last_unix_secs <= two.started_unix_secs <= between + 0.5
    assert (one.last_step, two.first_step) == (10, 11)


def _megatron(rank: int, world_size: int, directory: str) -> None:
    from tests.support.megatron_gpt import Setup
    from tests.support.megatron_run import Life, live

    setup = Setup(pp=2, ep=2, dist_opt=True, precision="bf16")
    options = {"profile": f"{directory}/p.json"}
    live(rank, world_size, Life(f"{directory}/store", 5, setup, ("MoC", {"k": 1}), options=options))


@pytest.mark.slow
def test_megatron_tells_stages_and_expert_parallelism(tmp_path: Path):
    for _ in range(2):
        run_ranks(_megatron, 4, str(tmp_path), preload=MEGATRON)
    found = read_profile(tmp_path / "p.json")
    one, two = found.lives
    assert (one.ranks, one.pp, one.dp, one.ep) == (4, 2, 1, 2)
    assert (one.first_step, one.last_step) == (1, 5)
    assert two.restored_step == 5
    assert two.load_secs > 0
    assert {row.stage for row in found.profile.model.operators} == {0, 1}
    layout = found.layout()
    assert layout.placement.stages == (2, 2)
    assert layout.placement.expert_ranks == 1
    assert [sorted(set(row)) for row in layout.placement.owners] in ([[0, 1]] * 2 + [[2, 3]] * 2, [[0, 1], [2, 3]])
    assert sum(size.full for size in found.sizes.values()) > sum(size.compute for size in found.sizes.values()) > 0
