"""Which rank writes what of one checkpoint: the live state weighed, and dealt out by ``core.sharding``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_

from moe_ckpt.core.operators import Catalog, Operator, OperatorKind, Span
from moe_ckpt.core.placement import expert_owner
from moe_ckpt.core.sharding import (
    Name,
    Parts,
    Shares,
    Unit,
    in_dealing_order,
    parts_equal,
    parts_none,
    shares_adaptive,
    shares_fixed,
)
from moe_ckpt.ports import StateTensor


def has_rows(catalog: Catalog, tensor: StateTensor) -> bool:
    """True for state whose rows are those of its parameter: weights, moments, row factors; not Adam's ``step``."""
    shape = catalog.parameters[tensor.parameter]
    return bool(shape) and tensor.global_shape[:1] == shape[:1]


def holders(catalog: Catalog, tensor: StateTensor) -> Iterable[tuple[Operator, Span]]:
    """The operators that share one state tensor, with their rows of it.

    State whose rows match the parameter's is cut like the parameter; what has no such rows goes whole to
    the parameter's home operator.
    """
    if has_rows(catalog, tensor):
        return catalog.spans_of[tensor.parameter]
    home = catalog.by_id[catalog.home[tensor.parameter]]
    return ((home, Span(tensor.parameter)),)


@dataclass(frozen=True)
class Weights:
    """Bytes of the state that all ranks hold alike. Sharded state weighs nothing here.

    units: of all operators but the experts, biggest first.
    experts: operator -> bytes.
    """

    units: tuple[Unit, ...]
    experts: Mapping[str, int]


def weigh(catalog: Catalog, tensors: Sequence[StateTensor]) -> Weights:
    """Equal on every rank: only replicated tensors enter, which are the same everywhere."""
    of_rows: dict[Name, int] = {}
    whole: dict[Name, int] = {}
    experts: dict[str, int] = {}
    for tensor in tensors:
        if not tensor.replicated:
            continue
        rows = tensor.global_shape[0] if has_rows(catalog, tensor) else 0
        nbytes = tensor.local.nbytes
        for op, span in holders(catalog, tensor):
            if op.kind is OperatorKind.EXPERT:
                start, stop = span.rows(tensor.global_shape) if rows else (0, 1)
                experts[op.id] = experts.get(op.id, 0) + nbytes // (rows or 1) * (stop - start)
            else:
                found = of_rows if rows else whole
                found[op.id, span] = found.get((op.id, span), 0) + nbytes // (rows or 1)
    return Weights(tuple(in_dealing_order(_units(catalog, of_rows, whole))), experts)


def _units(catalog: Catalog, of_rows: Mapping[Name, int], whole: Mapping[Name, int]) -> Iterable[Unit]:
    for name in of_rows.keys() | whole.keys():
        op, span = name
        start, stop = span.rows(catalog.parameters[span.parameter]) if name in of_rows else (0, 0)
        yield Unit(op, span, start, stop, of_rows.get(name, 0), whole.get(name, 0))


@dataclass(frozen=True)
class Dealt:
    """Who writes what of one checkpoint's replicated state: experts by their owners, the rest by ``shares``."""

    catalog: Catalog
    owners: Mapping[str, int]
    shares: Shares

    def rows(self, op: Operator, span: Span, tensor: StateTensor, rank: int) -> Sequence[Span]:
        """What ``rank`` writes of the rows ``span`` that ``op`` holds of a replicated tensor."""
        owner = self.owners.get(op.id)
        if owner is not None:
            return (span,) if owner == rank else ()
        parts = self.shares.parts[op.id, span]
        if len(parts) == 1 or not has_rows(self.catalog, tensor):
            return (span,) if parts[0].rank == rank else ()
        return [Span(tensor.parameter, part.start, part.stop) for part in parts if part.rank == rank]


class Sharder:
    """Deals out the replicated state of one checkpoint after the other. On every rank, with the same answers.

    sharding: "none", "equal" or "adaptive", see ``core.sharding``.
    """

    def __init__(self, catalog: Catalog, ranks: int, sharding: str) -> None:
        self._catalog = catalog
        self._ranks = ranks
        self._sharding = sharding
        self._owners = expert_owners(catalog, ranks)
        self._weighed: tuple[StateTensor, ...] = ()
        self._weights = Weights((), {})
        self._fixed: Parts = {}

    def deal(self, operators: Collection[str], tensors: Sequence[StateTensor]) -> Dealt:
        """The shares of a checkpoint of ``operators``, which is what is balanced: their copies in host memory."""
        weights = self._weigh(tensors)
        units = [unit for unit in weights.units if unit.operator in operators]
        preload = [0] * self._ranks
        for op in operators:
            if op in weights.experts:
                preload[self._owners[op]] += weights.experts[op]
        if self._sharding == "adaptive":
            shares = shares_adaptive(units, preload)
        else:
            shares = shares_fixed(self._fixed, units, preload)
        return Dealt(self._catalog, self._owners, shares)

    def _weigh(self, tensors: Sequence[StateTensor]) -> Weights:
        """Weighed anew when a tensor is another one than last time; plain tensors rarely are."""
        same = len(tensors) == len(self._weighed) and all(map(is_, tensors, self._weighed))
        if not same or not self._weights.units:
            self._weights = weigh(self._catalog, tensors)
            self._weighed = tuple(tensors)
            if self._sharding == "none":
                self._fixed = parts_none(self._weights.units)
            elif self._sharding == "equal":
                self._fixed = parts_equal(self._weights.units, self._ranks)
        return self._weights


def expert_owners(catalog: Catalog, ranks: int) -> dict[str, int]:
    """Expert operator -> the rank that writes it where every rank holds all: contiguous blocks, as selectors assume."""
    experts_in = {layer.index: layer.experts for layer in catalog.layers}
    return {
        op.id: expert_owner(op.expert, experts_in[op.layer], ranks)
        for op in catalog.experts
        if op.expert is not None and op.layer is not None
    }
