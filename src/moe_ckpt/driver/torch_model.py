"""Opens the run of a torch module: finds its MoE layers, counts their tokens, boosts their stale experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.driver.run import Driver
from moe_ckpt.modeling.discover import build_catalog, find_moe_layers
from moe_ckpt.modeling.module_state import FrozenExperts
from moe_ckpt.modeling.names import tied_aliases
from moe_ckpt.modeling.routing import RoutingCounter, TrainingPasses
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.policies.base import GATE_WEIGHTS


def open_torch(
    driver: Driver,
    module: nn.Module,
    state: TorchTrainingState,
    passes: TrainingPasses,
    *,
    on_device: bool,
    no_boost: str | None = None,
    **rest: Any,
) -> RoutingCounter:
    """Opens the store of a run that trains ``module``, and returns the counter of its tokens.

    Args:
        driver: Of the run.
        module: The model, without wrappers of data parallelism.
        state: Of the model and its optimizers.
        passes: Tells which forward passes are training's.
        on_device: A GPU computes.
        no_boost: Why no layer can take a capacity boost; None if layers can.
        **rest: Further arguments of ``Driver.open``.

    Raises:
        ConfigError: The policy cannot serve the model; else as ``CheckpointSession.open``.
    """
    options, needs, stopwatch = driver.options, driver.options.needs, driver.stopwatch
    layers = find_moe_layers(module)
    catalog = build_catalog(module, layers)
    options.policy.check(catalog)
    # Looked for at every update, hence only where experts may come back older.
    frozen = FrozenExperts(catalog, partial(state.parameters, described=True)) if needs.partial else None
    soft = needs.popularity == GATE_WEIGHTS
    counter = RoutingCounter(module, layers, soft=soft, frozen=frozen, passes=passes, stopwatch=stopwatch)
    try:
        comm = make_communicator(options.timeout_secs, late=on_device)
        boost = None
        if needs.boost is not None:
            from moe_ckpt.boost.ports import boost_of_layers

            boost = boost_of_layers(needs.boost, layers, passes, comm, stopwatch, no_boost)
        driver.open(comm, catalog, state, aliases=tied_aliases(module), boost=boost, pinned=on_device, **rest)
    except BaseException:
        counter.close()  # a caller may catch this and train without checkpoints
        driver.close(0.0)
        raise
    return counter
