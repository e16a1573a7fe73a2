"""Assigns the slices of one checkpoint to ranks: live state is weighed here, and ``core.placement`` divides it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import prod
from typing import NamedTuple

import numpy as np

from moe_ckpt.core.operators import Catalog, Operator, OperatorKind, Remembered, Span
from moe_ckpt.core.placement import Name, Placement, RowRange, ShardingUnit, Shares, in_dealing_order, shares_adaptive
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.format.shard import itemsize
from moe_ckpt.ports import StateTensor, TensorSpec
from moe_ckpt.slices.cuts import Numbers

ComputeTypes = Mapping[str, str]
"""Parameter -> type (as named in headers) in which kernels read it, where that is not its own."""


def has_rows(catalog: Catalog, tensor: StateTensor | TensorSpec) -> bool:
    """True for state whose rows are those of its parameter: weights, moments, row factors; not Adam's ``step``."""
    shape = catalog.parameters[tensor.parameter]
    return bool(shape) and tensor.global_shape[:1] == shape[:1]


def holders(catalog: Catalog, tensor: StateTensor | TensorSpec) -> Sequence[tuple[Operator, Span]]:
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
    """Bytes of the state that all peers hold. Sharded state counts as 0.

    Attributes:
        units: Of all operators but the experts, the largest first.
        experts: Expert -> bytes.
    """

    units: tuple[ShardingUnit, ...]
    experts: Mapping[str, int]


def weigh(catalog: Catalog, tensors: Sequence[StateTensor], compute: ComputeTypes | None = None) -> Weights:
    """Returns the bytes of units and experts, equal on all peers, since only replicated tensors count.

    Args:
        catalog: Of the model.
        tensors: This rank's.
        compute: Weigh compute weights, in these types, instead of the whole state.
    """
    of_rows: dict[Name, int] = {}
    whole: dict[Name, int] = {}
    experts: dict[str, int] = {}
    for tensor in tensors:
        if not tensor.replicated or (compute is not None and not is_weight(tensor)):
            continue
        rows = tensor.global_shape[0] if has_rows(catalog, tensor) else 0
        nbytes = tensor.local.nbytes if compute is None else compute_bytes(tensor, compute, tensor.local.numel())
        for op, span in holders(catalog, tensor):
            if op.kind is OperatorKind.EXPERT:
                start, stop = span.rows(tensor.global_shape) if rows else (0, 1)
                experts[op.id] = experts.get(op.id, 0) + nbytes // (rows or 1) * (stop - start)
            else:
                weights = of_rows if rows else whole
                weights[op.id, span] = weights.get((op.id, span), 0) + nbytes // (rows or 1)
    units = []
    for op_id, span in of_rows.keys() | whole.keys():
        name = op_id, span
        start, stop = span.rows(catalog.parameters[span.parameter]) if name in of_rows else (0, 0)
        units.append(ShardingUnit(op_id, span, start, stop, of_rows.get(name, 0), whole.get(name, 0)))
    return Weights(tuple(in_dealing_order(units)), experts)


def is_weight(tensor: StateTensor | TensorSpec) -> bool:
    """Returns True for parameters, False for optimizer state."""
    return tensor.key.startswith("model/")


def compute_bytes(tensor: StateTensor, compute: ComputeTypes, elements: int) -> int:
    """Returns the bytes of so many elements of a parameter, in the type that kernels read."""
    dtype = compute.get(tensor.parameter)
    return elements * (tensor.local.element_size() if dtype is None else itemsize(dtype))


def operator_bytes(
    catalog: Catalog, specs: Sequence[TensorSpec], compute: ComputeTypes, gradient: str | None = None
) -> dict[str, OperatorBytes]:
    """Returns the bytes of each operator, all ranks together; equal on every rank.

    The bytes of gradients are known if any tensor has a type of its gradient: one that no optimizer updates has none.

    Args:
        catalog: Of the model.
        specs: Of its tensors.
        compute: Types of weights as kernels read them.
        gradient: Type that wider gradients are saved in; None for their own.
    """
    widest = None if gradient is None else itemsize(gradient)
    full, read, weights, consumed = (dict.fromkeys(catalog.by_id, 0) for _ in range(4))
    for tensor in specs:
        size = itemsize(tensor.dtype)
        for op, span in holders(catalog, tensor):
            start, stop = span.rows(tensor.global_shape)
            elements = (stop - start) * prod(tensor.global_shape[1:]) if tensor.global_shape else 1
            full[op.id] += elements * size
            if is_weight(tensor):
                weights[op.id] += elements * size
                read[op.id] += elements * itemsize(compute.get(tensor.parameter, tensor.dtype))
                width = 0 if tensor.gradient is None else itemsize(tensor.gradient)
                consumed[op.id] += elements * (width if widest is None else min(width, widest))
    has_gradients = any(tensor.gradient is not None for tensor in specs)
    return {op: OperatorBytes(full[op], read[op], consumed[op] if has_gradients else None, weights[op]) for op in full}


