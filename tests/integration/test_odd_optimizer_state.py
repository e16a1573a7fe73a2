"""Optimizers that keep what torch's own do not: names that no checkpoint can hold, tensors without elements."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from moe_ckpt.callbacks import MoECheckpoint, MoECheckpointIO
from moe_ckpt.errors import UnsupportedError
from moe_ckpt.interop.dcp import MoEStorageReader
from moe_ckpt.interop.export import export
from moe_ckpt.megatron.optimizers import StateSlot, state_tensors
from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.storage import open_storage
from tests.support.tiny_moe import TinyMoE, loader, state_of
from tests.support.verifying import verify_store


class Interrupted(Exception):
    pass


class Momentum(torch.optim.Optimizer):
    """Keeps its momentum under a name of the test's choice, and may keep a tensor without elements beside it."""

    def __init__(self, params, name, beside=()):
        super().__init__(params, {"lr": 0.01})
        self.name, self.beside = name, beside

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update({self.name: torch.zeros_like(p)}, **dict.fromkeys(self.beside, torch.empty(0)))
            assert not any(state[name].numel() for name in self.beside)
            held = state[self.name]
            p.sub_(held.mul_(0.9).add_(p.grad), alpha=0.01)


class WithMomentum(TinyMoE):
    def __init__(self, name) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self):
        return Momentum(self.parameters(), self.name)


class WithPlaceholders(TinyMoE):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.nothing = torch.nn.Parameter(torch.zeros(0, 5))

    def forward(self, x):
        return super().forward(x + self.nothing.sum())

    def configure_optimizers(self):
        return Momentum(self.parameters(), "momentum", ("none",))


class Interrupt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            raise Interrupted


QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def fit(store: Path, model: pl.LightningModule, steps: int, policy=None, *callbacks) -> MoECheckpoint:
    checkpoint = MoECheckpoint(policy or Dense(), store, when_busy="wait")
    pl.Trainer(max_steps=steps, callbacks=[*callbacks, checkpoint], **QUIET).fit(model, loader(64, shuffle=False))
    return checkpoint


def seeded(kind):
    pl.seed_everything(3, verbose=False)
    return kind()


def assert_same(one: pl.LightningModule, other: pl.LightningModule) -> None:
    first, second = (state_of(each, each.trainer.optimizers[0]) for each in (one, other))
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("name", [0, "a/b", ""], ids=["number", "slash", "empty"])
def test_names_of_state_that_no_checkpoint_can_hold_are_refused_before_the_first(tmp_path, name):
    model = WithMomentum(name)
    said = rf"optimizer 0 \(Momentum\) keeps a tensor for parameter 'embed\.weight' under the name {name!r}.*Rename it"
    with pytest.raises(UnsupportedError, match=said):
        fit(tmp_path, model, 5)
    assert model.trainer.global_step == 1
    assert not list(tmp_path.glob("step_*/MANIFEST.json"))


@pytest.mark.parametrize("policy", [Dense(), MoC(k=1), MoEvement(window=3)], ids=["dense", "moc", "window"])
@pytest.mark.quick("moc", "window")
def test_a_run_whose_optimizer_keeps_tensors_without_elements_is_resumed_exactly(tmp_path, policy):
    whole, cut, resumed = (seeded(WithPlaceholders) for _ in range(3))
    fit(tmp_path / "whole", whole, 12, policy)
    with pytest.raises(Interrupted):
        fit(tmp_path / "cut", cut, 12, policy, Interrupt(9))
    assert verify_store(open_storage(str(tmp_path / "cut"))) == []
    assert fit(tmp_path / "cut", resumed, 12, policy).restored_step is not None
    if not isinstance(policy, MoC):
        assert_same(whole, resumed)


class WithRatesOfNumpy(TinyMoE):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float32(0.9) ** step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_rates_may_be_numbers_of_numpy(tmp_path):
    whole, cut, resumed = (seeded(WithRatesOfNumpy) for _ in range(3))
    fit(tmp_path / "whole", whole, 6)
    with pytest.raises(Interrupted):
        fit(tmp_path / "cut", cut, 6, None, Interrupt(4))
    assert fit(tmp_path / "cut", resumed, 6).restored_step == 4
    assert isinstance(resumed.trainer.optimizers[0].param_groups[0]["lr"], np.float32)
    assert_same(whole, resumed)


def test_tensors_without_elements_are_in_what_others_open(tmp_path):
    whole, cut, resumed, straight = (seeded(WithPlaceholders) for _ in range(4))
    fit(tmp_path / "whole", whole, 12)
    fit(tmp_path / "store", cut, 9)
    out = export(tmp_path / "store", "lightning", tmp_path / "nine.ckpt")
    bare = pl.Trainer(max_steps=12, enable_checkpointing=False, **QUIET)
    bare.fit(resumed, loader(64, shuffle=False), ckpt_path=str(out), weights_only=True)
    assert_same(whole, resumed)
    named = pl.Trainer(max_steps=12, enable_checkpointing=False, plugins=[MoECheckpointIO()], **QUIET)
    named.fit(straight, loader(64, shuffle=False), ckpt_path=str(tmp_path / "store"))
    assert_same(whole, straight)
    for source in (
        {"checkpoint_id": export(tmp_path / "store", "dcp", tmp_path / "dcp")},
        {"storage_reader": MoEStorageReader(tmp_path / "store")},
    ):
        blank = {"none": torch.empty(0), "momentum": torch.zeros(0, 5)}
        dcp.load({"optim": {"state": {"nothing": blank}}}, **source)


def test_megatrons_optimizers_are_asked_for_the_same_names():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter]["a/b"] = torch.zeros(3)
    slot = StateSlot(SimpleNamespace(optimizer=optimizer), parameter, None, None)
    with pytest.raises(UnsupportedError, match=r"AdamW keeps a tensor for parameter 'layers\.0' under the name 'a/b'"):
        list(state_tensors(slot, "layers.0"))
