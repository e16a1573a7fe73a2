"""The checkpoint session of one fit, made from what Lightning has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl

from moe_ckpt.core.operators import Catalog
from moe_ckpt.engine.options import Options
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.modeling.names import tied_aliases
from moe_ckpt.ports import Communicator, TrainingState
from moe_ckpt.storage import Storage, StoreLock
from moe_ckpt.storage.lock import job_name


def make_session(
    trainer: Any,
    module: pl.LightningModule,
    options: Options,
    storage: Storage,
    comm: Communicator,
    catalog: Catalog,
    state: TrainingState,
) -> CheckpointSession:
    """Returns the session, not yet open. Called on every rank, when model and optimizers are complete."""
    return CheckpointSession(
        storage=storage,
        policy=options.policy,
        catalog=catalog,
        state=state,
        comm=comm,
        settings=replace(
            options,
            pinned=trainer.strategy.root_device.type == "cuda",
            local_ranks=getattr(trainer.strategy, "num_processes", 1),
        ),
        aliases=tied_aliases(module),
        lock=StoreLock(storage, job_name(), access=options.access),
        on_phase=options.on_phase,
    )
