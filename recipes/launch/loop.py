"""A PyTorch loop on as many processes as torchrun starts: a Qwen3-MoE under DDP or FSDP2, on made-up text.

recipes/launch/torchrun.sh recipes/launch/loop.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_ckpt
from moe_ckpt.policies import Dense

RUN, STEPS = os.environ.get("RUN", "runs/loop"), int(os.environ.get("STEPS", 200))
SIZE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
SIZE |= {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZE |= {"moe_intermediate_size": 64}


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group()
    torch.manual_seed(1)  # the same model on every rank
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE))
    model.to(device)
    if "FSDP" in os.environ:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=True)  # an expert may get no token
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    with moe_ckpt.attach(
        model,
        optimizer,
        policy=Dense(every_n_steps=1),
        dirpath=f"{RUN}/checkpoints",
        stateful={"lr": schedule},
        memory=moe_ckpt.Memory(storage_every=20),  # replicas=1 on several nodes
    ) as ckpt:
        for step in range(ckpt.resume().step, STEPS):
            seed = step * dist.get_world_size() + dist.get_rank()
            tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(seed)).to(device)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            ckpt.after_step(step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
