"""The capacity boost of a Lightning fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_ckpt.boost.life import Boosting
from moe_ckpt.boost.ports import boost_ports
from moe_ckpt.callbacks.compat import NAMES
from moe_ckpt.core.operators import grid_of
from moe_ckpt.modeling.moe.discover import FoundLayer
from moe_ckpt.modeling.moe.routing import TrainingPasses
from moe_ckpt.ports import Communicator
from moe_ckpt.stopwatch import Stopwatch


def fit_boost(
    boost: float,
    strategy: Any,
    layers: Sequence[FoundLayer],
    passes: TrainingPasses,
    comm: Communicator,
    stopwatch: Stopwatch,
) -> Boosting:
    """Returns the boost of a fit.

    Args:
        boost: Of the policy's needs.
        strategy: Of the trainer.
        layers: Of the live model.
        passes: Tells which forward passes are training's.
        comm: The ranks.
        stopwatch: Counts what routers ask for.
    """
    ports = boost_ports(layers, boost_refusal(strategy), passes)
    return Boosting(boost, ports, grid_of([layer.info for layer in layers]), comm, stopwatch)


def boost_refusal(strategy: Any) -> str | None:
    """Returns why no router may take a capacity boost under this strategy; None if routers may."""
    mesh: Any = getattr(strategy, NAMES["device_mesh"], None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if "tensor_parallel" in names and mesh["tensor_parallel"].size() > 1:
        return (
            "tensor-parallel ranks route the same tokens independently, and would choose differently. A boost needs "
            "data-parallel ranks (DDP, FSDP2)"
        )
    return None
