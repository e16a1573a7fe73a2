"""Tells the optimizer that state belongs to, so that no other optimizer goes on with it.

A checkpoint says the class of each optimizer. Older checkpoints do not; of these the keys of the param groups and the
names of the state tell most classes apart. Never compared: hyperparameters (they come from the checkpoint), flags
that choose an implementation, and keys that one side has alone, since schedulers, users and newer releases of torch
add some.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from moe_ckpt.errors import optimizer_changed

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam),
        *(optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    }
)
"""Optimizers that update each element by its own gradient and state alone. Adafactor and Muon do not (their steps are
scaled by a norm over the whole parameter), and of what is not known it must be assumed."""
_TORCH = "torch.optim."
_ADDED_LATER = frozenset(
    {"params", "foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"}
)
"""Keys that torch's optimizers got in some release: a checkpoint of an older one lacks them."""
_STATE = {
    "ASGD": ("ax", "eta", "mu", "step"),
    "Adadelta": ("acc_delta", "square_avg", "step"),
    "Adagrad": ("step", "sum"),
    "Adam": ("exp_avg", "exp_avg_sq", "step"),
    "AdamW": ("exp_avg", "exp_avg_sq", "step"),
    "Adamax": ("exp_avg", "exp_inf", "step"),
    "NAdam": ("exp_avg", "exp_avg_sq", "mu_product", "step"),
    "RAdam": ("exp_avg", "exp_avg_sq", "step"),
    "RMSprop": ("square_avg", "step"),
    "Rprop": ("prev", "step", "step_size"),
}
"""What torch's optimizers keep of every parameter, whatever their settings, once they have stepped."""


def class_name(optimizer: Optimizer) -> str:
    """Returns the qualified name of an optimizer's class; torch's own as ``torch.optim.<name>`` wherever they live."""
    return name_of(type(optimizer))


def name_of(kind: type[Optimizer]) -> str:
    """Returns ``class_name`` of the instances of a class."""
    module = _TORCH if getattr(torch.optim, kind.__qualname__, None) is kind else f"{kind.__module__}."
    return module + kind.__qualname__


def require_same_class(
    which: str, optimizer: Optimizer, stored: str | None, groups: Iterable[Mapping[str, Any]], states: Collection[str]
) -> None:
    """Raises unless stored state is of the class of ``optimizer``. Changes nothing.

    A class that only moved to another module (a script that runs as ``__main__``) is the same class.

    Args:
        which: Names the optimizer in the message.
        optimizer: The running one.
        stored: Its class name in the checkpoint, None in older checkpoints.
        groups: The stored param groups.
        states: Names of the stored state, of all its parameters together.

    Raises:
        ConfigError: It is of another class.
    """
    here = class_name(optimizer)
    if stored == here:
        return
    if stored is not None and (_TORCH in (stored[: len(_TORCH)], here[: len(_TORCH)]) or _last(stored) != _last(here)):
        raise optimizer_changed(which, stored, here)
    groups = list(groups)
    if _differ(optimizer, groups, states):
        keys = sorted({key for group in groups for key in group} - {"params"})
        contents = f"state {sorted(states)} and param groups of {keys}"
        raise optimizer_changed(which, f"{stored or 'an optimizer'} with {contents}", here)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _differ(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], states: Collection[str]) -> bool:
    """Whether group keys or state names say that it is another class."""
    saved = {key for group in groups for key in group}
    here = {key for group in optimizer.param_groups for key in group}
    lacking = set(optimizer.defaults) - saved - _ADDED_LATER
    if lacking and (saved - here - _ADDED_LATER or class_name(optimizer).startswith(_TORCH)):
        return True
    decoupled = "decoupled_weight_decay"  # all that tells torch's Adam from its AdamW
    flags = [{bool(g[decoupled]) for g in entries if decoupled in g} for entries in (groups, optimizer.param_groups)]
    if all(flags) and not flags[0] & flags[1]:
        return True
    expected = _state_names(optimizer)
    return bool(expected and states and expected - set(states) and set(states) - expected)


def _state_names(optimizer: Optimizer) -> set[str]:
    """What the optimizer keeps per parameter, by its class, or else what it holds now (nothing before a step)."""
    declared = _STATE.get(type(optimizer).__qualname__) if class_name(optimizer).startswith(_TORCH) else None
    return set(declared or (str(name) for state in optimizer.state.values() for name in state))
