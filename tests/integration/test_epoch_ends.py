"""Epochs that end otherwise than with their loader, and loaders that live longer than an epoch: resumes are exact."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Timer
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from moe_ckpt.policies import Dense
from tests.integration.test_resume_loops import StopAt, Validated, assert_same, train
from tests.support.streams import Stream
from tests.support.tiny_moe import Tokens, loader


class Skips(Validated):
    """Epochs end by the module's word, before their sixth batch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 5 else None


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("step", [4, 6, 9, 12])
@pytest.mark.quick("4-1", "9-4", "12-1")
def test_after_epochs_that_the_module_ended_batches_are_counted_on(tmp_path, step, every):
    options = {"kind": Skips, "policy": Dense(every), "limit_val_batches": 0, "max_epochs": 4}
    reference = train(tmp_path / "whole", **options)
    before = train(tmp_path / "broken", StopAt(step, "batch"), **options)
    resumed = train(tmp_path / "broken", **options)
    assert resumed[2].restored_step == step - step % every
    assert_same(reference, resumed, before)


class GoesOn(IterableDataset):
    """Endless, and each iterator goes on where the one before was left."""

    def __init__(self):
        self.samples, self.at = Tokens(200), 0

    def __iter__(self):
        while True:
            self.at += 1
            yield self.samples[(self.at - 1) % 200]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


STREAMS = {"goes on": GoesOn, "begins anew": lambda: Stream(Tokens(200))}


@pytest.mark.parametrize("validations", [None, 0])
@pytest.mark.parametrize("step", [4, 5, 7, 10])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.quick("goes on-4-None", "goes on-7-0", "begins anew-5-None", "begins anew-10-0")
def test_no_sample_of_an_endless_stream_is_left_out_between_epochs(tmp_path, stream, step, validations):
    def life(store, stop=None):
        training = StatefulDataLoader(STREAMS[stream](), batch_size=4)
        options = {"limit_train_batches": 5, "limit_val_batches": validations}
        return train(tmp_path / store, stop, training=training, **options)

    reference, before = life("whole"), life("broken", StopAt(step, "batch"))
    resumed = life("broken")
    assert resumed[2].restored_step == step
    assert_same(reference, resumed, before)


@pytest.mark.parametrize("by_path", [False, True])
@pytest.mark.parametrize("step", [4, 8, 11, 16, 18, 27])
@pytest.mark.quick("4-False", "11-True", "16-False", "18-True")
def test_a_loader_of_several_epochs_is_made_when_it_would_have_been(tmp_path, step, by_path):
    class Data(LightningDataModule):
        def train_dataloader(self):
            return loader(32)

        def val_dataloader(self):
            return loader(8, shuffle=False)

    def life(store, stop=None, ckpt_path=None):
        options = {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5}
        return train(tmp_path / store, stop, ckpt_path, training=Data(), **options)

    reference, before = life("whole"), life("broken", StopAt(step, "batch"))
    resumed = life("broken", None, str(tmp_path / "broken")) if by_path else life("broken")
    assert resumed[2].restored_step == step
    assert_same(reference, resumed, before)


class UsedUp(Timer):
    """Two hours of one are over when it is restored."""

    def __init__(self):
        super().__init__(timedelta(hours=1))

    def state_dict(self):
        return {"time_elapsed": {"train": 7200.0}}


def test_a_timer_that_has_no_time_left_is_named_at_the_resume(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "moe_ckpt")
    train(tmp_path, StopAt(3, "batch"), beside=[UsedUp()])
    assert "Timer" not in caplog.text
    _, trainer, _ = train(tmp_path, beside=[UsedUp()])
    assert trainer.global_step == 4
    (said,) = [message for message in caplog.messages if "Timer" in message]
    assert "max_time" in said
