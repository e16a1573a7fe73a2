"""A gradient log under Megatron: a killed job goes on from the newest iteration by optimizer steps, bit for bit."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

from moe_ckpt.errors import MoECheckpointError
from moe_ckpt.gradient_log import megatron as log_megatron
from moe_ckpt.gradient_log import optimizers, replaying
from moe_ckpt.gradient_log.returning import StoredLog
from tests.megatron.exactness import (
    LIFE_SECS,
    WARM,
    Case,
    finish,
    kill,
    life_of,
    require_equal,
    require_exact,
    require_killed,
    start_life,
    uninterrupted,
)
from tests.megatron.test_exact import (
    BF16,
    EXPERTS_DATA,
    GROUPED,
    OVERLAPPED,
    PIPELINE_EXPERTS,
    SHARDED,
    SKIPS,
    TENSOR_EXPERTS,
)
from tests.support import megatron_gpt
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import live
from tests.support.processes import run_ranks, start_ranks

LOG = ("GradientLog", {"window": 3})
MEMORY = {"storage_every": 1000}
COPIES = {"replicas": 1, **MEMORY}


def logged(setup: dict, kills=((2, 7, "train"),), **more) -> Case:
    return Case(Setup(**setup), LOG, kills, memory=True, **{"copies": MEMORY, "steps": 8, **more})


CASES = {
    "ep2-dp2": logged(EXPERTS_DATA),
    "ep2-dp2-sharded": logged({**EXPERTS_DATA, **GROUPED, **SHARDED}),
    "ep2-dp2-overlapped": logged({**EXPERTS_DATA, **BF16, **OVERLAPPED, "expert_bias": True}),
    "ep2-dp2-bf16": logged({**EXPERTS_DATA, **GROUPED}, kills=((0, 5, "train"), (3, 7, "copy"))),
    "pp2-ep2": logged({**PIPELINE_EXPERTS, **BF16, "tied": True}),
    "alone-sharded": logged({**GROUPED, **BF16, **SHARDED}, kills=((0, 7, "train"),), ranks=1),
    "tp2-ep2-skipped": logged({**TENSOR_EXPERTS, **SKIPS, **SHARDED}, kills=((1, 8, "train"),), steps=9),
}
FAST = ("ep2-dp2-sharded",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in CASES])
def test_a_killed_job_goes_on_from_the_newest_iteration(name, tmp_path):
    case = CASES[name]
    kill(case, tmp_path)
    ended = finish(case, tmp_path)
    _, at, phase = case.kills[-1]
    assert ended.resumed[-1] >= at - 1 - (phase != "train"), "all that was sealed on every rank"
    remade = [result["remade"] for result in ended.results]
    assert len(set(remade)) == 1
    assert remade[0][0] < remade[0][1] == ended.resumed[-1], "updates were made once more"
    assert not any(ended.replayed(life) for life in range(len(ended.lives))), "nothing is computed again"
    require_exact(case, tmp_path, ended)


@pytest.mark.slow
def test_a_window_is_computed_again_under_a_gradient_log(tmp_path):
    """The policy of a run changes, and the newest checkpoint is a window."""
    case = replace(CASES["ep2-dp2-sharded"], policy=("MoEvement", {"window": 3}), kills=((2, 8, "train"),))
    kill(case, tmp_path)
    case = replace(case, policy=LOG)
    ended = finish(case, tmp_path)
    assert ended.replayed(-1), "a window was taken"
    require_exact(case, tmp_path, ended)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("name", ["ep2-dp2", "ep2-dp2-sharded"])
def test_a_lost_node_comes_back_from_its_peer(name, lost, tmp_path):
    case = replace(CASES[name], copies=COPIES)
    kill(case, tmp_path)
    delete_tree(tmp_path / "memory" / f"node_{lost}")
    ended = finish(case, tmp_path)
    assert ended.resumed[-1] >= 5
    assert all(result["remade"] is not None for result in ended.results)
    require_exact(case, tmp_path, ended)


def _dies_in_the_replay(rank: int, loads: int) -> None:
    """In each rank's process: ``rank`` is killed when anchors of that many steps are there, updates made between."""
    load, calls = StoredLog.load, []

    def deadly(self, step: int) -> None:
        load(self, step)
        calls.append(step)
        if len(calls) == loads and torch.distributed.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    StoredLog.load = deadly


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep2-dp2", "ep2-dp2-sharded", "pp2-ep2"])
def test_killed_in_the_replay_twice_it_is_made_again(name, tmp_path):
    """Other ranks in other lives, each behind an update; nothing that the replay needs is gone."""
    case = CASES[name]
    kill(case, tmp_path)
    for number, (rank, loads) in enumerate([(2, 2), (1, 3)], start=len(case.kills)):
        dies = partial(_dies_in_the_replay, rank, loads)
        life = replace(life_of(case, tmp_path), seed=1 + number, number=number, sabotage=dies)
        outcomes = start_ranks(live, case.ranks, life, timeout=LIFE_SECS, preload=WARM)
        assert outcomes[rank].exitcode == -signal.SIGKILL, outcomes
        assert not any(outcome.ok for outcome in outcomes)
    ended = finish(case, tmp_path)
    remade = [result["remade"] for result in ended.results]
    assert len(set(remade)) == 1
    assert remade[0][0] < remade[0][1] == ended.resumed[-1] == 6
    require_exact(case, tmp_path, ended)


