"""What a Megatron run keeps beside parameters and optimizer: random numbers, schedules, the place in the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.compat import megatron_core
from moe_ckpt.modeling.rng import capture_rng, restore_rng
from moe_ckpt.recovery.handing_back import handing_back


class Stateful(Protocol):
    """The scheduler, and whatever else the user wants to come back."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def capture_generators() -> dict[str, Any]:
    """Python's, numpy's and torch's generators, and those of Megatron's tracker (model-parallel seeds)."""
    tracker = megatron_core().rng_tracker()
    return capture_rng() | {"tracker": {name: _state(found) for name, found in tracker.get_states().items()}}


def restore_generators(stored: Mapping[str, Any]) -> None:
    """Inverse of ``capture_generators``."""
    restore_rng(stored)
    tracker = megatron_core().rng_tracker()
    states = tracker.get_states()
    for name, state in stored["tracker"].items():
        if isinstance(states.get(name), torch.Generator):
            states[name].set_state(state)
        else:
            states[name] = state
    tracker.set_states(states)


def _state(found: Any) -> torch.Tensor:
    """Trackers for CUDA graphs hold generators, others their states."""
    return found.get_state() if isinstance(found, torch.Generator) else found


def all_stateful(scheduler: Stateful | None, stateful: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """What is saved beside model and optimizer, by name.

    Raises:
        ConfigError: something without ``state_dict`` and ``load_state_dict``, or two of one name.
    """
    if scheduler is not None and "scheduler" in stateful:
        raise ConfigError(
            "megatron.attach was given a scheduler and stateful={'scheduler': ...}: one would replace the other. Give "
            "the second another name"
        )
    found = dict(stateful) | ({} if scheduler is None else {"scheduler": scheduler})
    for name, each in found.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(
                f"{name} ({type(each).__name__}), given to megatron.attach, lacks state_dict or load_state_dict, so it "
                "cannot come back. Give it both, or leave it out"
            )
    return found


def capture_stateful(stateful: Mapping[str, Stateful]) -> dict[str, Any]:
    return {name: dict(each.state_dict()) for name, each in stateful.items()}


_OTHER_SCHEDULE = (
    "The schedule of this run is not the checkpoint's, as when it is to train longer: give "
    "--override-opt_param-scheduler to go on with this run's schedule, --use-checkpoint-opt_param-scheduler to go on "
    "with the checkpoint's (arguments of Megatron-LM, and of OptimizerParamScheduler with underscores), or the "
    "--train-iters and --lr-decay-iters of the run."
)


def restore_stateful(stateful: Mapping[str, Stateful], stored: Mapping[str, Any], path: str) -> None:
    """path: of the state file, for messages.

    Raises:
        ConfigError: names what only the run or only the checkpoint has; nothing was changed then.
        StateRefusedError: names the object that does not take what is stored of it.
    """
    if stateful.keys() != stored.keys():
        raise ConfigError(
            f"the checkpoint holds the state of {sorted(stored)}, this run gives {sorted(stateful)} (scheduler and "
            "stateful= of megatron.attach); give the same ones"
        )
    for name, each in stateful.items():
        advice = _OTHER_SCHEDULE if type(each).__name__ == "OptimizerParamScheduler" else ""
        with handing_back(f"{name} ({type(each).__name__})", path, advice):
            each.load_state_dict(stored[name])
