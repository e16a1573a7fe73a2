"""``megatron.load_weights``: loads only weights into a Megatron model, for evaluation or fine-tuning."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.interop import weights
from moe_ckpt.megatron.model.inventory import chunks_of, take_inventory
from moe_ckpt.megatron.model.state import MegatronTrainingState
from moe_ckpt.megatron.model.topology import bind, require_groups
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

    For a run that is checkpointed, use ``megatron.attach(weights_from=...)`` instead, which does not load them again at
    a restart. With adapters (PEFT): load before they are added to the model.

    Args:
        model_chunks: As for ``attach``.
        weights_from: A store (its newest dense step), a step directory, or safetensors files that ``moe-ckpt export``
            wrote from a store of Megatron. Names must be Megatron's: files of transformers must be converted first.
        optimizer: Megatron's, if there is one: its master weights are set to the loaded weights. None for evaluation.
        strict: False lets tensors be missing on either side, a new head for instance; shapes must agree anyway.
        timeout_secs: Longest wait for another rank.

    Raises:
        CoverageError: Names or shapes do not agree; the message names them, and nothing was changed.
        StoreError: The source is not there or damaged.
        UnsupportedError: The source is a sparse window (MoEvement).
        ConfigError: Process groups are not set up.
    """
    require_groups()
    state = MegatronTrainingState(take_inventory(chunks_of(model_chunks)), optimizer)
    comm = make_communicator(timeout_secs)
    try:
        bind(state, comm)
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
) -> weights.LoadedWeights:
    """Loads weights into a bound state, and sets master weights from them. Raises as ``load_weights``."""
    loaded = weights.load_weights(weights_from, state, comm, state.live_buffers(), strict=strict)
    state.refresh_masters()
    return loaded
