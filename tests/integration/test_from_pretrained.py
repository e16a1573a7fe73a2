"""An export of a model of transformers, trained inside a LightningModule, opens with ``from_pretrained`` as it is."""

from __future__ import annotations

import json

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import moe_ckpt
from moe_ckpt.callbacks.moe_checkpoint import MoECheckpoint
from moe_ckpt.cli.main import main
from moe_ckpt.errors import ConfigError
from moe_ckpt.interop.export import export
from moe_ckpt.policies import Dense, MoC
from tests.support.moe_models import family, tokens

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Tuned(pl.LightningModule):
    """head: a parameter of its own beside the model of transformers."""

    def __init__(self, attribute: str, model: nn.Module, head: bool = False):
        super().__init__()
        self.attribute = attribute
        self.holder = nn.Module()
        owner, _, name = attribute.rpartition(".")
        setattr(self.holder if owner else self, name, model)
        if head:
            self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        loss = self.get_submodule(self.attribute)(input_ids=batch, labels=batch, use_cache=False).loss
        return loss * getattr(self, "scale", 1.0)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(place, module, steps=3):
    batches = torch.utils.data.DataLoader([tokens(seed, batch=1)[0] for seed in range(2 * steps)], batch_size=2)
    trainer = pl.Trainer(max_steps=steps, callbacks=[MoECheckpoint(MoC(k=1), place)], devices=1, **QUIET)
    trainer.fit(module, batches)
    return place


def assert_opens(out, trained: nn.Module) -> nn.Module:
    loaded, info = type(trained).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    expected = dict(trained.named_parameters())
    assert loaded.state_dict().keys() == trained.state_dict().keys()
    for name, value in loaded.named_parameters():
        assert torch.equal(value, expected[name]), name
    trained.eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens(9)).logits, trained(tokens(9)).logits)
    return loaded


@pytest.mark.parametrize(("name", "attribute", "head"), [("Qwen3Moe", "model", False), ("Mixtral", "holder.net", True)])
def test_the_directory_opens_as_it_is(tmp_path, name, attribute, head):
    model = family(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    train(tmp_path / "store", Tuned(attribute, model, head))
    kind = "safetensors" if head else "hf"
    assert main(["export", str(tmp_path / "store"), "--to", kind, "-o", str(tmp_path / "out")]) == 0
    loaded = assert_opens(tmp_path / "out", model)
    assert not all(torch.equal(value, before[key]) for key, value in loaded.state_dict().items())
    saved = tmp_path / "by transformers"
    model.save_pretrained(saved)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads((saved / file).read_text())
    about = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
    assert about["prefix"] == attribute + "."
    assert about["other"] == (["scale"] if head else [])
    assert (tmp_path / "out" / "other.safetensors").exists() == head


def test_tied_embeddings_large_models_and_other_types(tmp_path):
    import transformers

    from tests.support.moe_models import _BASE, FAMILIES

    config = transformers.Qwen3MoeConfig(**{**_BASE, **FAMILIES["Qwen3Moe"], "tie_word_embeddings": True})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    train(tmp_path / "store", Tuned("net", model))
    out = export(tmp_path / "store", "safetensors", tmp_path / "out", max_file_bytes="10KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert not (out / "model.safetensors").exists()
    assert_opens(out, model)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_of_several_types_all_values_come_back_by_the_widest_and_all_types_by_hand(tmp_path, caplog):
    model = family("Qwen3Moe").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "norm.weight")):
            parameter.data = torch.rand(parameter.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path / "store") as ckpt:
        ckpt.resume()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        ckpt.after_step(1)
    out = export(tmp_path / "store", "hf", tmp_path / "out")
    wide = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32]
    assert f"{len(wide)} of {len(model.state_dict())} tensors are of another type than torch.bfloat16" in caplog.text
    assert "dtype=torch.float32" in caplog.text
    rounded, loaded = (type(model).from_pretrained(out, **more) for more in ({}, {"dtype": torch.float32}))
    by_hand = type(model).from_pretrained(out)
    by_hand.load_state_dict(load_file(out / "model.safetensors"), strict=False, assign=True)
    for name, value in model.state_dict().items():
        assert rounded.state_dict()[name].dtype == torch.bfloat16
        assert torch.equal(loaded.state_dict()[name], value.float())
        assert torch.equal(by_hand.state_dict()[name], value)
        assert by_hand.state_dict()[name].dtype == value.dtype
    assert not torch.equal(rounded.state_dict()[wide[0]].float(), model.state_dict()[wide[0]])


def test_a_config_that_is_no_json_costs_an_exports_config_and_no_training(tmp_path, caplog):
    model = family("Qwen3Moe")
    model.config.compute_dtype = torch.bfloat16
    train(tmp_path / "store", Tuned("model", model), steps=1)
    assert "dtype is not JSON serializable" in caplog.text
    out = export(tmp_path / "store", "safetensors", tmp_path / "out", strip_prefix="model.")
    assert load_file(out / "model.safetensors").keys() == model.state_dict().keys()
    with pytest.raises(ConfigError, match="has none, or several"):
        export(tmp_path / "store", "hf", tmp_path / "hf")


def test_a_prefix_by_hand(tmp_path):
    class Pair(Tuned):
        def __init__(self):
            super().__init__("student", family("Qwen3Moe"))
            self.teacher = family("Qwen3Moe", seed=5).requires_grad_(False)

    module = Pair()
    train(tmp_path / "store", module, steps=2)
    both = export(tmp_path / "store", "safetensors", tmp_path / "both")
    assert not (both / "config.json").exists(), "which of the two is not known"
    with pytest.raises(ConfigError, match="has none, or several"):
        export(tmp_path / "store", "hf", tmp_path / "hf")
    assert_opens(export(tmp_path / "store", "safetensors", tmp_path / "one", strip_prefix="teacher."), module.teacher)
    assert_opens(export(tmp_path / "store", "safetensors", tmp_path / "two", strip_prefix="student."), module.student)
    with pytest.raises(ConfigError, match=r"strip_prefix=.nobody\..: no tensor.s name"):
        export(tmp_path / "store", "safetensors", tmp_path / "three", strip_prefix="nobody.")
    with pytest.raises(ConfigError, match="for safetensors: dcp keeps"):
        export(tmp_path / "store", "dcp", tmp_path / "three", strip_prefix="student.")
    assert not (tmp_path / "three").exists()


def test_of_a_loop_without_a_module_around_the_model(tmp_path):
    model = family("Qwen3Moe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with moe_ckpt.attach(model, optimizer, policy=MoC(k=1), dirpath=tmp_path / "store") as ckpt:
        ckpt.resume()
        model(input_ids=tokens(1), labels=tokens(1)).loss.backward()
        optimizer.step()
        ckpt.after_step(1)
    assert_opens(export(tmp_path / "store", "hf", tmp_path / "out", max_file_bytes="10KB"), model)
