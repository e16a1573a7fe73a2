"""What real training wrote under Lightning opens with every reader, and equals the model that was trained."""

from __future__ import annotations

import json

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.cli.main import main
from moe_ckpt.interop.dcp import MoEStorageReader
from moe_ckpt.interop.export import export
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.reading.reader import StoreReader, newest_good
from moe_ckpt.storage import open_storage
from tests.support.tiny_moe import TinyMoE, loader
from tests.support.verifying import verify_store


def trainer(**kwargs) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(**quiet, **{"devices": 1, "enable_checkpointing": True, **kwargs})


def train(root, policy, steps: int, **options) -> TinyMoE:
    """A seeded run; with ``root`` None nothing of ours is in it."""
    pl.seed_everything(7, verbose=False)
    model = TinyMoE(**options)
    callbacks = [MoECheckpoint(policy, dirpath=str(root))] if root is not None else []
    trainer(max_steps=steps, callbacks=callbacks, enable_checkpointing=bool(callbacks)).fit(model, loader(40))
    return model


@pytest.mark.parametrize("policy", [Dense(), MoC(k=1)], ids=["dense", "moc"])
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_real_store_opens_everywhere(tmp_path, capsys, policy, scheme):
    root = f"{scheme}{tmp_path}/store"
    model = train(root, policy, 6)
    optimizer = model.trainer.optimizers[0]
    reader = StoreReader(open_storage(root))
    assert verify_store(open_storage(root)) == []
    newest = newest_good(reader)
    assert newest is not None
    assert newest.step == 6
    wanted = model.state_dict()

    def assert_equal(found):
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name

    step = f"{root}/{newest.directory}"
    state = {name: torch.zeros_like(value) for name, value in wanted.items()}
    moments = get_optimizer_state_dict(model, optimizer)["state"]
    blank = {fqn: {k: torch.zeros_like(v) for k, v in values.items()} for fqn, values in moments.items()}
    dcp.load({"model": state, "optim": {"state": blank}}, storage_reader=MoEStorageReader(step))
    assert_equal(state)
    for fqn, values in moments.items():
        for name, value in values.items():
            assert torch.equal(blank[fqn][name], value), (fqn, name)

    out = export(step, "safetensors", tmp_path / "safetensors")
    assert_equal(safetensors.torch.load_file(out / "model.safetensors"))
    out = export(step, "lightning", tmp_path / "x.ckpt")
    assert_equal(torch.load(out, weights_only=True)["state_dict"])
    out = export(step, "dcp", tmp_path / "dcp")
    plain = {"model": {name: torch.zeros_like(value) for name, value in wanted.items()}}
    dcp.load(plain, checkpoint_id=out)
    assert_equal(plain["model"])

    assert main(["inspect", root, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["steps"][0]["step"] == 6
    assert facts["steps"][0]["routed_tokens"] > 0
    assert main(["verify", root]) == 0


def test_lightning_goes_on_from_an_exported_file_to_the_same_weights(tmp_path):
    """6 steps in one go, against 3 steps, export, and 3 more in a Trainer that knows nothing of this package."""
    straight = train(None, Dense(), 6, dropout=0.0)
    train(tmp_path / "store", Dense(), 3, dropout=0.0)
    out = export(tmp_path / "store", "lightning", tmp_path / "three.ckpt")
    model = TinyMoE(dropout=0.0)
    resumed = trainer(max_steps=6, enable_checkpointing=False)
    resumed.fit(model, loader(40), ckpt_path=str(out), weights_only=True)
    assert resumed.global_step == 6
    for name, value in straight.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
