"""A view of what one optimizer holds: its parameters by group, and the state of those that have any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, compress
from operator import is_, itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.format.sealed import FixedStrings
from moe_ckpt.modeling.state import unsliced_state
from moe_ckpt.modeling.state.watching import Entries

_PARAMS = itemgetter("params")


class OptimizerView:
    """The tensors of an optimizer by name, found once and used for as long as it is still what there is.

    Attributes:
        groups: Names of the parameters of each group; encoded once, for there are thousands.
        parameters: By name, in the order of the groups.
        states: (name, parameter, live state) of those with state. In the order of the groups, since that of
            ``optimizer.state`` is that of first use.
        scalars: (name, live state) of those with state that is no tensor.
        unsliced: State tensors that make no slice.
    """

    def __init__(self, index: int, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._lists = list(map(_PARAMS, optimizer.param_groups))
        self._lengths = list(map(len, self._lists))
        self._listed: list[torch.Tensor] = list(chain.from_iterable(self._lists))
        self._state = optimizer.state
        self._present = Entries([self._state])
        labels = [_name(names, parameter, index, optimizer) for parameter in self._listed]
        ends = iter(labels)
        self.groups = [FixedStrings([next(ends) for _ in range(length)]) for length in self._lengths]
        self.parameters = dict(zip(labels, self._listed, strict=True))
        self.states = [
            (name, parameter, self._state[parameter])
            for name, parameter in zip(labels, self._listed, strict=True)
            if parameter in self._state
        ]
        self._require_names(index)
        self.unsliced = unsliced_state.find(self.states)
        self._entries = Entries([state for _, _, state in self.states], torch.Tensor)
        owners = [name for name, _, state in self.states for value in state.values() if isinstance(value, torch.Tensor)]
        self._owners = owners
        self.scalars = list(compress(((name, state) for name, _, state in self.states), self._entries.loose))

    def _require_names(self, index: int) -> None:
        """Raises ``UnsupportedError`` for a tensor under a name that no key of a checkpoint can hold."""
        if all(map(is_state_name, set(chain.from_iterable(state for _, _, state in self.states)))):
            return  # what is left to do takes Python code for each tensor
        for owner, _, state in self.states:
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and not is_state_name(name):
                    raise unnameable(f"optimizer {index} ({type(self._optimizer).__name__})", owner, name)

    @property
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns all tensors among the states, each with the name of its parameter."""
        return zip(self._owners, self._entries.values, strict=True)

    def is_current(self) -> bool:
        """Returns False once groups, the state of a parameter, or a tensor in it came, went or were replaced."""
        lists, state = list(map(_PARAMS, self._optimizer.param_groups)), self._optimizer.state
        return (
            state is self._state
            and list(map(len, lists)) == self._lengths
            and all(map(is_, chain.from_iterable(lists), self._listed))
            and self._present.same()
            and self._entries.same()
        )


def _name(names: Mapping[int, str], parameter: torch.Tensor, index: int, optimizer: Optimizer) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise UnsupportedError(
            f"optimizer {index} ({type(optimizer).__name__}) holds a parameter of shape "
            f"{tuple(parameter.shape)} that is not among the model's named_parameters(). Assign what it belongs to "
            "as an attribute of the module, and build optimizers after sharding or replacing parameters."
        )
    return name


def is_state_name(name: object) -> bool:
    """Returns whether a tensor key can end with the name of a state, and a reader finds that very name there."""
    return isinstance(name, str) and bool(name) and "/" not in name and f"{name}" == name


def unnameable(optimizer: str, parameter: str, name: object) -> UnsupportedError:
    """Returns the error for a tensor of optimizer state whose name is no ``is_state_name``."""
    return UnsupportedError(
        f"{optimizer} keeps a tensor for parameter {parameter!r} under the name {name!r}. A checkpoint names tensors "
        "of optimizer state by text that is not empty and has no '/', so a resume would not find this one. Rename it "
        "in the optimizer, to state[p]['momentum'] for instance."
    )


def scalars_of(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns what is no tensor in the state of one parameter."""
    return {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}


STEP = "step"
"""What torch's optimizers call the count of a parameter's updates."""


def advance_counts(optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], missed: Mapping[str, int]) -> None:
    """Step counts of parameters that came back older go on by the steps since, as the one of a stack of experts does.

    Up to the count of a parameter that did not. One that reaches it was updated as often, so other state without
    dimensions (NAdam's ``mu_product``) is as of that one, too.

    Args:
        optimizer: Whose state is restored.
        parameters: That it updates, by name.
        missed: Name -> steps since.
    """
    counts = {
        name: {key: value for key, value in optimizer.state.get(parameter, {}).items() if _is_scalar(value)}
        for name, parameter in parameters.items()
        if parameter.dim() and parameter.requires_grad
    }
    newest: Mapping[Any, torch.Tensor] = max(
        (state for name, state in counts.items() if STEP in state and name not in missed),
        key=lambda state: float(state[STEP]),
        default={},
    )
    with torch.no_grad():
        for name in counts.keys() & missed.keys():
            state = counts[name]
            if STEP not in state:
                continue
            state[STEP] += missed[name]
            if STEP in newest and state[STEP].item() >= newest[STEP].item():
                for key in state.keys() & newest.keys():
                    state[key].copy_(newest[key])


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()
