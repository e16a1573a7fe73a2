"""Which checkpoint a manifest calls its parent, over real sessions: garbage collection follows it."""

from __future__ import annotations

import numpy as np

from moe_ckpt.format.manifest import step_dir
from moe_ckpt.policies import Dense
from moe_ckpt.slices.compiling import PlanCompiler
from moe_ckpt.storage import LocalStorage
from tests.unit.engine_parts import Life, failing, manifests

WRITES = 5
"""Writes of one checkpoint: two shards, the state, the part, the manifest."""


def parents(root):
    return {manifest.directory: manifest.parent for manifest in manifests(root)}


def test_a_generation_begun_inside_one_life_comes_from_the_one_before_it(tmp_path):
    """The last step's partial checkpoint has its name, so the complete one of the same step needs a new generation."""
    with Life(LocalStorage(tmp_path)) as life:
        life.go(2, settle=True)
        life.finish()
    assert parents(tmp_path) == {step_dir(1, 0): None, step_dir(2, 0): None, step_dir(2, 1): step_dir(2, 0)}


def test_a_life_that_came_back_names_what_it_came_back_to_until_it_begins_another_generation(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.go(3, settle=True)
    chosen = manifests(tmp_path)[1]
    with Life(LocalStorage(tmp_path)) as second:
        second.session.resume_from(chosen)
        second.step = chosen.step
        second.go(2, settle=True)
        second.finish()
    found = parents(tmp_path)
    assert [found[step_dir(step, 1)] for step in (3, 4)] == [step_dir(2, 0)] * 2
    assert found[step_dir(4, 2)] == step_dir(4, 1)


def test_a_checkpoint_that_failed_is_nobodys_parent(tmp_path):
    storage = failing(tmp_path, 2 * WRITES + 1)
    with Life(storage) as life:
        life.go(3, settle=True)
        life.finish()
    assert parents(tmp_path) == {step_dir(1, 0): None, step_dir(2, 0): None, step_dir(3, 1): step_dir(2, 0)}


def test_a_generation_that_committed_nothing_is_passed_over(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.go(2, settle=True)
    with Life(failing(tmp_path, 1)) as second:
        second.session.resume_from(manifests(tmp_path)[-1])
        second.step = 2
        second.go(1, settle=True)
        second.finish()
    assert parents(tmp_path)[step_dir(3, 2)] == step_dir(2, 0)
    assert step_dir(3, 1) not in parents(tmp_path)


def test_a_share_that_lacks_a_slice_is_no_checkpoint_and_the_tensor_is_named(tmp_path, monkeypatch, caplog):
    """Whatever went wrong when the share was cut: what is committed tiles what the plan asks for."""
    whole = PlanCompiler._cut

    def short(self, contents):
        share, assignment = whole(self, contents)
        return share.masked(np.arange(len(share)) > 0), assignment

    monkeypatch.setattr(PlanCompiler, "_cut", short)
    with Life(LocalStorage(tmp_path), policy=Dense()) as life:
        life.go(2, settle=True)
    assert manifests(tmp_path) == []
    assert "CoverageError" in caplog.text
    assert "model/" in caplog.text
