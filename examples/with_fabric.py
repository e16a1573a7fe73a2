"""Train the GPT-MoE of with_pytorch.py in a loop of Lightning's Fabric, kill it, and compare it with one not killed."""

from signal import raise_signal

import torch
from lightning.fabric import Fabric
from lives import compare
from torch.nn.functional import cross_entropy
from torchdata.stateful_dataloader import StatefulDataLoader
from with_pytorch import GPT, STEPS

import moe_ckpt
from moe_ckpt.policies import Dense


def train(root: str, name: str, kill_at: int | None) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    model, data = GPT(), StatefulDataLoader(torch.randint(64, (160, 17)), batch_size=4, shuffle=True)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    batches = fabric.setup_dataloaders(data)

    stateful = {"data": batches, "schedule": schedule}
    with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=f"{root}/{name}", stateful=stateful) as ckpt:
        step = ckpt.resume().step
        while step < STEPS:
            for words in batches:
                if step == kill_at:
                    raise_signal(9)
                fabric.backward(cross_entropy(model(words[:, :-1]), words[:, 1:].T.flatten()))
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                ckpt.after_step(step)
                if step == STEPS:
                    break
    torch.save(model.state_dict(), f"{root}/{name}.pt")


if __name__ == "__main__":
    compare(train, 25, 45)
