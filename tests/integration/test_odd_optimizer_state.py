"""Optimizers that keep what torch's own do not: names that no checkpoint can hold, tensors without elements."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.errors import UnsupportedError
from moe_ckpt.megatron.optimizers import StateSlot, state_tensors
from moe_ckpt.policies import Dense
from tests.support.tiny_moe import TinyMoE, loader


class Momentum(torch.optim.Optimizer):
    """Keeps its momentum under a name of the test's choice."""

    def __init__(self, params, name):
        super().__init__(params, {"lr": 0.01})
        self.name = name

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            held = self.state[p].setdefault(self.name, torch.zeros_like(p))
            p.sub_(held.mul_(0.9).add_(p.grad), alpha=0.01)


class WithMomentum(TinyMoE):
    def __init__(self, name) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self):
        return Momentum(self.parameters(), self.name)


def fit(store: Path, model: pl.LightningModule, steps: int) -> MoECheckpoint:
    checkpoint = MoECheckpoint(Dense(), store, when_busy="wait")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    pl.Trainer(max_steps=steps, callbacks=[checkpoint], **quiet).fit(model, loader(64, shuffle=False))
    return checkpoint


@pytest.mark.parametrize("name", [0, "a/b", ""], ids=["number", "slash", "empty"])
def test_names_of_state_that_no_checkpoint_can_hold_are_refused_before_the_first(tmp_path, name):
    model = WithMomentum(name)
    said = rf"optimizer 0 \(Momentum\) keeps a tensor for parameter 'embed\.weight' under the name {name!r}.*Rename it"
    with pytest.raises(UnsupportedError, match=said):
        fit(tmp_path, model, 5)
    assert model.trainer.global_step == 1
    assert not list(tmp_path.glob("step_*/MANIFEST.json"))


def test_megatrons_optimizers_are_asked_for_the_same_names():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter]["a/b"] = torch.zeros(3)
    slot = StateSlot(SimpleNamespace(optimizer=optimizer), parameter, None, None)
    with pytest.raises(UnsupportedError, match=r"AdamW keeps a tensor for parameter 'layers\.0' under the name 'a/b'"):
        list(state_tensors(slot, "layers.0"))
