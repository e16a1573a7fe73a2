"""A run that another script goes on with: what differs is named, at the start and where a window cannot be repeated."""

from __future__ import annotations

import pytest
import torch

from moe_ckpt.errors import ReplayDivergedError
from moe_ckpt.policies import Dense, MoEvement
from tests.integration.test_hooks_and_state import fit, seeded
from tests.support.tiny_moe import TinyMoE

ACCUMULATED = "trainer accumulate_grad_batches 1 -> 2"


def test_another_accumulation_is_named_where_a_window_cannot_be_repeated(tmp_path):
    fit(tmp_path, seeded(dropout=0.2), MoEvement(window=3), stop=7)
    with pytest.raises(ReplayDivergedError, match=f"the run's, which may be the cause: {ACCUMULATED}") as raised:
        fit(tmp_path, seeded(dropout=0.2), MoEvement(window=3), accumulate_grad_batches=2)
    assert raised.value.changed == ACCUMULATED


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"accumulate_grad_batches": 2}, ACCUMULATED),
        ({"limit_train_batches": 5}, "trainer limit_train_batches 1.0 -> 5"),
        ({"gradient_clip_val": 0.5}, "trainer gradient_clip_val None -> 0.5"),
        ({"precision": "bf16-mixed"}, "trainer precision '32-true' -> 'bf16-mixed'"),
    ],
)
def test_another_setting_of_the_trainer_is_said_at_the_start(tmp_path, caplog, setting, said):
    fit(tmp_path, seeded(), Dense(1), stop=5)
    caplog.clear()
    fit(tmp_path, seeded(), Dense(1), max_steps=7, **setting)
    assert f"{said} (training continues with this script's)" in caplog.text


def test_a_part_that_is_compiled_now_is_said_at_the_start(tmp_path, caplog):
    fit(tmp_path, seeded(), Dense(1), stop=5)
    compiled = seeded()
    compiled.head = torch.compile(compiled.head, backend="eager")
    caplog.clear()
    fit(tmp_path, compiled, Dense(1), max_steps=7)
    assert "trainer torch.compile False -> True (training continues with this script's)" in caplog.text


def without_head() -> TinyMoE:
    model = seeded()
    model.head.requires_grad_(False)
    return model


def test_flags_of_parameters_that_the_checkpoint_overrules_are_said(tmp_path, caplog):
    fit(tmp_path, without_head(), Dense(1), stop=5)
    caplog.clear()
    fit(tmp_path, seeded(), Dense(1), stop=6)
    assert "requires_grad of head.weight" in caplog.text
    assert "False -> True (training continues with the checkpoint's)" in caplog.text


def test_the_same_script_is_told_nothing(tmp_path, caplog):
    fit(tmp_path, without_head(), Dense(1), stop=5)
    caplog.clear()
    fit(tmp_path, without_head(), Dense(1), stop=6)
    assert "hyperparameters differ" not in caplog.text
