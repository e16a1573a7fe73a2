"""The state of a Megatron run beside model and optimizer: random number generators and stateful objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_ckpt.driver.host import Stateful, loading_state
from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.compat import megatron_core
from moe_ckpt.modeling.rng import capture_rng, restore_rng
from moe_ckpt.recovery.replay import same_plain

SCHEDULER = "scheduler"
"""Name of the scheduler among what is saved beside model and optimizer."""


def capture_generators() -> dict[str, Any]:
    """Returns the states of Python's, numpy's and torch's generators, and of Megatron's tracker."""
    tracker = megatron_core().rng_tracker()
    return capture_rng() | {"tracker": {name: _state(state) for name, state in tracker.get_states().items()}}


def restore_generators(stored: Mapping[str, Any]) -> None:
    """Restores what ``capture_generators`` returned."""
    restore_rng(stored)
    tracker = megatron_core().rng_tracker()
    states = tracker.get_states()
    for name, state in stored["tracker"].items():
        if isinstance(states.get(name), torch.Generator):
            states[name].set_state(state)
        else:
            states[name] = state
    tracker.set_states(states)


def _state(state: Any) -> torch.Tensor:
    """Returns a state; trackers for CUDA graphs hold generators instead."""
    return state.get_state() if isinstance(state, torch.Generator) else state


def all_stateful(scheduler: Stateful | None, stateful: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """Returns what is saved beside model and optimizer, by name. Raises ``ConfigError`` if two have one name."""
    if scheduler is not None and SCHEDULER in stateful:
        raise ConfigError(
            "megatron.attach was given a scheduler and stateful={'scheduler': ...}: one would replace the other. Give "
            "the second another name"
        )
    return dict(stateful) | ({} if scheduler is None else {SCHEDULER: scheduler})


_OTHER_SCHEDULE = (
    "The schedule of this run differs from the checkpoint's, for instance because it trains longer: set "
    "--override-opt_param-scheduler to continue with this run's schedule, --use-checkpoint-opt_param-scheduler to "
    "continue with the checkpoint's (arguments of Megatron-LM, and of OptimizerParamScheduler with underscores), or "
    "the --train-iters and --lr-decay-iters of the run."
)


def restore_stateful(stateful: Mapping[str, Stateful], stored: Mapping[str, Any], path: str) -> None:
    """Restores stateful objects.

    Args:
        path: Of the state file, for messages.

    Raises:
        StoreError: An object, which is named, does not take its state.
    """
    for name, target in stateful.items():
        is_schedule = any(kind.__name__ == "OptimizerParamScheduler" for kind in type(target).__mro__)
        with loading_state(f"{name} ({type(target).__name__})", path, _OTHER_SCHEDULE if is_schedule else ""):
            if is_schedule:  # adds the steps that it is given to its own, which Megatron-LM's --load has set already
                target.num_steps = 0  # type: ignore[attr-defined]
            target.load_state_dict(stored[name])


def follows(scheduler: Stateful | None, stored: Mapping[str, Any] | None) -> bool:
    """Returns whether the schedule is the checkpoint's, and no other one that this run has set."""
    return scheduler is not None and stored is not None and same_plain(dict(scheduler.state_dict()), dict(stored))
