"""``fit`` is called again on the same Trainer, after a failure or an end."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import pytest

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import Dense
from tests.integration.test_resume_loops import StopAt, Validated, assert_same, position, train
from tests.support.tiny_moe import TinyMoE, loader


class Keeps(Validated):
    """Keeps its validations, also of the fit before."""

    def __init__(self):
        super().__init__()
        self.validations = {}

    on_fit_start = TinyMoE.on_fit_start


CASES = [
    ({}, 8, "validation"),
    ({}, 8, "batch"),
    ({"val_check_interval": 4}, 4, "validation"),
    ({"limit_val_batches": 0}, 15, "batch"),
]


@pytest.mark.parametrize(("options", "step", "where"), CASES, ids=lambda value: str(value).replace(" ", ""))
@pytest.mark.quick("{}-8-validation", "{'val_check_interval':4}-4-validation")
def test_after_a_failure_the_same_trainer_goes_on_exactly(tmp_path, options, step, where):
    reference = train(tmp_path / "whole", kind=Keeps, **options)
    stop = StopAt(step, where)
    model, trainer, checkpoint = before = train(tmp_path / "broken", stop, kind=Keeps, **options)
    stop.step = -1
    trainer.fit(model, loader(32), loader(8, shuffle=False))
    assert checkpoint.restored_step == step
    assert position(trainer) == position(reference[1])
    assert_same(reference, (model, trainer, checkpoint), before)


def test_a_second_fit_that_goes_back_says_why(tmp_path, caplog):
    """The last step of the first fit is in memory, but in no checkpoint."""
    caplog.set_level(logging.WARNING, "moe_ckpt")
    checkpoint = MoECheckpoint(Dense(5), tmp_path, when_busy="wait", save_last=False)
    trainer = pl.Trainer(
        callbacks=[checkpoint], max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    model = TinyMoE()
    trainer.fit(model, loader(32), loader(8, shuffle=False))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(32), loader(8, shuffle=False))
    assert (checkpoint.restored_step, trainer.global_step) == (5, 16)
    (said,) = [message for message in caplog.messages if "save_last=False" in message]
    assert "steps 6 to 8" in said
