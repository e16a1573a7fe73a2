"""A new run that begins with the weights of another one."""

from __future__ import annotations

import lightning.pytorch as pl

from moe_ckpt.interop.weights import load_weights
from moe_ckpt.modeling import module_state
from moe_ckpt.modeling.names import clean_name, tied_aliases
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator, TrainingState


def begin_with_weights(path: str, module: pl.LightningModule, state: TrainingState, comm: Communicator) -> None:
    """Loads the weights at ``path`` into the module, and says so once. A collective, before training.

    With ``strict_loading = False`` of the LightningModule, names may be missing on either side, as for Lightning's own
    checkpoints.

    Raises:
        MoECheckpointError: As ``interop.weights.load_weights``.
    """
    loaded = load_weights(
        path,
        state,
        comm,
        module_state.buffers(module),
        strict=module.strict_loading,
        aliases=tied_aliases(module),
        others={clean_name(name) for name in module.state_dict()},
    )
    if comm.rank == 0:
        announce("a new run begins with %s; step count, optimizer, schedules and data begin anew", loaded)
