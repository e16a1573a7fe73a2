"""A run whose loss becomes NaN: what it saves then costs no finite checkpoint, and no start takes it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from moe_ckpt import RetentionPolicy
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.cli.main import main
from moe_ckpt.policies import Dense
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    committed,
    differences,
    events,
    exit_code,
    live,
    live_ranks,
    load,
    manifests,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
    undisturbed,
)
from tests.support.tiny_moe import TinyMoE, loader

FINITE = 7
"""Steps, before the one whose loss is NaN (``sabotage``)."""
WAIT = {"when_busy": "wait"}
FEW = {"retention": RetentionPolicy(keep_last=1)}
POLICIES = {"dense": 1, "moc": 1, "moevement": 2, "gradient-log": 3}


def run_of(policy, place, memory, **options):  # noqa: F811
    run = placed(Run(None, policy=(policy, POLICIES[policy]), callback=WAIT, **options), place)
    if memory:
        (place / "memory").mkdir()
        run = replace(run, memory=str(place / "memory"), to_storage=3)
    return run


def starts(run):
    """Step and losses of each life."""
    return [
        (life[0]["step"], [float.fromhex(line["loss"]) for line in life if line["event"] == "batch"])
        for life in split_lives(events(run))
    ]


@pytest.mark.parametrize(
    ("policy", "memory"),
    [*((policy, False) for policy in ("dense", "moc", "moevement")), *((policy, True) for policy in POLICIES)],
)
@pytest.mark.quick("dense-False", "moc-True", "moevement-True", "gradient-log-True")
def test_the_next_start_goes_on_from_finite_values(policy, memory, place):  # noqa: F811
    run = run_of(policy, place, memory)
    few = {} if policy == "moevement" else FEW  # which needs the steps of two windows
    assert live(replace(run, sabotage="loss becomes nan", crash=("compute", 17), callback={**WAIT, **few})) == KILLED
    stored = manifests(run.store)
    assert any(each.not_finite for each in stored), "storage has what is not finite, and says so"
    assert not all(each.not_finite for each in stored)
    assert "values that are not finite" in output(run), "the user is told while the run goes on"
    assert live(run) == 0, output(run)
    (_, broken), (step, losses) = starts(run)
    assert math.isnan(broken[-1])
    newest = {"moevement": (4, 5, 6, 7)}.get(policy, (FINITE,))
    assert step in newest, output(run)
    assert all(map(math.isfinite, losses))
    if policy != "moc":
        states, _ = undisturbed(run)
        assert list(differences(load(run), states[0])) == []


@pytest.mark.parametrize("memory", [False, True], ids=["storage", "memory"])
def test_one_rank_alone_holds_what_is_not_finite(memory, place):  # noqa: F811
    """Under FSDP2: rank 0's share of the step is sound, and counts no more than rank 1's."""
    run = run_of("dense", place, memory, ranks=2, sharded=True, samples=64)
    run = replace(run, to_storage=1)
    assert KILLED in live_ranks(replace(run, sabotage="one shard becomes nan", crash=("updated", 9)))
    newest = manifests(run.store)[0]
    assert (newest.step, newest.not_finite.rpartition(" on ")[2]) == (8, "rank 1")
    assert live_ranks(run) == [0, 0], output(run)
    assert starts(run)[1][0] == 7, output(run)
    states, _ = undisturbed(run)
    assert [list(differences(load(run, rank), states[rank])) for rank in range(2)] == [[], []]


def test_an_error_keeps_no_step_that_is_not_finite(place):  # noqa: F811
    run = run_of("dense", place, memory=True)
    assert exit_code(replace(run, sabotage="loss becomes nan", crash=("raise", 12))) == 1
    assert "rank 0 could not keep step 11 in memory: NotFiniteError" in Path(f"{run.log}.txt").read_text()
    assert live(run) == 0, output(run)
    assert starts(run)[1][0] == FINITE


def test_without_any_finite_checkpoint_no_run_starts_unless_a_step_is_named(place, capsys):  # noqa: F811
    run = run_of("dense", place, memory=False)
    with_two = {**WAIT, "retention": RetentionPolicy(keep_last=2)}
    assert live(replace(run, sabotage="loss becomes nan", crash=("compute", 12), callback=with_two)) == KILLED
    for manifest in manifests(run.store):
        if not manifest.not_finite:
            (place / "run_store" / manifest.directory / "MANIFEST.json").unlink()
    with pytest.raises(AssertionError, match=r"NoCheckpointError.*values that are not finite.*ckpt_path="):
        live(run)
    newest = committed(run.store)[-1]
    assert main(["inspect", run.store]) == 0
    assert f"{newest} holds values that are not finite" in " ".join(capsys.readouterr().out.split())
    module = fit(place / "other", ckpt_path=f"{run.store}/{newest}", max_steps=12)
    assert not all(torch.isfinite(parameter).all() for parameter in module.parameters()), "whoever names it gets it"


def fit(store, kind=TinyMoE, **options):
    ckpt_path = options.pop("ckpt_path", None)
    module, checkpoint = kind(), MoECheckpoint(Dense(), store, when_busy="wait")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", callbacks=[checkpoint], **quiet, **options)
    trainer.fit(module, loader(40), ckpt_path=ckpt_path)
    return module


class Masked(TinyMoE):
    """Has infinities on purpose, of which none is trained."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((3,), float("-inf")))
        self.fixed = nn.Parameter(torch.full((3,), float("-inf")), requires_grad=False)


def test_what_is_not_trained_may_be_infinite(tmp_path):
    fit(tmp_path, Masked, max_steps=3)
    assert [each.not_finite for each in manifests(tmp_path)] == ["", ""]


class Overflowing(TinyMoE):
    """A moment becomes infinite, and no weight does: the step is one that no start takes."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            next(iter(self.optimizers().state.values()))["exp_avg_sq"].view(-1)[0] = float("inf")


def test_moments_count(tmp_path):
    fit(tmp_path, Overflowing, max_steps=4)
    assert ["exp_avg_sq" in each.not_finite for each in manifests(tmp_path)] == [True, False, False]
