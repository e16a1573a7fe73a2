"""``weights_from=``: a new run with the weights of another, and nothing else of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe_ckpt.callbacks.moe_checkpoint import MoECheckpoint
from moe_ckpt.errors import ConfigError, CoverageError, DamagedError, NoCheckpointError, UnsupportedError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.interop.dcp import MoEStorageReader
from moe_ckpt.interop.export import export
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.policies import Dense, MoC, MoEvement
from tests.support.tiny_moe import TinyMoE, loader

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Wrapped(TinyMoE):
    """The same model under another attribute, as a LightningModule around a model of transformers has it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.net = nn.Module()
        for name in ("embed", "blocks", "head"):
            setattr(self.net, name, getattr(self, name))
            delattr(self, name)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("embed", "blocks", "head"):
                return getattr(self.net, name)
            raise


class Watching(pl.Callback):
    """The state with which training begins."""

    def __init__(self):
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer, pl_module):
        self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.step, self.optimizer = trainer.global_step, trainer.optimizers[0]
        self.stepped = bool(self.optimizer.state)


def fit(store: Path, steps: int = 4, *, policy=None, module=None, seed=3, **options) -> tuple[TinyMoE, Watching]:
    pl.seed_everything(seed)
    module = module or TinyMoE(optimizer=options.pop("optimizer", "adamw"))
    watching = Watching()
    callbacks = [MoECheckpoint(policy or Dense(), store, when_busy="wait", **options), watching]
    pl.Trainer(max_steps=steps, callbacks=callbacks, devices=1, **QUIET).fit(module, loader())
    return module, watching


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(store, directory of an export, weights as they were left)."""
    root = tmp_path_factory.mktemp("run")
    module, _ = fit(root / "store")
    export(root / "store", "safetensors", root / "export")
    return root / "store", root / "export", {n: v.clone() for n, v in module.state_dict().items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], prefix: str = "") -> bool:
    return found.keys() == {prefix + name for name in expected} and all(
        torch.equal(found[prefix + name], value) for name, value in expected.items()
    )


@pytest.mark.parametrize("kind", ["store", "step", "export", "file"])
def test_weights_come_and_nothing_else(run, tmp_path, kind, caplog):
    store, exported, weights = run
    step = max(store.glob("step_*"))
    source = {"store": store, "step": step, "export": exported, "file": exported / "model.safetensors"}[kind]
    module, began = fit(tmp_path / "new", 2, seed=8, optimizer="sgd", weights_from=source)
    assert same(began.weights, weights)
    assert (began.step, began.stepped, min(module.losses)) == (0, False, 0)
    assert began.optimizer.param_groups[0]["momentum"] == 0.9
    assert "betas" not in began.optimizer.param_groups[0]
    said = [line for line in caplog.text.splitlines() if "a new run starts with" in line]
    assert len(said) == 1
    assert str(source) in said[0] or step.name in said[0]
    # A restart goes on from its own store.
    again, began = fit(tmp_path / "new", 4, seed=9, optimizer="sgd", weights_from=source)
    assert began.step == 2
    assert min(again.losses) == 2
    assert not same(began.weights, weights)


def test_names_that_begin_differently(run, tmp_path):
    _, exported, weights = run
    _, began = fit(tmp_path / "a", 1, module=Wrapped(), weights_from=exported)
    assert same(began.weights, weights, "net.")
    module, _ = fit(tmp_path / "b", 2, module=Wrapped())
    inner = {name.removeprefix("net."): value for name, value in module.state_dict().items()}
    _, began = fit(tmp_path / "c", 1, weights_from=tmp_path / "b")
    assert same(began.weights, inner)


def test_sharded_files_and_another_type(run, tmp_path):
    _, exported, weights = run
    tensors = load_file(exported / "model.safetensors")
    (tmp_path / "hf").mkdir()
    halves = {name: value.bfloat16() if value.is_floating_point() else value for name, value in tensors.items()}
    names = sorted(halves)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: halves[name] for name in inside}, tmp_path / "hf" / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    _, began = fit(tmp_path / "new", 1, weights_from=tmp_path / "hf")
    expected = {n: v.bfloat16().to(v.dtype) if v.is_floating_point() else v for n, v in weights.items()}
    assert same(began.weights, expected)
    index["weight_map"][names[0]] = "../elsewhere.safetensors"
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match=r"files that are not there: \.\./elsewhere"):
        fit(tmp_path / "more", 1, weights_from=tmp_path / "hf")


def test_another_head(run, tmp_path, caplog):
    _, exported, weights = run
    tensors = load_file(exported / "model.safetensors")
    other = {name.replace("head.", "old_head."): value for name, value in tensors.items()}
    save_file(other, tmp_path / "other.safetensors")
    pl.seed_everything(1)
    module = TinyMoE()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CoverageError, match=r"head\.bias of the model is not in it.*it has old_head\.bias"):
        fit(tmp_path / "new", 1, module=module, weights_from=tmp_path / "other.safetensors")
    assert same(dict(module.state_dict()), before), "nothing was loaded"
    module.strict_loading = False
    _, began = fit(tmp_path / "loose", 1, module=module, weights_from=tmp_path / "other.safetensors")
    kept = {name: before[name] if name.startswith("head.") else value for name, value in weights.items()}
    assert same(began.weights, kept)
    said = caplog.text
    assert "not in the source, unchanged: head.bias, head.weight" in said
    assert "not in the model: old_head.bias, old_head.weight" in said
    save_file({**tensors, "head.weight": torch.zeros(4, 16)}, tmp_path / "small.safetensors")
    with pytest.raises(CoverageError, match=r"shape \[8, 16\] in the model, head\.weight \[4, 16\] in the source"):
        fit(tmp_path / "small", 1, module=module, weights_from=tmp_path / "small.safetensors")


def test_partial_checkpoints_and_windows(tmp_path, caplog):
    fit(tmp_path / "moc", 5, policy=MoC(k=1), save_last=False)
    fit(tmp_path / "a", 1, weights_from=tmp_path / "moc")
    assert "experts are older than that" in caplog.text
    fit(tmp_path / "windows", 5, policy=MoEvement(window=2), save_last=False, retention=RetentionPolicy(9))
    newest = max(path.parent for path in (tmp_path / "windows").glob("step_*/MANIFEST.json"))
    with pytest.raises(UnsupportedError, match=newest.name):
        fit(tmp_path / "b", 1, weights_from=newest)
    caplog.clear()
    fit(tmp_path / "c", 1, weights_from=tmp_path / "windows")
    said = caplog.text
    assert f"sparse window without one state of all weights: {newest.name}" in said
    caplog.clear()
    exported = export(tmp_path / "windows", "safetensors", tmp_path / "exported")
    assert json.loads((exported / "checkpoint.json").read_text())["step"] == 0
    assert f"sparse window without one state of all weights: {newest.name}" in caplog.text
    assert MoEStorageReader(tmp_path / "windows").read_metadata().state_dict_metadata


def test_a_named_step_that_is_not_finite_is_read_and_said(tmp_path, caplog):
    fit(tmp_path / "store", 1)
    step = max((tmp_path / "store").glob("step_*"))
    manifest = Manifest.decode((step / "MANIFEST.json").read_bytes(), step.name)
    (step / "MANIFEST.json").write_bytes(replace(manifest, not_finite="model/head.weight").encode())
    fit(tmp_path / "new", 1, weights_from=step)
    assert f"{step.name} holds values that are not finite" in caplog.text
    assert "it is read because it was named" in caplog.text


def test_what_cannot_be_a_source(run, tmp_path):
    store, exported, _ = run
    with pytest.raises(ConfigError, match=r"weights_from=.*lies in dirpath=.*another dirpath"):
        MoECheckpoint(Dense(), store, weights_from=max(store.glob("step_*")))
    for path, says in (
        (tmp_path / "nothing", "neither a store"),
        (store / "step_00000077", "does not exist.*committed there"),
    ):
        with pytest.raises(NoCheckpointError, match=says):
            fit(tmp_path / "new", 1, weights_from=path)
    (tmp_path / "pickle.ckpt").write_bytes(b"x")
    with pytest.raises((NoCheckpointError, NotADirectoryError)):
        fit(tmp_path / "new", 1, weights_from=tmp_path / "pickle.ckpt")
    raw = (exported / "model.safetensors").read_bytes()
    for number, damaged in enumerate((raw[:100], raw[:-1], b"\xff" * 8 + raw[8:], raw[:8] + b"[" * 50)):
        (tmp_path / f"{number}.safetensors").write_bytes(damaged)
        with pytest.raises(DamagedError, match=f"{number}.safetensors"):
            fit(tmp_path / "new", 1, weights_from=tmp_path / f"{number}.safetensors")
    shard = next(store.glob("step_*/rank_00000_expert.safetensors"))
    intact = shard.read_bytes()
    length = 8 + int.from_bytes(intact[:8], "little")
    header = json.loads(intact[8:length])
    at = length + next(entry["data_offsets"][0] for name, entry in header.items() if name.startswith("model/"))
    shard.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
    try:
        pl.seed_everything(1)
        module = TinyMoE()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with pytest.raises(DamagedError, match="checksum"):
            fit(tmp_path / "new", 1, module=module, weights_from=shard.parent)
        assert same(dict(module.state_dict()), before), "nothing was loaded"
    finally:
        shard.write_bytes(intact)
