"""Which callbacks, and which modules, may read weights beside the kernels and keep what they made of them."""

from __future__ import annotations

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as theirs

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import MoEvement
from moe_ckpt.windows.lightning import weight_readers
from tests.support.tiny_moe import TinyMoE


class Reads(pl.Callback):
    def on_train_batch_end(self, *_):
        pass


class Keeps(Reads):
    def state_dict(self):
        return {}


class KeepsInTheFile(Reads):
    def on_save_checkpoint(self, *_):
        pass


class OnlyKeeps(pl.Callback):
    def state_dict(self):
        return {}


class NamesFiles(theirs.ModelCheckpoint):
    def format_checkpoint_name(self, *args, **options):
        return super().format_checkpoint_name(*args, **options)


class AveragesFiles(theirs.ModelCheckpoint):
    def on_train_batch_end(self, *args, **options):
        return super().on_train_batch_end(*args, **options)


class EndsAtItsOwnScore(theirs.EarlyStopping):
    def state_dict(self):
        return super().state_dict()


class OwnAverage(theirs.EMAWeightAveraging):
    pass


class Logs(TinyMoE):
    def on_train_batch_end(self, *_):
        pass


class HasTarget(Logs):
    def __init__(self, **options):
        super().__init__(**options)
        self.target = torch.nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.target.weight.data = self.head.weight.detach().clone()


class SavesItself(Logs):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = 1


def readers(*callbacks, module=TinyMoE):
    return weight_readers(SimpleNamespace(callbacks=list(callbacks)), module())


@pytest.mark.parametrize(
    "make",
    [
        *(Keeps, KeepsInTheFile, AveragesFiles, OwnAverage, theirs.EMAWeightAveraging),
        lambda: EndsAtItsOwnScore("loss"),
        lambda: theirs.StochasticWeightAveraging(0.1),
        lambda: theirs.ModelPruning("l1_unstructured"),
        lambda: theirs.LambdaCallback(on_train_batch_end=print, on_save_checkpoint=print),
    ],
)
def test_these_may_read_and_keep(make):
    callback = make()
    assert readers(callback, callback) == [type(callback).__name__]


def test_these_read_no_weights_or_keep_nothing(tmp_path):
    ours = MoECheckpoint(MoEvement(), tmp_path)
    known = [theirs.ModelCheckpoint(), theirs.EarlyStopping("loss"), theirs.Timer(), theirs.LearningRateMonitor()]
    known += [theirs.TQDMProgressBar(), theirs.ModelSummary(), theirs.BackboneFinetuning(), theirs.DeviceStatsMonitor()]
    own = [Reads(), OnlyKeeps(), NamesFiles(), theirs.LambdaCallback(on_train_batch_end=print)]
    assert readers(ours, *known, *own) == []


def test_modules():
    assert readers(module=Logs) == []
    assert readers(module=HasTarget) == ["the hooks of HasTarget"]
    assert readers(module=SavesItself) == ["the hooks of SavesItself"]
