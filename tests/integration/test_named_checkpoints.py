"""``ckpt_path`` and ``load_from_checkpoint`` with steps and stores, with the callback and without."""

from __future__ import annotations

import shutil
import threading

import lightning.pytorch as pl
import pytest
import torch

import moe_ckpt
from moe_ckpt.callbacks import MoECheckpoint, MoECheckpointIO, checkpoint_io
from moe_ckpt.errors import ConfigError, NoCheckpointError, StoreError, UnsupportedError
from moe_ckpt.interop.export import export
from moe_ckpt.policies import Dense, MoC, MoEvement
from tests.support.tiny_moe import TinyMoE, loader, state_of
from tests.unit.engine_parts import ThreadRanks, run_threads


class Predicting(TinyMoE):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def trainer(*callbacks, **options) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, "enable_checkpointing": bool(callbacks), **options})


def fit(root, policy, steps, **options) -> tuple[Predicting, pl.Trainer]:
    pl.seed_everything(7, verbose=False)
    model = Predicting(experts=4, dropout=0.2)
    made = trainer(MoECheckpoint(policy, root, when_busy="wait"), max_steps=steps, max_epochs=-1)
    made.fit(model, loader(32), **options)
    return model, made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(store, the model that it holds the end of)."""
    root = tmp_path_factory.mktemp("run") / "store"
    return root, fit(root, MoC(k=1), 6)[0]


def where(run, kind):
    return run[0] if kind == "store" else run[0] / max(p.parent.name for p in run[0].glob("step_*/MANIFEST.json"))


def scores(made, model, **options):
    (tested,) = made.test(model, loader(8, shuffle=False), verbose=False, **options)
    return tested["test_loss"]


@pytest.mark.parametrize("kind", ["store", "step"])
@pytest.mark.parametrize("how", ["callback", "plugin"])
@pytest.mark.quick("callback-store", "plugin-step")
def test_evaluation_takes_a_step_or_a_store(run, tmp_path, kind, how):
    expected = scores(trainer(), run[1])
    if how == "callback":
        made = trainer(MoECheckpoint(Dense(), tmp_path / "unused"))
    else:
        made = trainer(plugins=[MoECheckpointIO()])
    path = where(run, kind)
    assert scores(made, Predicting(), ckpt_path=path) == expected
    (validated,) = made.validate(Predicting(), loader(8, shuffle=False), verbose=False, ckpt_path=str(path))
    assert validated["val_loss"] == expected
    found = torch.cat(made.predict(Predicting(), loader(8, shuffle=False), ckpt_path=path))
    assert torch.equal(found, torch.cat(trainer().predict(run[1], loader(8, shuffle=False))))
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("kind", ["store", "step"])
def test_a_module_is_made_from_a_step_or_a_store(run, kind):
    model = moe_ckpt.load_from_checkpoint(Predicting, where(run, kind))
    assert model.hparams == run[1].hparams
    assert model.hparams.dropout == 0.2
    assert all(torch.equal(model.state_dict()[name], value) for name, value in run[1].state_dict().items())
    assert moe_ckpt.load_from_checkpoint(Predicting, where(run, kind), dropout=0.5).hparams.dropout == 0.5
    with pytest.raises(NoCheckpointError, match=r"no\.ckpt is neither.*Predicting\.load_from_checkpoint"):
        moe_ckpt.load_from_checkpoint(Predicting, "no.ckpt")


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_an_export_given_for_a_step_is_named(run, tmp_path, to):
    out = export(where(run, "step"), to, tmp_path / "out")
    with pytest.raises(NoCheckpointError, match=r"out is .*(safetensors|torch\.distributed).*Predicting, \.\.\.\)"):
        moe_ckpt.load_from_checkpoint(Predicting, out)
    if to == "safetensors":
        with pytest.raises(NoCheckpointError, match=r"model\.safetensors is an export.*weights_from="):
            moe_ckpt.load_from_checkpoint(Predicting, str(out / "model.safetensors"))


def test_swapped_arguments_are_named(run):
    with pytest.raises(ConfigError, match=r"load_from_checkpoint\('.*', Predicting\): give the class first"):
        moe_ckpt.load_from_checkpoint(str(run[0]), Predicting)


def test_training_goes_on_from_the_newest_step_of_a_store(run, tmp_path, caplog):
    """Of its own store, without the warning about another step; and from another one, which stays as it was."""
    straight, made = fit(tmp_path / "straight", Dense(1), 9)
    expected = state_of(straight, made.optimizers[0])
    fit(tmp_path / "own", Dense(1), 6)
    shutil.copytree(tmp_path / "own", tmp_path / "other")
    for target, source in (("new", "other"), ("own", "own")):
        caplog.clear()
        model, made = fit(tmp_path / target, Dense(1), 9, ckpt_path=tmp_path / source)
        assert sorted(model.losses) == [6, 7, 8]
        found = state_of(model, made.optimizers[0])
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert f"resumed at step 6 from {tmp_path / source}/step_00000006" in caplog.text
        assert "is loaded, although" not in caplog.text


def test_a_damaged_newest_step_costs_the_steps_since_the_one_before(run, tmp_path, caplog):
    shutil.copytree(run[0], tmp_path / "store")
    newest = where((tmp_path / "store", None), "step")
    shard = newest / "rank_00000_non_expert.safetensors"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    moe_ckpt.load_from_checkpoint(Predicting, tmp_path / "store")
    assert f"{newest.name} of {tmp_path / 'store'} cannot be used" in caplog.text


def test_what_is_no_store_is_said_so(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoCheckpointError, match=r"empty is a directory, but neither a step nor a store.*no ckpt_path"):
        fit(tmp_path / "new", Dense(1), 2, ckpt_path=tmp_path / "empty")
    fit(tmp_path / "begun", Dense(100), 1)
    for path in (tmp_path / "begun").glob("step_*"):
        shutil.rmtree(path)
    with pytest.raises(NoCheckpointError, match="has no committed step yet"):
        trainer(plugins=[MoECheckpointIO()]).test(Predicting(), loader(8), ckpt_path=tmp_path / "begun")


class Stop(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 7:
            raise KeyError("stop")


def test_a_newest_sparse_window_is_no_state_to_train_on_from(tmp_path, caplog):
    pl.seed_everything(7, verbose=False)
    root = tmp_path / "store"
    with pytest.raises(KeyError):
        trainer(MoECheckpoint(MoEvement(3), root), Stop(), max_steps=9, max_epochs=-1).fit(Predicting(), loader(64))
    with pytest.raises(UnsupportedError, match="without ckpt_path"):
        fit(root, MoEvement(3), 9, ckpt_path=root)
    fit(root, MoEvement(3), 9)  # leaves a dense one
    assert scores(trainer(plugins=[MoECheckpointIO()]), Predicting(), ckpt_path=root) > 0


def test_what_rank_0_finds_in_a_store_all_ranks_hear(run, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    shutil.copy(run[0] / "store.json", tmp_path / "empty")
    comms = {}
    monkeypatch.setattr(checkpoint_io, "make_communicator", lambda timeout_secs: comms[threading.get_ident()])

    def one(comm):
        comms[threading.get_ident()] = comm
        newest = checkpoint_io.load_named(run[0], lambda reader, manifest: manifest.step)
        with pytest.raises(StoreError) as caught:
            checkpoint_io.load_named(tmp_path / "empty", lambda reader, manifest: None)
        return newest, caught.value

    (first, zero), (second, other) = run_threads(ThreadRanks(2), one)
    assert first == second == 6
    assert type(zero) is NoCheckpointError
    assert f"rank 0 cannot choose a checkpoint of {tmp_path / 'empty'}: NoCheckpointError: {zero}" == str(other)
