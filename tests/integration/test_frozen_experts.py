"""Experts of which nothing is trained cannot be stale: their tokens are no tokens whose update was applied."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import MoC
from tests.support.tiny_moe import WIDTH, TinyMoE, loader

SWITCHED = 4
"""Step at whose end, in a hook, an expert is frozen or thawed."""


def expert(model, layer, number):
    experts = model.blocks[layer].moe.experts
    return experts if model.hparams.stacked else experts[number]


class Freezing(pl.Callback):
    """Freezes one expert (a whole stack where experts are stacked) for good, and switches another."""

    def __init__(self, thaws):
        self.thaws, self.routed, self.batch = thaws, [], None

    def on_fit_start(self, trainer, module):
        expert(module, 0, 1).requires_grad_(False)
        expert(module, 1, 2).requires_grad_(not self.thaws)
        self.batch = torch.zeros(2, 4, dtype=torch.int64)
        for at, block in enumerate(module.blocks):
            block.moe.gate.register_forward_hook(lambda m, x, out, at=at: self.count(at, out[1]))

    def count(self, at, chosen):
        self.batch[at] += chosen.flatten().bincount(minlength=4)

    def on_train_batch_end(self, trainer, module, *_):
        self.routed.append(self.batch.numpy().copy())
        self.batch.zero_()
        if trainer.global_step == SWITCHED:
            expert(module, 1, 2).requires_grad_(self.thaws)


@pytest.mark.parametrize("thaws", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.quick("True-False", "False-True")
def test_tokens_count_of_what_is_trained(stacked, thaws, tmp_path):
    pl.seed_everything(3, verbose=False)
    freezing, ours = Freezing(thaws), MoECheckpoint(MoC(k=1), tmp_path / "store", when_busy="wait")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=9,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[freezing, ours],
    )
    trainer.fit(TinyMoE(experts=4, stacked=stacked), loader(64))
    trained = np.ones((9, 2, 4), dtype=bool)
    trained[:, 0, slice(None) if stacked else 1] = False
    switched = slice(SWITCHED) if thaws else slice(SWITCHED, None)
    trained[switched, 1, slice(None) if stacked else 2] = False
    routed = np.stack(freezing.routed)
    ledger = ours._fit.session.run_ledger
    assert ledger.tokens.applied.tolist() == (routed * trained).sum(0).tolist()
    assert ledger.tokens.unsaved().sum() == 0, "the last checkpoint is complete"
    assert (ledger.activity.newest.astype(bool) == routed.sum(0).astype(bool)).all()


class InEvalMode(pl.Callback):
    """Leaves the MoE layers in eval mode, as ``from_pretrained`` does, and counts what training's batches route.

    Outside of these, forward passes route as well: validation with gradients, and a look at the model in a hook.
    """

    def __init__(self):
        self.applied, self.batch, self.counts = torch.zeros(2, 4, dtype=torch.int64), None, False

    def on_fit_start(self, trainer, module):
        for at, block in enumerate(module.blocks):
            block.moe.eval()
            block.moe.gate.register_forward_hook(lambda m, x, out, at=at: self.count(at, out[1]))

    def count(self, at, chosen):
        if self.counts:
            self.applied[at] += chosen.flatten().bincount(minlength=4)

    def on_train_batch_start(self, trainer, module, *_):
        self.counts = True

    def on_train_batch_end(self, trainer, module, *_):
        self.counts = False
        module(torch.randn(3, WIDTH))  # with gradients


class WithTeacher(TinyMoE):
    """Training looks at the same model without gradients, and validation with them."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.count_nothing(batch)
        return super().training_step(batch, batch_idx)

    def count_nothing(self, batch):
        ours = self.trainer.callbacks[1]
        ours.counts = False
        self(batch[0])
        ours.counts = True

    def validation_step(self, batch, batch_idx):
        with torch.inference_mode(False), torch.enable_grad():
            self(batch[0].clone())


@pytest.mark.parametrize("stacked", [True, False])
def test_a_model_that_is_trained_in_eval_mode_counts_its_tokens(stacked, tmp_path):
    pl.seed_everything(3, verbose=False)
    routed, ours = InEvalMode(), MoECheckpoint(MoC(k=1), tmp_path / "store", when_busy="wait")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=8,
        val_check_interval=4,
        limit_val_batches=2,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[routed, ours],
    )
    trainer.fit(WithTeacher(experts=4, stacked=stacked), loader(64), loader(64))
    assert routed.applied.sum() > 0
    assert ours._fit.session.run_ledger.tokens.applied.tolist() == routed.applied.tolist()