def coupled_operators(catalog: Catalog, specs: Sequence[TensorSpec]) -> tuple[frozenset[str], ...]:
    """Returns groups of operators that share a parameter whose rows affect one another in its optimizer.

    Optimizer state without rows, such as Adafactor's factor for the columns of a stack ``[E, D]``, must be as new as
    the rows, so that its home is in the group. Step counts, which have no dimension, do not matter.
    """
    at_home = {tensor.parameter for tensor in specs if tensor.global_shape and not has_rows(catalog, tensor)}
    groups: list[frozenset[str]] = []
    for tensor in specs:
        joined = frozenset(op.id for op, _ in catalog.spans_of[tensor.parameter]) if tensor.mixes_rows else frozenset()
        if joined and tensor.parameter in at_home:
            joined |= {catalog.home[tensor.parameter]}
        if len(joined) > 1:
            joined = joined.union(*(group for group in groups if group & joined))
            groups = [group for group in groups if not group & joined] + [joined]
    return tuple(groups)


class UnitShare(NamedTuple):
    """The share of a unit that one rank writes.

    Attributes:
        span: Rows of the unit.
        rows: Rows that the rank writes; the very object ``span`` if it writes all.
        first: The rank also writes state without rows, which belongs to the first rows.
    """

    span: Span
    rows: Span
    first: bool


@dataclass(frozen=True)
class WriteAssignment:
    """The assignment of one checkpoint's replicated state to ranks: experts by their owners, all else by ``shares``.

    Attributes:
        owners: Expert -> the rank that writes it.
        unit_shares: Rank -> operator that is no expert -> the shares of its units that the rank writes.
        shares: The checkpoint's units, and the bytes of each rank.
    """

    owners: Mapping[str, int]
    unit_shares: Callable[[int], Mapping[str, Sequence[UnitShare]]]
    shares: Shares


Dealt = tuple[tuple[ShardingUnit, Sequence[RowRange]], ...]
"""Units, each with its parts."""


def _unit_shares(dealt: Dealt, peers: Mapping[int, int], rank: int) -> Mapping[str, Sequence[UnitShare]]:
    """Returns ``WriteAssignment.unit_shares`` of a rank.

    Args:
        dealt: All units with their parts.
        peers: Rank -> its number in the parts.
        rank: Whose.
    """
    number, by_operator = peers.get(rank, -1), dict[str, list[UnitShare]]()
    for unit, parts in dealt:
        if len(parts) == 1:
            if parts[0].rank == number:
                by_operator.setdefault(unit.operator, []).append(UnitShare(unit.span, unit.span, first=True))
            continue
        for at, part in enumerate(parts):
            if part.rank == number:
                rows = Span(unit.span.parameter, part.start, part.stop)
                by_operator.setdefault(unit.operator, []).append(UnitShare(unit.span, rows, first=not at))
    return by_operator


def _bytes_of_experts(catalog: Catalog, experts: Mapping[str, int]) -> Numbers:
    """Returns the bytes of each operator of the catalog; 0 for one that is not in ``experts``."""
    sizes = np.zeros(len(catalog.operators), dtype=np.int64)
    sizes[catalog.places_of(tuple(experts))] = list(experts.values())
    return sizes


