"""Train a tiny GPT-MoE under Lightning, kill it, start it again, and compare it with a run that nobody killed."""

import logging
import tempfile
from signal import raise_signal
from typing import Any

import lightning.pytorch as pl
import torch
from lives import start
from torchdata.stateful_dataloader import StatefulDataLoader

from moe_ckpt import load_from_checkpoint
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import Dense


class GPT(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = torch.nn.Embedding(64, 32), torch.nn.MultiheadAttention(32, num_heads=2)
        self.router, self.head = torch.nn.Linear(32, 4), torch.nn.Linear(32, 64)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x, later = self.embedding(batch[:, :-1].T), torch.ones(16, 16, dtype=torch.bool).triu(1)
        tokens = out = (x + self.attention(x, x, x, attn_mask=later)[0]).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        for number, expert in enumerate(self.experts):
            rows, rank = torch.where(chosen == number)
            out = out.index_add(0, rows, weights[rows, rank, None] * expert(tokens[rows]))
        return torch.nn.functional.cross_entropy(self.head(out), batch[:, 1:].T.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(checkpoint: MoECheckpoint, kill_at: int | None = None, max_steps: int = 40) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # more would wait for one another in a model as small as this
    pl.seed_everything(1, verbose=False)
    data = StatefulDataLoader(torch.randint(64, (160, 17)), batch_size=4, shuffle=True)
    kill = pl.callbacks.LambdaCallback(on_train_batch_start=lambda t, *_: t.global_step == kill_at and raise_signal(9))
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(max_steps=max_steps, accelerator="cpu", callbacks=[checkpoint, kill], **quiet).fit(GPT(), data)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        for name, kill_at in (("whole", None), ("killed", 25), ("killed", None)):
            start(train, MoECheckpoint(Dense(every_n_steps=5), dirpath=f"{root}/{name}"), kill_at)
        whole, killed = (load_from_checkpoint(GPT, f"{root}/{name}").state_dict() for name in ("whole", "killed"))
    print("the same bits as without a kill:", all(torch.equal(whole[name], killed[name]) for name in whole))
