"""A training state of any number of layers and experts, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_ckpt.core.operators import (
    Catalog,
    MoELayer,
    Operator,
    OperatorKind,
    Span,
    expert_id,
    gate_id,
    non_expert_id,
)
from moe_ckpt.modeling.training_state import specs_of
from moe_ckpt.ports import Reading, StateTensor, TensorMeta, TensorSpec


@dataclass(frozen=True)
class LiveState:
    """Weights and two AdamW moments per parameter, with their catalog."""

    catalog: Catalog
    _tensors: tuple[StateTensor, ...]

    def tensors(self) -> list[StateTensor]:
        return list(self._tensors)


class StillState:
    """What a session asks of a training state (``ports.TrainingState``), around tensors that nobody trains."""

    buffers = ()

    def __init__(self, catalog: Catalog, tensors: Sequence[StateTensor]) -> None:
        self.catalog, self._tensors = catalog, tensors
        self._specs = specs_of(tensors)

    def tensors(self, of: Reading | None = None, *, listed: bool = False) -> Sequence[StateTensor]:
        return self._tensors

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def plain(self, *, described: bool = False) -> Mapping[str, Any]:
        return {}

    def prepare(self, requested: Mapping[str, TensorMeta]) -> None:
        """They exist already."""

    def require_loadable(self, plain: Mapping[str, Any]) -> None:
        """There is nothing else."""

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Likewise."""


def synthetic(layers: int, experts: int, expert_elements: int, *, listed: bool = False) -> LiveState:
    """``layers`` MoE layers of ``experts`` experts, fp32. listed: one parameter per expert, not one stack."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (16, 4)}
    operators = [Operator(non_expert_id("embedding"), OperatorKind.NON_EXPERT, (Span("embedding"),))]
    for layer in range(layers):
        shapes[f"layers.{layer}.gate"] = (experts, 4)
        operators.append(Operator(gate_id(layer), OperatorKind.GATE, (Span(f"layers.{layer}.gate"),), layer))
        if not listed:
            shapes[f"layers.{layer}.experts"] = (experts, expert_elements)
        for expert in range(experts):
            span = Span(f"layers.{layer}.experts", expert, expert + 1)
            if listed:
                span = Span(f"layers.{layer}.experts.{expert}")
                shapes[span.parameter] = (1, expert_elements)
            operators.append(Operator(expert_id(layer, expert), OperatorKind.EXPERT, (span,), layer, expert))
    moe = tuple(MoELayer(layer, f"layers.{layer}", experts) for layer in range(layers))
    catalog = Catalog(tuple(operators), moe, shapes)
    return LiveState(catalog, tuple(_state(key, name, shape) for name, shape in shapes.items() for key in _keys(name)))


def _keys(parameter: str) -> list[str]:
    return [f"model/{parameter}"] + [f"optim/0/{parameter}/{kind}" for kind in ("exp_avg", "exp_avg_sq")]


def _state(key: str, parameter: str, shape: tuple[int, ...]) -> StateTensor:
    return StateTensor(
        key=key,
        parameter=parameter,
        local=torch.ones(shape),
        offsets=(0,) * len(shape),
        global_shape=shape,
        replicated=True,
    )
