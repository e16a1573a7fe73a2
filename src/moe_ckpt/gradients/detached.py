"""Optimizers without a model: what a replica, or an offline conversion, steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moe_ckpt.gradients.coupling import class_named
from moe_ckpt.gradients.replay import OptimizerReplay
from moe_ckpt.gradients.units import Unit
from moe_ckpt.modeling.optimizer_class import class_name


@dataclass(frozen=True)
class OptimizerKind:
    """The kind of an optimizer without its state: plain data.

    Attributes:
        name: Of its class, see ``modeling.optimizer_class.class_name``.
        groups: Each param group without its parameters: hyperparameters, and flags that choose an implementation.
    """

    name: str
    groups: tuple[Mapping[str, Any], ...]


def kind_of(optimizer: Optimizer) -> OptimizerKind:
    """Returns what is needed to make another optimizer like this one."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return OptimizerKind(class_name(optimizer), tuple(groups))


def detached(
    kinds: Sequence[OptimizerKind], units: Sequence[Unit], device: torch.device | str = "cpu"
) -> OptimizerReplay:
    """Returns optimizers of the same kinds, whose units hold NaN until anchors are loaded.

    Args:
        kinds: Of all optimizers, by number.
        units: Those to replay; all of a rank, or some.
        device: Should be of the kind that trained: on another one the last bits may differ.

    Raises:
        UnsupportedError: A class is not known here.
    """
    tensors = {
        (unit.optimizer, unit.name): nn.Parameter(
            torch.empty_strided(unit.shape, unit.stride, dtype=getattr(torch, unit.dtype), device=device).fill_(
                torch.nan
            )
        )
        for unit in units
    }
    optimizers = []
    for number, kind in enumerate(kinds):
        groups = [
            {
                **{key: _detached_copy(value) for key, value in settings.items()},
                "params": [
                    tensors[number, unit.name] for unit in units if (unit.optimizer, unit.group) == (number, at)
                ],
            }
            for at, settings in enumerate(kind.groups)
        ]
        optimizers.append(_make(kind.name, groups))
    return OptimizerReplay(optimizers, units, tensors)


def _detached_copy(value: Any) -> Any:
    """A copy, for each update writes its hyperparameters into what is a tensor, and what was recorded must stay."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _make(name: str, groups: list[dict[str, Any]]) -> Optimizer:
    make: Any = class_named(name)
    made: Optimizer = make(groups)
    return made
