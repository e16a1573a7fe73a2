"""Train a tiny GPT-MoE in a plain PyTorch loop, kill it, start it again, and compare it with one that nobody killed."""

from signal import raise_signal

import torch
from lives import compare
from torch.nn.functional import cross_entropy
from torchdata.stateful_dataloader import StatefulDataLoader

import moe_ckpt
from moe_ckpt.policies import Dense

STEPS = 60


class GPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = torch.nn.Embedding(64, 32), torch.nn.MultiheadAttention(32, 2, dropout=0.1)
        self.router, self.head = torch.nn.Linear(32, 4), torch.nn.Linear(32, 64)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x, later = self.embedding(words.T), torch.ones(16, 16, dtype=torch.bool).triu(1)
        tokens = out = (x + self.attention(x, x, x, attn_mask=later)[0]).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        for number, expert in enumerate(self.experts):
            rows, rank = torch.where(chosen == number)
            out = out.index_add(0, rows, weights[rows, rank, None] * expert(tokens[rows]))
        return self.head(out)


def train(root: str, name: str, kill_at: int | None) -> None:
    torch.manual_seed(1)
    model, data = GPT(), StatefulDataLoader(torch.randint(64, (160, 17)), batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ckpt = moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=f"{root}/{name}", stateful={"data": data})
    step = ckpt.resume().step
    while step < STEPS:
        for words in data:
            if step == kill_at:
                raise_signal(9)
            cross_entropy(model(words[:, :-1]), words[:, 1:].T.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ckpt.after_step(step)
            if step == STEPS:
                break
    ckpt.finish()
    torch.save(model.state_dict(), f"{root}/{name}.pt")


if __name__ == "__main__":
    compare(train, 25, 45)
