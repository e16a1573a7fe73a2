"""Operators, of which checkpoints consist, and the parameter rows that belong to each.

An operator is the unit that policies choose: one expert of one MoE layer, the gate of one MoE layer, or one group of
non-expert parameters. The catalog assigns every row of every parameter to exactly one operator, and proves it. It has
names and numbers only: no tensor, no torch.

Legend used across the package: L MoE layers, E experts per layer, K experts saved per layer, R ranks.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import compress
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from moe_ckpt.errors import CoverageError

_Result = TypeVar("_Result")


class Remembered(Generic[_Result]):
    """Caches the newest results of a pure function by the identity of its arguments.

    The operators of a dense checkpoint are one tuple of thousands of ids, the same object at each step. A cache by
    value would compare every id at each call; this one compares none.

    Args:
        find: The function.
        most: Number of results that are kept, with their arguments.
    """

    def __init__(self, find: Callable[..., _Result], most: int = 16) -> None:
        self._find = find
        self._most = most
        self._entries: dict[tuple[int, ...], tuple[tuple[Any, ...], _Result]] = {}

    def __call__(self, *arguments: Any) -> _Result:
        entry = self._entries.get(tuple(map(id, arguments)))  # it keeps the arguments alive, so their ids are unique
        if entry is not None:
            return entry[1]
        result = self._find(*arguments)
        if len(self._entries) >= self._most:
            self._entries.clear()
        self._entries[tuple(map(id, arguments))] = arguments, result
        return result


class OperatorKind(str, enum.Enum):
    """The three kinds of operators (MoEvement section 3.1)."""

    EXPERT = "expert"
    GATE = "gate"
    NON_EXPERT = "non_expert"


@dataclass(frozen=True)
class Span:
    """Rows ``[start, stop)`` along dim 0 of one parameter; ``start is None`` means the whole parameter.

    A stacked parameter ``[E, ...]`` has one row per expert. The span of a 0-d parameter, which has no rows, is the
    whole parameter.
    """

    parameter: str
    start: int | None = None
    stop: int | None = None

    def __post_init__(self) -> None:
        if (self.start is None) != (self.stop is None):
            raise ValueError(f"span of {self.parameter}: give both start and stop, or neither")
        if self.start is not None and self.stop is not None and not 0 <= self.start < self.stop:
            raise ValueError(f"span of {self.parameter}: rows [{self.start}, {self.stop}) are empty or negative")

    def rows(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the half-open row range in a tensor of global shape ``shape``. A 0-d tensor counts as one row."""
        if self.start is not None and self.stop is not None:
            return self.start, self.stop
        return 0, (shape[0] if shape else 1)


@dataclass(frozen=True)
class Operator:
    """One unit of checkpointing.

    Attributes:
        id: The name in plans, the ledger and manifests, the same in all runs: ``expert/<layer>/<expert>``,
            ``gate/<layer>`` or ``non_expert/<group>``.
        kind: Expert, gate or non-expert.
        spans: Parameter rows of the operator.
        layer: Index of its MoE layer; None for a non-expert.
        expert: Number of the expert in its layer; None for other operators.
    """

    id: str
    kind: OperatorKind
    spans: tuple[Span, ...]
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer.

    Attributes:
        index: Place among the L MoE layers.
        name: Name of the module.
        experts: E, the number of experts.
        top_k: Experts per token; None if not known.
    """

    index: int
    name: str
    experts: int
    top_k: int | None = None


EXPERT = "expert/"
"""Prefix of the ids of experts."""


def grid_of(layers: Sequence[MoELayer]) -> tuple[int, int]:
    """Returns ``(L, E)``, the shape of token counts: the number of MoE layers, and of experts in the largest one."""
    return len(layers), max((layer.experts for layer in layers), default=0)


@lru_cache(maxsize=1 << 16)
def expert_id(layer: int, expert: int) -> str:
    """Returns the operator id of an expert; both numbers count from 0."""
    return f"{EXPERT}{layer}/{expert}"


def gate_id(layer: int) -> str:
    """Returns the operator id of a layer's gate."""
    return f"gate/{layer}"


