"""A stop that somebody asks for by ``trainer.should_stop``: between two optimizer steps, or before Lightning may."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import pytest
import torch

from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.session.session import CheckpointSession
from tests.integration.test_resume_loops import Validated, assert_same, train
from tests.support.tiny_moe import loader


class Asks(pl.Callback):
    """Asks for the end when a batch ends, or a validation after it."""

    def __init__(self, batch: int, where: str = "batch") -> None:
        self.batch, self.where = batch, where

    def on_train_batch_end(self, trainer, *_):
        if self.where == "batch" and trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            trainer.should_stop = True

    def on_validation_end(self, trainer, pl_module):
        if self.where == "validation" and trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            trainer.should_stop = True


POLICIES = {
    "each step": lambda: Dense(1),
    "seldom": lambda: Dense(100),
    "moc": lambda: MoC(k=1),
    "windows": lambda: MoEvement(window=2),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("batch", "where"), [(4, "batch"), (9, "batch"), (13, "validation")])
@pytest.mark.quick("4-batch-each step", "4-batch-seldom", "9-batch-moc", "13-validation-windows")
def test_a_stop_while_gradients_are_accumulated_costs_no_step(tmp_path, policy, batch, where):
    options = {"accumulate_grad_batches": 4, "val_check_interval": 6, "max_epochs": 3}
    reference = train(tmp_path / "whole", policy=POLICIES[policy](), **options)
    before = train(tmp_path / "broken", policy=POLICIES[policy](), beside=[Asks(batch, where)], **options)
    resumed = train(tmp_path / "broken", policy=POLICIES[policy](), **options)
    assert resumed[2].restored_step == before[1].global_step
    # A stop has one more validation, which the run without it does not have.
    before[0].validations = {at: loss for at, loss in before[0].validations.items() if at in reference[0].validations}
    assert_same(reference, resumed, before)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.quick("each step", "windows")
def test_a_run_of_one_epoch_goes_on_after_such_a_stop(tmp_path, policy):
    def life(store, *beside):
        training = loader(80, generator=torch.Generator().manual_seed(3))
        options = {"accumulate_grad_batches": 4, "max_epochs": 1, "training": training, "beside": beside}
        return train(tmp_path / store, policy=POLICIES[policy](), **options)

    reference, _, _ = life("whole")
    for batch in (5, 14):
        life("broken", Asks(batch))
    resumed, trainer, _ = life("broken")
    assert trainer.global_step == 5
    assert sorted(resumed.losses) == list(range(12, 20))
    for name, tensor in reference.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


class Manual(Validated):
    """Steps in the batches that it is told to; the first batches all have one."""

    stepless = frozenset({5, 6})

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        if self.trainer.fit_loop.epoch_loop.total_batch_idx not in self.stepless:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


def test_what_nobody_could_know_to_keep_is_left_out_and_told(tmp_path, caplog):
    """With manual optimization a batch without a step is known when it has ended."""
    caplog.set_level(logging.WARNING, "moe_ckpt")
    options = {"kind": Manual, "policy": Dense(4), "max_epochs": 2, "limit_val_batches": 0}
    reference = train(tmp_path / "whole", **options)
    before = train(tmp_path / "broken", beside=[Asks(5)], **options)
    (said,) = [message for message in caplog.messages if "between two optimizer steps" in message]
    assert "step 5" in said
    assert "newest checkpoint is of step 4" in said
    resumed = train(tmp_path / "broken", **options)
    assert resumed[2].restored_step == 4
    assert_same(reference, resumed, before)


def test_a_stop_that_lightning_may_not_make_yet_saves_nothing_besides(tmp_path, monkeypatch):
    saved, real = [], CheckpointSession.save_complete

    def counting(session, step, capture, **more):
        saved.append(step)
        real(session, step, capture, **more)

    monkeypatch.setattr(CheckpointSession, "save_complete", counting)
    _, trainer, _ = train(tmp_path / "epochs", policy=Dense(100), beside=[Asks(2)], min_epochs=2)
    assert (trainer.global_step, set(saved)) == (16, {16})
    saved.clear()
    _, trainer, _ = train(tmp_path / "steps", policy=Dense(100), beside=[Asks(2)], min_steps=11)
    assert (trainer.global_step, set(saved)) == (11, {11})
