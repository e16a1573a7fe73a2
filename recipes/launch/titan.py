"""Configs of torchtitan with checkpoints in memory, which ``torchtitan.train`` takes by module and name.

recipes/launch/torchrun.sh -m torchtitan.train --module recipes.launch.titan --config qwen3_30b_a3b

torchtitan's options may follow, such as ``--hf_assets_path`` and ``--dataloader.dataset_path``.
"""

import os
from typing import Any

from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
from torchtitan.models.qwen3 import config_registry as qwen3

from moe_ckpt import Memory
from moe_ckpt.policies import Dense
from moe_ckpt.torchtitan import CheckpointManager


def checkpointed(config: Any) -> Any:
    """The config with everything about checkpoints."""
    config.dump_folder = os.environ.get("RUN", "runs/titan")
    config.checkpoint = CheckpointManager.Config(
        policy=Dense(every_n_steps=1),
        folder="checkpoints",
        # In /dev/shm of each node, with a copy on another; storage gets one in ten minutes.
        memory=Memory(replicas=1 if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1 else 0, storage_every="10min"),
        timeout_secs="5min",
    )
    config.training.disable_cuda_graphs = True  # their replay counts no tokens
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a newer torch than 2.13
    return config


def qwen3_30b_a3b() -> Any:
    """Experts are divided over 16 ranks."""
    config = checkpointed(qwen3.qwen3_30b_a3b())
    config.parallelism.expert_parallel_degree = 16
    return config


def deepseek_v3_671b() -> Any:
    """Experts are divided over 64 ranks."""
    config = checkpointed(deepseek_v3.deepseek_v3_671b())
    config.parallelism.expert_parallel_degree = 64
    return config
