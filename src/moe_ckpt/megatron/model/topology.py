"""This rank's place in Megatron's parallel layout, as checkpointing needs to know it."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.megatron.compat import megatron_core
from moe_ckpt.megatron.model.state import MegatronTrainingState
from moe_ckpt.megatron.model.world import World, all_digests, exchange
from moe_ckpt.ports import Communicator


def require_groups() -> None:
    """Raises ``ConfigError`` unless processes and Megatron's groups are set up."""
    if not dist.is_initialized():
        raise ConfigError("moe_ckpt.megatron: torch.distributed is not initialized; call init_process_group first")
    state = megatron_core().parallel_state
    if not state.model_parallel_is_initialized():
        raise ConfigError(
            "moe_ckpt.megatron: Megatron's process groups do not exist; call "
            "megatron.core.parallel_state.initialize_model_parallel first"
        )
    tensor, expert_tensor = state.get_tensor_model_parallel_world_size(), state.get_expert_tensor_parallel_world_size()
    if tensor > 1 and state.get_expert_model_parallel_world_size() == 1 and expert_tensor != tensor:
        raise UnsupportedError(
            f"tensor parallelism {tensor} with expert-tensor parallelism {expert_tensor} and no expert parallelism: "
            f"megatron-core {megatron_core().version} then reduces the gradients of experts over data-parallel ranks "
            "only, and their copies on tensor-parallel ranks become different models. Set "
            f"expert_tensor_parallel_size={tensor}, or expert_model_parallel_size above 1."
        )


def bind(state: MegatronTrainingState, comm: Communicator) -> World:
    """Tells ``state`` what the other ranks hold, and returns that. A collective of the training thread.

    Args:
        state: Of this rank.
        comm: The ranks.

    Raises:
        CoverageError: The ranks together do not hold the model.
    """
    groups = megatron_core().parallel_state
    stage, expert_rank = groups.get_pipeline_model_parallel_rank(), groups.get_expert_model_parallel_rank()
    world = exchange(state.holding(int(stage), int(expert_rank)), comm)
    world.catalog  # noqa: B018  the proof comes before anything else
    dense = _ranks(groups.get_data_parallel_group(with_context_parallel=True))
    state.bind(world, comm.rank, dense, _ranks(groups.get_expert_data_parallel_group()))
    return world


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def layout(chunks: Sequence[Any]) -> dict[str, int]:
    """Returns the degrees of parallelism by name; a sparse window is replayed on the same ones only."""
    state = megatron_core().parallel_state
    return {
        "tensor": state.get_tensor_model_parallel_world_size(),
        "pipeline": state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": len(chunks),
        "context": state.get_context_parallel_world_size(),
        "expert": state.get_expert_model_parallel_world_size(),
        "expert_tensor": state.get_expert_tensor_parallel_world_size(),
        "data": state.get_data_parallel_world_size(),
    }


def local_ranks(comm: Communicator) -> int:
    """Returns the ranks on this host, by torchrun's variable, else (``srun``) by host name. A collective."""
    digests = all_digests(hashlib.sha256(socket.gethostname().encode()).digest(), comm)
    return int(os.environ.get("LOCAL_WORLD_SIZE", digests.count(digests[comm.rank])))


def is_rank_zero() -> bool:
    return dist.get_rank() == 0


def from_rank_zero(number: int) -> int:
    """Returns rank 0's ``number`` on all ranks. A collective."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    message = torch.tensor([number], dtype=torch.int64, device=device)
    dist.broadcast(message, 0)
    return int(message.item())
