"""Train a tiny Qwen3-MoE with transformers, kill it, start it again, and compare it with one that nobody killed."""

from signal import raise_signal
from typing import Any

import torch
from lives import compare
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerCallback, TrainingArguments

from moe_ckpt.policies import Dense
from moe_ckpt.transformers import MoECheckpointCallback


class Kill(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise_signal(9)


def train(root: str, name: str, kill_at: int | None) -> None:
    torch.manual_seed(1)
    size = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.1}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, num_experts=4, num_experts_per_tok=2, **size, **heads))
    data = [{"input_ids": words, "labels": words} for words in torch.randint(64, (80, 16))]
    arguments = TrainingArguments(
        output_dir=f"{root}/trainer", per_device_train_batch_size=4, num_train_epochs=3, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    ours = MoECheckpointCallback(Dense(), dirpath=f"{root}/{name}")
    Trainer(model, arguments, train_dataset=data, callbacks=[ours, Kill(kill_at)]).train()
    torch.save(model.state_dict(), f"{root}/{name}.pt")


if __name__ == "__main__":
    compare(train, 25, 45)
