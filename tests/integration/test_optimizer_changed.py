"""A run that comes back with another optimizer is refused before anything is changed, whichever way it comes back."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from moe_ckpt.callbacks.checkpoint_io import MoECheckpointIO
from moe_ckpt.callbacks.moe_checkpoint import MoECheckpoint
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import MoC
from tests.support.tiny_moe import TinyMoE, loader

STEPS = 4


def fit(store: Path | None, optimizer: str, steps: int = STEPS, ckpt_path: str | None = None, **trainer) -> TinyMoE:
    """One life; ``store`` None: without the callback, with the plugin only."""
    pl.seed_everything(3)
    module = TinyMoE(optimizer=optimizer)
    callbacks = [] if store is None else [MoECheckpoint(MoC(k=1), store, when_busy="wait")]
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    try:
        pl.Trainer(
            max_steps=steps, callbacks=callbacks, enable_checkpointing=bool(callbacks), devices=1, **options, **trainer
        ).fit(module, loader(), ckpt_path=ckpt_path)
    except BaseException as error:
        error.module = module  # type: ignore[attr-defined]
        raise
    return module


def newest(store: Path) -> str:
    return str(max(path for path in store.glob("step_*") if (path / "MANIFEST.json").exists()))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A run with AdamW."""
    path = tmp_path_factory.mktemp("run") / "store"
    fit(path, "adamw")
    return path


def assert_untouched(module: TinyMoE, *, weights: bool = True) -> None:
    [optimizer] = [module.optimizers().optimizer]
    assert not optimizer.state
    assert not {key for group in optimizer.param_groups for key in group} & {"betas", "amsgrad"}
    assert optimizer.param_groups[0]["lr"] == 0.05
    if weights:
        pl.seed_everything(3)
        before = TinyMoE(optimizer="sgd").state_dict()
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def contents(store: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(store.rglob("*")) if p.is_file() and p.parent != store}


def test_automatic_resume_with_another_optimizer(store):
    before = contents(store)
    with pytest.raises(ConfigError, match=r"optimizer 0:.*torch\.optim\.SGD") as caught:
        fit(store, "sgd", 8)
    assert_untouched(caught.value.module)
    assert contents(store) == before
    assert min(fit(store, "adamw", 6).losses) == STEPS, "its own optimizer goes on"


@pytest.mark.parametrize("kind", ["callback", "plugin"])
def test_a_named_step_with_another_optimizer(store, tmp_path, kind):
    own = tmp_path / "other" if kind == "callback" else None
    plugins = {} if kind == "callback" else {"plugins": [MoECheckpointIO()]}
    with pytest.raises(ConfigError, match=r"optimizer 0:.*torch\.optim\.SGD") as caught:
        fit(own, "sgd", 8, ckpt_path=newest(store), **plugins)
    assert_untouched(caught.value.module, weights=False)  # Lightning loads weights before there are optimizers
    module = fit(own, "adamw", 8, ckpt_path=newest(store), **plugins)
    assert max(module.losses) == 7
    assert os.path.isdir(newest(store))


def test_an_implementation_flag_is_no_other_optimizer(store, tmp_path):
    module = fit(tmp_path / "other", "fused", 8, ckpt_path=newest(store))
    assert max(module.losses) == 7
