"""What a checkpoint weighs: the files of a real training run against the formula of MoC.

One checkpoint holds (P_nonexpert + K/E * P_expert) parameters, gates among the non-experts, at 12 bytes
each under AdamW in fp32 (weight and two moments), and one step count of 4 bytes per parameter tensor.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import LocalStorage
from tests.integration.lives import fast_directory
from tests.support.tiny_moe import Router, StackedExperts

WIDTH, HIDDEN, EXPERTS, LAYERS, STEPS = 64, 1024, 8, 2, 2
P_EXPERT = LAYERS * EXPERTS * 2 * WIDTH * HIDDEN
P_NON_EXPERT = (WIDTH + 1) * WIDTH + LAYERS * EXPERTS * WIDTH
"""A linear layer with its bias, and the gates."""
TENSORS = 2 + LAYERS * 3
"""Parameter tensors: weight and bias; a gate and two stacks of experts per layer."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router(WIDTH, EXPERTS, 1)
        self.experts = StackedExperts(EXPERTS, WIDTH, HIDDEN)

    def forward(self, x):
        weights, indices = self.gate(x)
        return x + self.experts(x, indices, weights)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def training_step(self, batch, batch_idx):
        x = self.embed(batch[0].to(self.embed.weight.dtype))
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.float(), batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained(policy, **trainer) -> tuple[list[tuple[Manifest, int, int]], Model]:
    """Per checkpoint, oldest first: (manifest, bytes of model and optimizer slices, bytes of its own shards)."""
    torch.manual_seed(3)
    data = DataLoader(TensorDataset(torch.randn(STEPS * 4, WIDTH)), batch_size=4)
    module = Model()
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_", dir=fast_directory()) as directory:
        callback = MoECheckpoint(
            policy, directory, save_last=False, when_busy="wait", retention=RetentionPolicy(keep_last=100)
        )
        pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
            default_root_dir=directory,
            **trainer,
        ).fit(module, data)
        reader = StoreReader(LocalStorage(directory))
        manifests = [reader.manifest(name) for name in reversed(reader.directories())]
        assert [m.step for m in manifests] == list(range(1, STEPS + 1))
        return [(m, *_weigh(reader, m, Path(directory))) for m in manifests], module


def _weigh(reader: StoreReader, manifest: Manifest, root: Path) -> tuple[int, int]:
    own = {f.path for f in manifest.files if f.step == manifest.step}
    headers = reader.headers(manifest)
    slices = sum(e.nbytes for path in own for e in headers[path].slices if e.operator)
    shards = (root / manifest.directory).glob("*.safetensors")
    on_disk = {path.relative_to(root).as_posix(): path.stat().st_size for path in shards}
    assert on_disk.keys() == own
    return slices, sum(on_disk.values())


def formula(k: int, bytes_per_parameter: int) -> int:
    parameters = P_NON_EXPERT + P_EXPERT * k // EXPERTS
    return parameters * bytes_per_parameter + TENSORS * 4


def check(weights: list[tuple[Manifest, int, int]], k: int, bytes_per_parameter: int) -> None:
    """The first checkpoint is dense whatever K is."""
    for number, (_, slices, files) in enumerate(weights):
        expected = formula(EXPERTS if number == 0 else k, bytes_per_parameter)
        assert slices == expected
        assert files == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("k", [1, 2, EXPERTS])
def test_moc_weighs_what_the_formula_says(k):
    weights, module = trained(MoC(k=k))
    assert sum(p.numel() for p in module.parameters()) == P_NON_EXPERT + P_EXPERT, "the formula is of this model"
    check(weights, k, 12)


def test_dense_weighs_all():
    weights, _ = trained(Dense())
    check(weights, EXPERTS, 12)


def test_bfloat16_weighs_half():
    """Weights and both moments are bf16 under ``bf16-true``; the step count stays fp32."""
    weights, module = trained(MoC(k=2), precision="bf16-true")
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    check(weights, 2, 6)


def test_mixed_precision_weighs_as_fp32():
    weights, _ = trained(MoC(k=1), precision="bf16-mixed")
    check(weights, 1, 12)
