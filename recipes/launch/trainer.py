"""A ``transformers.Trainer`` on as many processes as torchrun starts: a Qwen3-MoE from scratch, on made-up text.

recipes/launch/torchrun.sh recipes/launch/trainer.py
"""

import os
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

from moe_ckpt import Memory
from moe_ckpt.policies import Dense
from moe_ckpt.transformers import MoECheckpointCallback

RUN = os.environ.get("RUN", "runs/trainer")
SIZE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
SIZE |= {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZE |= {"moe_intermediate_size": 64}


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    torch.manual_seed(1)  # the same model on every rank
    Trainer(
        model=Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE)),
        args=TrainingArguments(
            output_dir=f"{RUN}/output",
            max_steps=int(os.environ.get("STEPS", 200)),
            per_device_train_batch_size=4,
            save_strategy="no",  # checkpoints are the callback's
            report_to=[],
            # fsdp="full_shard", fsdp_config={"version": 2},   # for a model that one GPU does not hold
        ),
        train_dataset=Text(),
        callbacks=[
            MoECheckpointCallback(Dense(every_n_steps=1), dirpath=f"{RUN}/checkpoints", memory=Memory(storage_every=20))
        ],
    ).train()
