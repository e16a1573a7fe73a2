"""Trains a small MoE model under PyTorch Lightning, with a checkpoint at every step that storage keeps up with.

Start it, kill it at any moment, and start it again: ``python recipes/quickstart.py``.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import Dense

FEATURES, WIDTH, EXPERTS = 16, 64, 8


class MoELayer(nn.Module):
    """Sends each token to the two experts that the router scores highest."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns ``tokens``, ``[N, WIDTH]``, plus the weighted outputs of their experts."""
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = tokens
        for number, expert in enumerate(self.experts):
            rows, position = torch.where(chosen == number)
            out = out.index_add(0, rows, weights[rows, position, None] * expert(tokens[rows]))
        return out


class Model(pl.LightningModule):
    """Two MoE layers that learn to shift each row of numbers by one place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), MoELayer(), MoELayer(), nn.Linear(WIDTH, FEATURES))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The loss of one batch, ``[N, FEATURES]``."""
        loss = nn.functional.mse_loss(self.layers(batch), batch.roll(1, -1))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Trains, or continues from the newest checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000, help="optimizer steps of the whole run (default 2000)")
    parser.add_argument("--dir", default="checkpoints/quickstart", help="the store (default %(default)s)")
    arguments = parser.parse_args()

    pl.seed_everything(1)
    data = torch.randn(20_000, FEATURES)
    loader = StatefulDataLoader(data, batch_size=32, shuffle=True)  # can say where it is: needed for exact resume
    checkpoint = MoECheckpoint(Dense(), dirpath=arguments.dir)
    trainer = pl.Trainer(max_steps=arguments.steps, max_epochs=-1, callbacks=[checkpoint], logger=False)
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
