"""Weights alone into a Megatron model: for evaluation, for fine-tuning, before adapters (PEFT) are put in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from moe_ckpt.engine.comm import make_communicator
from moe_ckpt.errors import ConfigError
from moe_ckpt.interop import weights
from moe_ckpt.megatron.inventory import take_inventory
from moe_ckpt.megatron.state import MegatronTrainingState
from moe_ckpt.megatron.topology import data_parallel_groups, expert_rank, require_groups, stage
from moe_ckpt.megatron.world import exchange
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator


def load_weights(
    model_chunks: Sequence[nn.Module] | nn.Module,
    weights_from: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    strict: bool = True,
    timeout_secs: float = 600.0,
) -> None:
    """Loads weights and buffers into a model, whatever parallel layout they were saved in. A collective of all ranks.

    For a run that is checkpointed, give ``megatron.attach(weights_from=...)`` instead, which knows a restart from a
    start. With adapters (PEFT): load before they are put into the model.

    Args:
        model_chunks: As for ``attach``.
        weights_from: A store (its newest dense step), a step directory, or safetensors files that ``moe-ckpt export``
            wrote from a store of Megatron. Names must be Megatron's: what transformers wrote must be converted first.
        optimizer: Megatron's, if there is one: its master weights become those that were loaded. None for evaluation.
        strict: False lets tensors be missing on either side, a new head for instance; shapes must agree anyway.
        timeout_secs: For ranks to answer each other.

    Raises:
        CoverageError: Names or shapes do not agree; they are named, and nothing was changed.
        StoreError: The source is not there or damaged.
        SparseWindowError: The source is a sparse window (MoEvement).
        ConfigError: Process groups are not set up.
    """
    require_groups()
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    state = MegatronTrainingState(take_inventory(chunks), optimizer)
    comm = make_communicator(timeout_secs)
    try:
        world = exchange(state.holding(stage(), expert_rank()), comm)
        world.catalog  # noqa: B018  the proof that ranks together hold the model
        state.settle(world, comm.rank, data_parallel_groups())
        loaded = load_into(weights_from, state, comm, strict=strict)
        if comm.rank == 0:
            announce("loaded %s", loaded)
    finally:
        comm.close()


def load_into(
    weights_from: str | os.PathLike[str],
    state: MegatronTrainingState,
    comm: Communicator,
    *,
    strict: bool = True,
) -> weights.Loaded:
    """Loads weights into a state that knows its world, and refreshes master weights from them.

    Raises:
        MoECheckpointError: As ``load_weights``.
    """
    loaded = weights.load_weights(weights_from, state, comm, state.live_buffers(), strict=strict)
    state.refresh_masters()
    return loaded


def begin_with_weights(path: str, begun_at: int, state: MegatronTrainingState, comm: Communicator) -> None:
    """Lets a new run begin with the weights at ``path``, and says so once. A collective, before training.

    Args:
        path: ``weights_from`` of the options.
        begun_at: Iteration that the run begins at; above 0 if something else was loaded already.
        state: Of the model and its optimizer.
        comm: Of all ranks.

    Raises:
        ConfigError: Something else was loaded already.
        MoECheckpointError: As ``load_weights``.
    """
    if begun_at:
        raise ConfigError(
            f"megatron.attach(weights_from={path!r}) and what was given to resume(otherwise=...), which begins at "
            f"iteration {begun_at}, contradict each other: give one of them"
        )
    loaded = load_into(path, state, comm)
    if comm.rank == 0:
        announce("a new run begins with %s; iteration, optimizer, schedules and data begin anew", loaded)
