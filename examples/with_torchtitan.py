"""Train a small DeepSeek-V3 with torchtitan, kill it, start it again, and compare it with one that nobody killed."""

import os
from signal import raise_signal
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan_on_cpu  # noqa: F401 - leave this out where there are GPUs
from lives import ALONE, compare
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

from moe_ckpt.policies import Dense
from moe_ckpt.torchtitan import CheckpointManager


class Words(torch.utils.data.IterableDataset):
    number = 0

    def __iter__(self) -> Any:
        while True:
            words = torch.randint(2048, (17,), generator=torch.Generator().manual_seed(self.number))
            self.number += 1
            yield {"input": words[:-1], "positions": torch.arange(16)}, words[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def loader(dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any) -> ParallelAwareDataloader:
    return ParallelAwareDataloader(Words(), dp_rank, dp_world_size, batch_size=local_batch_size)


def train(root: str, name: str, kill_at: int | None) -> None:
    os.environ |= ALONE
    config = deepseek_v3_debugmodel()
    config.checkpoint = CheckpointManager.Config(policy=Dense(), folder=name)  # the one line
    config.dump_folder, config.dataloader, config.debug.seed = root, SimpleNamespace(build=loader), 7
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 16, 2, 30
    config.parallelism.spmd_backend, config.training.disable_cuda_graphs = "partial_dtensor", True
    config.tokenizer, config.activation_checkpoint = SimpleNamespace(build=lambda **_: None), None
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    trainer = config.build()
    step = trainer.train_step
    trainer.train_step = lambda batches: raise_signal(9) if trainer.step - 1 == kill_at else step(batches)
    trainer.train()
    trainer.close()
    weights = get_model_state_dict(trainer.model_parts[0], options=StateDictOptions(full_state_dict=True))
    torch.save(weights, f"{root}/{name}.pt")


if __name__ == "__main__":
    compare(train, 12, 20)