def _no_finish() -> None:
    log_megatron.weights_from_masters = lambda *_: None


def _no_hyperparameters() -> None:
    optimizers._set = lambda optimizer, update: None


def _skipped_steps_made() -> None:
    """A step that the loss scaler skipped is made with gradients of zero, as if there had been none."""
    counts = replaying._set_counts

    def wrong(log, step, replay, stepped) -> None:
        if step != log.steps[0] and not log.plain(step)["updates"]:
            for optimizer in replay.optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        counts(log, step, replay, stepped)

    replaying._set_counts = wrong


def _anchors_too_early() -> None:
    gradients, load = StoredLog.gradients, StoredLog.load

    def loaded_first(self, step):
        load(self, step)
        return gradients(self, step)

    StoredLog.gradients = loaded_first
    StoredLog.load = lambda self, step: load(self, step) if step == self.steps[0] else None


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [_no_finish, _no_hyperparameters, _anchors_too_early])
def test_what_an_exact_return_needs(wrong, tmp_path):
    """Weights from masters; learning rates of that time; anchors at their own steps."""
    case = CASES["alone-sharded"]
    kill(case, tmp_path)
    ended = finish(case, tmp_path, wrong)
    with pytest.raises(AssertionError):
        require_exact(case, tmp_path, ended)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alone-sharded", "ep2-dp2", "ep2-dp2-sharded", "ep2-dp2-overlapped"])
def test_gradients_rounded_for_everybody(name, tmp_path):
    case = replace(CASES[name], policy=(LOG[0], {**LOG[1], "grad_dtype": "bf16"}))
    (tmp_path / "run").mkdir()
    (tmp_path / "truth").mkdir()
    kill(case, tmp_path / "run")
    ended = finish(case, tmp_path / "run")
    assert all(result["remade"] is not None for result in ended.results)
    truth = finish(replace(case, kills=()), tmp_path / "truth")
    require_equal(truth.results, ended.results)
    as_consumed = uninterrupted(case.setup, case.ranks, case.steps)
    with pytest.raises(AssertionError, match="tensors"):
        require_equal(as_consumed, ended.results)


def _clips() -> None:
    """Weights are clipped between ``optimizer.step()`` and ``after_step``."""
    update = megatron_gpt.update

    def clipped(built):
        made = update(built)
        with torch.no_grad():
            for parameter in (each for chunk in built.chunks for each in chunk.parameters() if each.dim() > 1):
                parameter.clamp_(-0.04, 0.04)
        return made

    megatron_gpt.update = clipped


@pytest.mark.parametrize("name", [pytest.param("alone-sharded", marks=pytest.mark.slow), "alone"])
def test_weights_that_are_clipped_behind_the_update(name, tmp_path):
    case = logged({"layers": 2}, ((0, 7, "train"),), ranks=1) if name == "alone" else CASES[name]
    (tmp_path / "run").mkdir()
    (tmp_path / "truth").mkdir()
    life = replace(life_of(case, tmp_path / "run"), kill=case.kills[0], sabotage=_clips)
    require_killed(start_life(case, life), case.kills[0])
    ended = finish(case, tmp_path / "run", _clips)
    assert ended.resumed[-1] >= 5
    truth = finish(replace(case, kills=()), tmp_path / "truth", _clips)
    require_equal(truth.results, ended.results)


def _attach_refused(rank, world_size, directory, setup, of_config, match):
    built = megatron_gpt.build(setup, seed=1)
    from moe_ckpt import Memory, megatron
    from moe_ckpt.policies import GradientLog

    for chunk in built.chunks:
        vars(chunk.config).update(of_config)
    with pytest.raises(MoECheckpointError, match=match):
        megatron.attach(
            built.chunks,
            built.optimizer,
            built.scheduler,
            policy=GradientLog(window=3),
            dirpath=f"{directory}/store",
            memory=Memory(directory=directory, storage_every=1000),
        )


@pytest.mark.parametrize(
    ("setup", "of_config", "match"),
    [
        (Setup(layers=2), {"qk_clip": True}, "GradientLog and Megatron's qk_clip contradict each other"),
        (Setup(layers=2, pp=2, mtp=1, tied=True), {}, "an output layer that nothing reads"),
    ],
    ids=["qk_clip", "tied embeddings"],
)
def test_models_are_refused_by_name_on_all_ranks(tmp_path, setup, of_config, match):
    run_ranks(_attach_refused, setup.pp, str(tmp_path), setup, of_config, match, preload=WARM)


@pytest.mark.slow
def test_skipped_steps_must_stay_skipped(tmp_path):
    """Iteration 6 overflows, between the oldest anchor and the kill."""
    case = logged({**SKIPS, **SHARDED}, kills=((0, 8, "train"),), steps=9, ranks=1)
    (tmp_path / "right").mkdir()
    kill(case, tmp_path / "right")
    require_exact(case, tmp_path / "right", finish(case, tmp_path / "right"))
    kill(case, tmp_path)
    ended = finish(case, tmp_path, _skipped_steps_made)
    with pytest.raises(AssertionError):
        require_exact(case, tmp_path, ended)


@pytest.mark.slow
def test_beside_survivors(tmp_path):
    """What survivors seal is their own part of the state, so all ranks come back along the log."""
    case = replace(CASES["ep2-dp2-sharded"], survives=True)
    kill(case, tmp_path)
    ended = finish(case, tmp_path)
    assert ended.resumed[-1] >= 6
    require_exact(case, tmp_path, ended)