def non_expert_id(group: str) -> str:
    """Returns the operator id of a group of other parameters, such as a transformer block's attention."""
    return f"non_expert/{group}"


@dataclass(frozen=True)
class Catalog:
    """All operators of one model, with the proof that they tile its parameters. Equal on every rank.

    An adapter builds it once, when training starts, from parameter names and global shapes.

    Attributes:
        operators: All operators, in an order that is the same on every rank.
        layers: The MoE layers.
        parameters: Name -> global shape.

    Raises:
        CoverageError: A parameter row belongs to no operator, to two, or to none of the parameters.
    """

    operators: tuple[Operator, ...]
    layers: tuple[MoELayer, ...]
    parameters: Mapping[str, tuple[int, ...]] = field(repr=False)

    def __post_init__(self) -> None:
        prove_tiling(self.operators, self.parameters)

    @cached_property
    def by_id(self) -> Mapping[str, Operator]:
        return {op.id: op for op in self.operators}

    @cached_property
    def experts(self) -> tuple[Operator, ...]:
        return tuple(op for op in self.operators if op.kind is OperatorKind.EXPERT)

    @cached_property
    def everything(self) -> tuple[str, ...]:
        """Ids of all operators. Always the same object, so that caches by identity recognize it."""
        return tuple(op.id for op in self.operators)

    @cached_property
    def index_of(self) -> Mapping[str, int]:
        """Operator id -> place among ``operators``."""
        return {op: at for at, op in enumerate(self.everything)}

    @cached_property
    def places_of(self) -> Remembered[npt.NDArray[np.int64]]:
        """Returns the places of operator ids. Caches the newest results."""
        return Remembered(partial(_places, self.index_of))

    def ids_of(self, chosen: npt.NDArray[np.bool_]) -> tuple[str, ...]:
        """Returns the ids of the operators that are True in ``chosen`` ``[operators]``; ``everything`` if all are."""
        return self.everything if chosen.all() else tuple(compress(self.everything, chosen.tolist()))

    def mask(self, operators: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """Returns ``[operators]`` True for these operators."""
        chosen = np.zeros(len(self.operators), dtype=bool)
        chosen[self.places_of(operators)] = True
        return chosen

    @cached_property
    def expert_at(self) -> Mapping[str, tuple[int, int]]:
        """Id of an expert -> ``(layer, expert)``."""
        return {op.id: (op.layer, op.expert) for op in self.experts if op.layer is not None and op.expert is not None}

    @cached_property
    def experts_in_order(self) -> tuple[str, ...]:
        """Ids of all experts, layer by layer."""
        return tuple(sorted(self.expert_at, key=self.expert_at.__getitem__))

    @cached_property
    def all_experts(self) -> npt.NDArray[np.int64]:
        """``[n, 2]``: ``(layer, expert)`` of all experts, in catalog order."""
        return self.layer_and_expert[self.is_expert]

    @cached_property
    def is_expert(self) -> npt.NDArray[np.bool_]:
        """``[operators]`` True for experts."""
        return np.array([op.kind is OperatorKind.EXPERT for op in self.operators], dtype=bool)

    @cached_property
    def expert_places(self) -> npt.NDArray[np.int64]:
        """``[L, E]`` place of each expert among ``operators``; -1 if a layer has fewer experts."""
        grid = np.full(grid_of(self.layers), -1)
        grid[tuple(self.all_experts.T)] = np.flatnonzero(self.is_expert)
        return grid

    @cached_property
    def layer_and_expert(self) -> npt.NDArray[np.int64]:
        """``[operators, 2]`` the ``(layer, expert)`` of each operator; -1 if it is no expert."""
        return np.array([self.expert_at.get(op, (-1, -1)) for op in self.everything], dtype=np.int64).reshape(-1, 2)

    @cached_property
    def always_saved(self) -> tuple[Operator, ...]:
        """Gates and non-experts, which are small, active in every token, and part of every partial checkpoint."""
        return tuple(op for op in self.operators if op.kind is not OperatorKind.EXPERT)

    @cached_property
    def home(self) -> Mapping[str, str]:
        """Parameter -> operator that owns state which cannot be split by rows (Adam's ``step``).

        For a stack of experts that is the layer's gate: every checkpoint saves it, so that the newest value returns.
        """
        homes: dict[str, str] = {}
        for op in self.operators:
            for span in op.spans:
                if op.kind is OperatorKind.EXPERT and span.start is not None and op.layer is not None:
                    homes[span.parameter] = gate_id(op.layer)
                else:
                    homes.setdefault(span.parameter, op.id)
        return homes

    @cached_property
    def spans_of(self) -> Mapping[str, tuple[tuple[Operator, Span], ...]]:
        """Parameter -> its (operator, span) pairs in row order."""
        pairs_of: dict[str, list[tuple[Operator, Span]]] = {}
        for op in self.operators:
            for span in op.spans:
                pairs_of.setdefault(span.parameter, []).append((op, span))
        return {name: tuple(sorted(pairs, key=lambda p: p[1].start or 0)) for name, pairs in pairs_of.items()}

    @cached_property
    def sharing(self) -> Mapping[str, frozenset[str]]:
        """Parameter -> the operators that share its rows. Parameters with the same operators get the same object."""
        objects: dict[frozenset[str], frozenset[str]] = {}
        sets = {name: frozenset(op.id for op, _ in pairs) for name, pairs in self.spans_of.items()}
        return {name: objects.setdefault(operators, operators) for name, operators in sets.items()}

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the model's structure; equal for two models that can share a store."""
        digest = hashlib.sha256()
        for name in sorted(self.parameters):
            digest.update(f"{name}:{tuple(self.parameters[name])};".encode())
        for op in sorted(self.operators, key=lambda o: o.id):
            digest.update(f"{op.id}={op.spans!r};".encode())
        return digest.hexdigest()[:32]


def prove_tiling(operators: Iterable[Operator], parameters: Mapping[str, tuple[int, ...]]) -> None:
    """Proves that every row of every parameter belongs to exactly one operator.

    Raises:
        CoverageError: Some rows belong to none, to two, or to no parameter; the error names all of them.
    """
    claims: dict[str, list[tuple[int, int, str]]] = {name: [] for name in parameters}
    problems: list[str] = []
    seen: set[str] = set()
    for op in operators:
        if op.id in seen:
            problems.append(f"operator {op.id} is listed twice")
        seen.add(op.id)
        for span in op.spans:
            if span.parameter not in parameters:
                problems.append(f"{op.id} names unknown parameter {span.parameter}")
                continue
            claims[span.parameter].append((*span.rows(parameters[span.parameter]), op.id))
    for name, shape in parameters.items():
        problems.extend(_gaps(name, shape[0] if shape else 1, claims[name]))
    if problems:
        raise CoverageError("operator catalog", tuple(problems))


def _places(index_of: Mapping[str, int], operators: tuple[str, ...]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(index_of.__getitem__, operators), dtype=np.int64, count=len(operators))


def _gaps(name: str, rows: int, claims: list[tuple[int, int, str]]) -> Iterator[str]:
    """Yields a sentence for each gap, overlap or overrun in the claims on one parameter's rows."""
    at = 0
    previous = "nothing"
    for start, stop, op_id in sorted(claims):
        if start > at:
            yield f"{name} rows [{at}, {start}) belong to no operator"
        elif start < at:
            yield f"{name} rows [{start}, {min(at, stop)}) belong to both {previous} and {op_id}"
        at, previous = max(at, stop), op_id
    if at < rows:
        yield f"{name} rows [{at}, {rows}) belong to no operator"
    elif at > rows:
        yield f"{name} has {rows} rows, but {previous} claims up to row {at}"


def missed_steps(catalog: Catalog, step: int, versions: Mapping[str, int]) -> dict[str, int]:
    """Returns the parameters of experts that came back older than ``step``, with the number of steps between.

    Stacks are left out: their state without rows is as new as their layer's gate (``Catalog.home``).

    Args:
        catalog: Of the model.
        step: Step at which training resumes.
        versions: Operator -> step of its restored version.
    """
    older = {op: step - version for op, version in versions.items() if version < step}
    return {
        span.parameter: older[op.id]
        for op in catalog.experts
        if op.id in older
        for span in op.spans
        if span.start is None
    }
