"""The class of an optimizer, so that no other one goes on with its state; its param groups as plain data, and back.

Hyperparameters (lr, betas, weight_decay, initial_lr, ...) come back from a checkpoint. Flags that choose an
implementation and not a result (fused, foreach, capturable, differentiable) stay as the new run set them:
a checkpoint of a GPU run must open on a CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from moe_ckpt.errors import ConfigError, UnencodableStateError, optimizer_changed
from moe_ckpt.format.sealed import FixedStrings

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam),
        *(optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    }
)
"""Optimizers that update each element by its own gradient and state alone. Adafactor and Muon do not (their steps are
scaled by a norm over the whole parameter), and of what is not known it must be assumed."""
_TORCH = "torch.optim."


def class_name(optimizer: Optimizer) -> str:
    """Returns the qualified name of an optimizer's class; torch's own as ``torch.optim.<name>`` wherever they live."""
    return name_of(type(optimizer))


def name_of(kind: type[Optimizer]) -> str:
    """Returns ``class_name`` of the instances of a class."""
    module = _TORCH if getattr(torch.optim, kind.__qualname__, None) is kind else f"{kind.__module__}."
    return module + kind.__qualname__


def require_same_class(which: str, optimizer: Optimizer, stored: str) -> None:
    """Raises unless stored state is of the class of ``optimizer``. Changes nothing.

    A class that only moved to another module (a script that runs as ``__main__``) is the same class.

    Args:
        which: Names the optimizer in the message.
        optimizer: The running one.
        stored: Its class name in the checkpoint.

    Raises:
        ConfigError: It is of another class.
    """
    here = class_name(optimizer)
    moved = stored.rpartition(".")[2] == here.rpartition(".")[2] and not f"{stored} {here}".count(_TORCH)
    if stored != here and not moved:
        raise optimizer_changed(which, stored, here)


IMPLEMENTATION_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor)
_PLAIN_TYPES = frozenset(_PLAIN)


def read(index: int, optimizer: Optimizer, names: Sequence[FixedStrings]) -> list[dict[str, Any]]:
    """Returns the groups of optimizer number ``index``, with the names of each one's parameters.

    Raises:
        UnencodableStateError: names the group and key of a value that is no plain data.
    """
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        entry: dict[str, Any] = {}
        for key, value in group.items():
            if key == "params":
                entry[key] = names[number]
            else:
                require_plain(value, f"optimizers/{index}/param_groups/{number}/{key}")
                entry[key] = value
        groups.append(entry)
    return groups


def require_plain(value: Any, path: str) -> None:
    """Raise ``UnencodableStateError``, naming the place below ``path``, for a value that is no plain data."""
    if type(value) in _PLAIN_TYPES:
        return  # nearly all are
    if isinstance(value, (list, tuple, set, frozenset)):
        for at, item in enumerate(value):
            require_plain(item, f"{path}/{at}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            require_plain(item, f"{path}/{key}")
    elif not isinstance(value, _PLAIN):
        raise UnencodableStateError(path, f"{type(value).__module__}.{type(value).__qualname__}")


def check(
    index: int, optimizer: Optimizer, names: Sequence[Collection[str]], stored: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ``ConfigError`` unless the groups hold the same parameters, group by group.

    Args:
        names: As for ``read``.
    """
    groups = optimizer.param_groups
    if len(groups) != len(stored):
        raise ConfigError(
            f"optimizer {index}: the checkpoint has {len(stored)} param groups, this run has {len(groups)}; "
            "build the optimizer with the same groups"
        )
    for number, entry in enumerate(stored):
        here, saved = set(names[number]), set(entry["params"])
        if here != saved:
            only_here, only_there = sorted(here - saved)[:3], sorted(saved - here)[:3]
            raise ConfigError(
                f"optimizer {index}, param group {number}: the checkpoint has {len(saved)} parameters, this run "
                f"{len(here)}; only in the checkpoint: {only_there or 'none'}, only in this run: {only_here or 'none'}"
            )
        for name, current in groups[number].items():
            if name != "params" and isinstance(current, (tuple, list)) and name in entry:
                value = entry[name]
                if not isinstance(value, (tuple, list)) or len(value) != len(current):
                    raise ConfigError(
                        f"optimizer {index}, param group {number}: the checkpoint has {name}={value!r}, this run "
                        f"{name}={current!r}, which is of another form; build the optimizer as it was"
                    )


def take_added(
    optimizer: Optimizer,
    began: int,
    names: Mapping[int, str],
    parameters: Mapping[str, torch.nn.Parameter],
    stored: Sequence[Mapping[str, Any]],
) -> None:
    """Add the groups that training had added (``Optimizer.add_param_group``) when a checkpoint was taken.

    Nothing is added where the groups that the script makes are others, or the parameters not the model's: ``check``
    says what differs.

    Args:
        began: How many groups the script makes. What was added since is of another checkpoint, and is taken away.
        names: Name of each parameter by its id.
        parameters: The model's, by name.
        stored: Groups of the checkpoint.
    """
    for group in optimizer.param_groups[began:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[began:]
    present = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if any(set(here) != set(entry["params"]) for here, entry in zip(present, stored, strict=False)):
        return
    named = {name for group in present for name in group}
    added = [name for group in stored[began:] for name in group["params"]]
    if named.isdisjoint(added) and len({*added}) == len(added) and parameters.keys() >= {*added}:
        for entry in stored[began:]:
            optimizer.add_param_group({"params": [parameters[name] for name in entry["params"]]})


def write(optimizer: Optimizer, stored: Sequence[Mapping[str, Any]]) -> None:
    """Put the stored hyperparameters back, in place. ``check`` has passed."""
    for group, entry in zip(optimizer.param_groups, stored, strict=True):
        for key, value in entry.items():
            if key != "params" and key not in IMPLEMENTATION_FLAGS:
                group[key] = fitted(group.get(key), value)


def fitted(current: Any, stored: Any) -> Any:
    """Returns the stored value in the form that this run uses: a tensor stays the same tensor (CUDA graphs hold it)."""
    if isinstance(current, torch.Tensor):
        with torch.no_grad():
            current.copy_(torch.as_tensor(stored))
        return current
    if isinstance(stored, torch.Tensor):
        return stored.item() if isinstance(current, (int, float)) else stored.clone()
    return stored
