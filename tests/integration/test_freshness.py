"""Updates that an optimizer leaves out unseen make no checkpoint stale."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import Dense, MoC
from tests.integration.lives import manifests
from tests.support.tiny_moe import TinyMoE, loader


def test_a_fused_optimizer_that_skips_overflows(tmp_path):
    """It takes the loss scale itself, so that its step runs, and does nothing."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    checkpoint = MoECheckpoint(Dense(), tmp_path, when_busy="wait")
    trainer = pl.Trainer(
        max_steps=6,
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = TinyMoE(optimizer="fused")
    before = [parameter.clone() for parameter in module.parameters()]
    trainer.fit(module, loader(64))
    assert all(map(torch.equal, before, module.parameters())), "every step overflowed"
    assert checkpoint.last.failed_checkpoints == 0
    assert checkpoint.last.committed_step == 6
    assert [each.not_finite for each in manifests(tmp_path)] == ["", ""]
    assert checkpoint.last.routed_tokens == 0


def test_tokens_count_whether_a_fused_optimizer_takes_the_loss_scale_or_not(tmp_path):
    routed = []
    for optimizer in ("adamw", "fused"):
        checkpoint = MoECheckpoint(MoC(k=1), tmp_path / optimizer, when_busy="wait")
        trainer = pl.Trainer(
            max_steps=4,
            accelerator="cpu",
            plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))],
            callbacks=[checkpoint],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(TinyMoE(optimizer=optimizer), loader(64))
        routed.append(checkpoint.last.routed_tokens)
    assert routed[0] == routed[1] > 0
