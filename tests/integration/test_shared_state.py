"""Buffers and modules that a model has in several places, and tensors without elements, wherever a store is opened."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import moe_ckpt
from moe_ckpt.callbacks import MoECheckpoint, MoECheckpointIO
from moe_ckpt.errors import CoverageError
from moe_ckpt.interop.dcp import MoEStorageReader
from moe_ckpt.interop.export import export
from moe_ckpt.interop.whole import open_whole
from moe_ckpt.policies import Dense
from moe_ckpt.reading.reader import open_step
from tests.support.tiny_moe import TinyMoE, loader


class Rotary(nn.Module):
    """Counts its calls in a buffer and in extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(16))
        self.more = 0

    def forward(self, x):
        self.calls += 1
        self.more += 1
        return x * self.scale

    def get_extra_state(self):
        return {"more": self.more}

    def set_extra_state(self, state):
        self.more = state["more"]


class Sharing(TinyMoE):
    """One rotary and one mask for both blocks, a parameter and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        rotary, mask = Rotary(), torch.ones(16)
        for block in self.blocks:
            block.rotary = rotary
            block.register_buffer("mask", mask)
        self.nothing = nn.Parameter(torch.empty(0, 5))
        self.also_nothing = self.nothing
        self.register_buffer("none", torch.empty(3, 0, dtype=torch.int32))

    def forward(self, x):
        self.blocks[0].mask.mul_(0.99)
        for block in self.blocks:
            x = block.rotary(x * block.mask)
        return super().forward(x + self.nothing.sum())


class Apart(Sharing):
    """The same names, and nothing is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].rotary, self.blocks[1].mask = Rotary(), torch.ones(16)
        self.also_nothing = nn.Parameter(torch.empty(0, 5))


QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def fit(model: pl.LightningModule, steps: int, store: Path | None = None, ckpt_path=None, **options) -> MoECheckpoint:
    checkpoint = MoECheckpoint(Dense(), store, **options) if store else None
    callbacks, bare = ([checkpoint], {}) if checkpoint else ([], {"enable_checkpointing": False})
    trainer = pl.Trainer(
        max_steps=steps, callbacks=callbacks, plugins=[MoECheckpointIO()] * (not store), **bare, **QUIET
    )
    trainer.fit(model, loader(64, shuffle=False), ckpt_path=ckpt_path)
    return checkpoint


def seeded(kind):
    pl.seed_everything(3, verbose=False)
    return kind()


def assert_same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(its store, the state_dict at its step 5, the one at step 8 of a run that nothing interrupted)."""
    root = tmp_path_factory.mktemp("shared")
    model, whole = seeded(Sharing), seeded(Sharing)
    fit(model, 5, root / "store")
    fit(whole, 8, root / "whole")
    return root / "store", model.state_dict(), whole.state_dict()


def test_the_run_itself_goes_on(trained, tmp_path):
    store, _, wanted = trained
    model = seeded(Sharing)
    assert fit(model, 8, tmp_path / "other", ckpt_path=str(store)).last.committed_step == 8
    assert_same(model.state_dict(), wanted)


def test_a_module_is_loaded_and_evaluated(trained):
    store, wanted, _ = trained
    assert_same(moe_ckpt.load_from_checkpoint(Sharing, store).state_dict(), wanted)
    assert_same(moe_ckpt.load_from_checkpoint(Apart, store).state_dict(), wanted)
    for kind in (Sharing, Apart):
        model = seeded(kind)
        trainer = pl.Trainer(plugins=[MoECheckpointIO()], enable_checkpointing=False, **QUIET)
        loaded = {}
        model.on_validation_start = lambda model=model, loaded=loaded: loaded.update(
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in model.state_dict().items()
            }
        )
        trainer.validate(model, loader(8, shuffle=False), ckpt_path=str(store), verbose=False)
        assert_same(loaded, wanted)


def test_lightning_goes_on_from_an_exported_file_and_from_the_store(trained, tmp_path):
    store, stored, wanted = trained
    out = export(store, "lightning", tmp_path / "five.ckpt")
    assert_same(torch.load(out, weights_only=True)["state_dict"], stored)
    for path in (out, store):
        model = seeded(Sharing)
        fit(model, 8, ckpt_path=str(path))
        assert_same(model.state_dict(), wanted)


def test_weights_come_into_models_that_share_and_that_do_not(trained, tmp_path):
    store, wanted, _ = trained
    files = export(store, "safetensors", tmp_path / "files")
    tensors = {name: value for name, value in wanted.items() if isinstance(value, torch.Tensor)}
    assert_same(safetensors.torch.load_file(files / "model.safetensors"), tensors)
    for number, source in enumerate((store, files)):
        for kind in (Sharing, Apart):
            model, began = seeded(kind), {}
            model.on_train_start = lambda model=model, began=began: began.update(
                {name: value.clone() for name, value in model.state_dict().items() if name in tensors}
            )
            fit(model, 1, tmp_path / f"new{number}{kind.__name__}", weights_from=source)
            assert_same(began, tensors)


def test_weights_of_a_model_that_shares_nothing_come_into_one_that_does(trained, tmp_path):
    apart = seeded(Apart)
    fit(apart, 2, tmp_path / "apart")
    with pytest.raises(CoverageError, match=r"has blocks\.1\.mask, which is not in the model"):
        fit(TinyMoE(), 1, tmp_path / "tiny", weights_from=tmp_path / "apart")
    fit(seeded(Sharing), 1, tmp_path / "sharing", weights_from=tmp_path / "apart")


def test_dcp_loads_all_names(trained, tmp_path):
    store, wanted, _ = trained
    tensors = {name: value for name, value in wanted.items() if isinstance(value, torch.Tensor)}
    out = export(store, "dcp", tmp_path / "dcp")
    for source in ({"checkpoint_id": out}, {"storage_reader": MoEStorageReader(store)}):
        blank = {name: torch.zeros_like(value) for name, value in tensors.items()}
        dcp.load({"model": blank}, **source)
        assert_same(blank, tensors)


def test_a_store_that_tells_no_other_names_opens_as_before(trained, monkeypatch):
    """Of an earlier release."""
    store, wanted, _ = trained
    reader, manifest = open_step(store)
    state = reader.state(manifest, 0)
    assert state["plain"].pop("aliases")
    assert state["plain"].pop("unsliced")
    monkeypatch.setattr(reader, "state", lambda manifest, rank: state)
    found = open_whole(reader, manifest).state_dict()
    assert set(wanted) - set(found) == {
        "blocks.1.mask",
        "blocks.1.rotary.calls",
        "blocks.1.rotary._extra_state",
        "nothing",
        "also_nothing",
    }
