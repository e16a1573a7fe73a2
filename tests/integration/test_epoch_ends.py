"""Epochs that end otherwise than with their loader, and loaders that live longer than an epoch: resumes are exact."""

from __future__ import annotations

import pytest

from moe_ckpt.policies import Dense
from tests.integration.test_resume_loops import StopAt, Validated, assert_same, train


class Skips(Validated):
    """Epochs end by the module's word, before their sixth batch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 5 else None


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("step", [4, 6, 9, 12])
def test_after_epochs_that_the_module_ended_batches_are_counted_on(tmp_path, step, every):
    options = {"kind": Skips, "policy": Dense(every), "limit_val_batches": 0, "max_epochs": 4}
    reference = train(tmp_path / "whole", **options)
    before = train(tmp_path / "broken", StopAt(step, "batch"), **options)
    resumed = train(tmp_path / "broken", **options)
    assert resumed[2].restored_step == step - step % every
    assert_same(reference, resumed, before)