class Sharder:
    """Assigns the replicated state of one checkpoint after the other to ranks. Runs on every rank, with equal results
    on peers.

    Args:
        catalog: Of the model.
        placement: Ranks of the operators.
        tensors: This rank's.
    """

    def __init__(self, catalog: Catalog, placement: Placement, tensors: Sequence[StateTensor]) -> None:
        self._catalog, self._tensors = catalog, tensors
        self._peers = placement.peers
        self._number = {rank: at for at, rank in enumerate(placement.peers)}
        self._apart = placement.experts_apart
        self._owners = placement.owner_of
        self._compute_weights: Weights | None = None
        self._compute_types: ComputeTypes = {}
        self._expert_bytes = Remembered(partial(_bytes_of_experts, catalog))
        self._dealt: Dealt = ()
        self._unit_shares: Callable[[int], Mapping[str, Sequence[UnitShare]]] = lambda rank: {}

    def assign(
        self,
        operators: Collection[str],
        compute_only: Collection[str] = (),
        compute: ComputeTypes | None = None,
    ) -> WriteAssignment:
        """Returns the assignment of a checkpoint, which gives each rank about as many bytes to copy.

        Args:
            operators: Saved in full.
            compute_only: Operators of which only compute weights are saved, in the types ``compute``.
            compute: See there.
        """
        weights = self._weights
        places, resting = map(self._catalog.places_of, (tuple(operators), tuple(compute_only)))
        units = self._chosen(weights.units, places)
        preload = [0] * len(self._peers)
        if weights.experts:
            self._preload(preload, weights.experts, places)
        if len(resting):
            light = self._weigh_compute(compute or {})
            units += self._chosen(light.units, resting)
            self._preload(preload, light.experts, resting)
            units = in_dealing_order(units)
        shares = shares_adaptive(units, preload)
        dealt = tuple(zip(shares.units, shares.dealt, strict=True))
        if dealt != self._dealt:  # else ``unit_shares`` returns the very same object for a rank again
            self._dealt, self._unit_shares = dealt, lru_cache(partial(_unit_shares, dealt, self._number))
        return WriteAssignment(self._owners, self._unit_shares, shares)

    def _chosen(self, units: Sequence[ShardingUnit], places: Numbers) -> list[ShardingUnit]:
        """Returns the units of the operators at ``places`` of the catalog."""
        everything = self._catalog.everything
        chosen = {everything[at] for at in places[~self._catalog.is_expert[places]].tolist()}
        return [unit for unit in units if unit.operator in chosen]

    def _preload(self, preload: list[int], experts: Mapping[str, int], places: Numbers) -> None:
        """Adds the bytes of experts to the loads of their owners, as far as these are peers."""
        nbytes, at = self._expert_bytes(experts)[places], self._peer_of_expert[places]
        is_peer = at >= 0
        loads = np.array(preload, dtype=np.int64)
        np.add.at(loads, at[is_peer], nbytes[is_peer])
        preload[:] = loads.tolist()

    @cached_property
    def _peer_of_expert(self) -> Numbers:
        """For each operator its owner's number among the peers; -1 if that is no peer, or the operator no expert."""
        alone = len(self._peers) == 1 and not self._apart
        peers = np.full(len(self._catalog.operators), -1, dtype=np.int64)
        for op in self._catalog.experts:
            peers[self._catalog.index_of[op.id]] = 0 if alone else self._number.get(self._owners[op.id], -1)
        return peers

    @cached_property
    def _weights(self) -> Weights:
        return self._with_peers_experts(weigh(self._catalog, self._tensors), self._tensors)

    def _weigh_compute(self, compute: ComputeTypes) -> Weights:
        """Returns the weights of compute weights."""
        if self._compute_weights is None or compute != self._compute_types:
            light = weigh(self._catalog, self._tensors, compute)
            self._compute_weights = self._with_peers_experts(light, list(filter(is_weight, self._tensors)))
            self._compute_types = dict(compute)
        return self._compute_weights

    def _with_peers_experts(self, weights: Weights, tensors: Sequence[StateTensor]) -> Weights:
        """Returns ``weights`` with the experts that peers write, under expert parallelism.

        All peers must compute the same numbers, although each has other experts, or none. Experts of a layer have the
        same size, so that those of this rank give the size of the others.
        """
        if not self._apart:
            return weights
        of_layer: dict[int, int] = {}
        operators_in: dict[int, set[str]] = {}
        for tensor in tensors:
            for op, _ in holders(self._catalog, tensor):
                if op.kind is OperatorKind.EXPERT and op.layer is not None:
                    of_layer[op.layer] = of_layer.get(op.layer, 0) + tensor.local.nbytes
                    operators_in.setdefault(op.layer, set()).add(op.id)
        layers = {op.id: op.layer for op in self._catalog.experts if op.layer in of_layer}
        sizes = {layer: nbytes // len(operators_in[layer]) for layer, nbytes in of_layer.items()}
        return Weights(weights.units, {op: sizes[layer] for op, layer in layers.items() if layer is not None})
