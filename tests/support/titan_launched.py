"""A tiny run of torchtitan on CPUs, with the checkpoints of ``recipes/launch/titan.py``; run by torchrun."""

from __future__ import annotations

import os
from types import SimpleNamespace

import with_torchtitan
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

from moe_ckpt import Memory
from recipes.launch.titan import checkpointed

if __name__ == "__main__":
    config = checkpointed(deepseek_v3_debugmodel())
    config.checkpoint.memory = Memory(storage_every=5)  # the test waits for what is stored
    config.dataloader = SimpleNamespace(build=with_torchtitan.loader)
    config.tokenizer = SimpleNamespace(build=lambda **_: None)
    config.training.seq_len, config.training.local_batch_size = 16, 2
    config.training.steps = int(os.environ["STEPS"])
    config.activation_checkpoint = None
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    trainer = config.build()
    trainer.train()
    trainer.close()
