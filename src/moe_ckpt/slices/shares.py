"""Which rank writes what of one checkpoint: the live state weighed, and dealt out by ``core.sharding``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from operator import is_

from moe_ckpt.core.operators import Catalog, Operator, OperatorKind, Span
from moe_ckpt.core.placement import Placement
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
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.format.dtypes import itemsize
from moe_ckpt.ports import StateTensor, TensorSpec

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
    """Bytes of the state that all peers hold alike. Sharded state weighs nothing here.

    Attributes:
        units: Of all operators but the experts, biggest first.
        experts: Operator -> bytes.
    """

    units: tuple[Unit, ...]
    experts: Mapping[str, int]


def weigh(catalog: Catalog, tensors: Sequence[StateTensor], compute: ComputeTypes | None = None) -> Weights:
    """Equal on all peers: only replicated tensors enter, which are the same on them.

    Args:
        compute: Weigh what forward and backward read instead of the whole state, in these types.
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
                found = of_rows if rows else whole
                found[op.id, span] = found.get((op.id, span), 0) + nbytes // (rows or 1)
    return Weights(tuple(in_dealing_order(_units(catalog, of_rows, whole))), experts)


def is_weight(tensor: StateTensor | TensorSpec) -> bool:
    """True for parameters, False for what optimizers keep of them."""
    return tensor.key.startswith("model/")


def compute_bytes(tensor: StateTensor, compute: ComputeTypes, elements: int) -> int:
    """Bytes of ``elements`` of a parameter as kernels read it."""
    dtype = compute.get(tensor.parameter)
    return elements * (tensor.local.element_size() if dtype is None else itemsize(dtype))


def operator_bytes(
    catalog: Catalog, specs: Sequence[TensorSpec], compute: ComputeTypes, gradient: str | None = None
) -> dict[str, OperatorBytes]:
    """What each operator weighs, all ranks together; equal on every rank.

    Gradients are told if any tensor tells its own: what no optimizer updates has none.

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
    told = any(tensor.gradient is not None for tensor in specs)
    return {op: OperatorBytes(full[op], read[op], consumed[op] if told else None, weights[op]) for op in full}


def coupled_operators(catalog: Catalog, specs: Sequence[TensorSpec]) -> tuple[frozenset[str], ...]:
    """Groups of operators that share a parameter whose rows act on one another in its optimizer."""
    groups: list[frozenset[str]] = []
    for tensor in specs:
        joined = frozenset(op.id for op, _ in catalog.spans_of[tensor.parameter]) if tensor.mixes_rows else frozenset()
        if len(joined) > 1:
            joined = joined.union(*(group for group in groups if group & joined))
            groups = [group for group in groups if not group & joined] + [joined]
    return tuple(groups)


def _units(catalog: Catalog, of_rows: Mapping[Name, int], whole: Mapping[Name, int]) -> Iterable[Unit]:
    for name in of_rows.keys() | whole.keys():
        op, span = name
        start, stop = span.rows(catalog.parameters[span.parameter]) if name in of_rows else (0, 0)
        yield Unit(op, span, start, stop, of_rows.get(name, 0), whole.get(name, 0))


@dataclass(frozen=True)
class WriteAssignment:
    """Who writes what of one checkpoint's replicated state: experts by their owners, the rest by ``parts``.

    Attributes:
        peers: The ranks that ``parts`` counts from 0.
        parts: Of the checkpoint's units at least.
        writers: Ranks that write something of each operator that is no expert.
        weigh: Gives the checkpoint's own units with the bytes of each rank, where nobody needs them to divide it.
    """

    catalog: Catalog
    owners: Mapping[str, int]
    peers: tuple[int, ...]
    parts: Parts
    writers: Mapping[str, frozenset[int]]
    weigh: Callable[[], Shares]

    @cached_property
    def shares(self) -> Shares:
        return self.weigh()

    def writes_whole(self, operator: str, rank: int) -> bool | None:
        """True if ``rank`` writes all that is replicated of the operator, False if none, None if it shares in it."""
        owner = self.owners.get(operator)
        if owner is not None:
            return owner == rank
        writers = self.writers.get(operator, frozenset())
        if rank not in writers:
            return False
        return True if len(writers) == 1 else None

    def rows(self, op: Operator, span: Span, tensor: StateTensor, rank: int) -> Sequence[Span]:
        """What ``rank`` writes of the rows ``span`` that ``op`` holds of a replicated tensor."""
        owner = self.owners.get(op.id)
        if owner is not None:
            return (span,) if owner == rank else ()
        parts = self.parts[op.id, span]
        if len(parts) == 1 or not has_rows(self.catalog, tensor):
            return (span,) if self.peers[parts[0].rank] == rank else ()
        return [Span(tensor.parameter, part.start, part.stop) for part in parts if self.peers[part.rank] == rank]


class Sharder:
    """Deals out the replicated state of one checkpoint after the other. On every rank, with the same answers on peers.

    Args:
        sharding: "none", "equal" or "adaptive", see ``core.sharding``.
    """

    def __init__(self, catalog: Catalog, placement: Placement, sharding: str) -> None:
        self._catalog = catalog
        self._peers = placement.peers
        self._number = {rank: at for at, rank in enumerate(placement.peers)}
        self._apart = placement.experts_apart
        self._sharding = sharding
        self._owners = expert_owners(catalog, placement)
        self._weighed: tuple[StateTensor, ...] | None = None
        self._weights = Weights((), {})
        self._compute_weights: Weights | None = None
        self._compute_types: ComputeTypes = {}
        self._fixed: Parts = {}
        self._fixed_writers: Mapping[str, frozenset[int]] = {}

    def deal(
        self,
        operators: Collection[str],
        tensors: Sequence[StateTensor],
        frozen: Collection[str] = (),
        compute: ComputeTypes | None = None,
    ) -> WriteAssignment:
        """The shares of a checkpoint of ``operators``, which is what is balanced: their copies in host memory.

        Args:
            frozen: Operators of which only compute weights are saved, in the types ``compute``.
        """
        weights = self._weigh(tensors)
        given = self._catalog, self._owners, self._peers
        divide = partial(self._divide, weights, operators, tensors, frozen, compute or {})
        if self._sharding == "adaptive" and len(self._peers) > 1 and weights.units:
            shares = divide()
            return WriteAssignment(*given, shares.parts, self._writers_of(shares.parts), lambda: shares)
        return WriteAssignment(*given, self._fixed, self._fixed_writers, divide)

    def _divide(
        self,
        weights: Weights,
        operators: Collection[str],
        tensors: Sequence[StateTensor],
        frozen: Collection[str],
        compute: ComputeTypes,
    ) -> Shares:
        """For arguments see ``deal``; weights: of ``tensors``."""
        units = [unit for unit in weights.units if unit.operator in operators]
        preload = [0] * len(self._peers)
        if weights.experts:
            self._preload(preload, weights.experts, operators)
        if frozen:
            light = self._weigh_compute(tensors, compute)
            units += [unit for unit in light.units if unit.operator in frozen]
            self._preload(preload, light.experts, frozen)
            units = in_dealing_order(units)
        if self._sharding == "adaptive" and len(self._peers) > 1:
            return shares_adaptive(units, preload)
        return shares_fixed(self._fixed, units, preload)

    def _writers_of(self, parts: Parts) -> Mapping[str, frozenset[int]]:
        """See ``WriteAssignment.writers``."""
        found: dict[str, set[int]] = {}
        for (operator, _), those in parts.items():
            found.setdefault(operator, set()).update(self._peers[part.rank] for part in those)
        return {operator: frozenset(ranks) for operator, ranks in found.items()}

    def _preload(self, preload: list[int], experts: Mapping[str, int], operators: Collection[str]) -> None:
        """Add the experts' bytes to what their owners write, those of peers too."""
        if len(self._peers) == 1 and not self._apart:
            preload[0] += sum([experts[op] for op in operators if op in experts])
            return
        for op in operators:
            if op in experts:
                at = self._number.get(self._owners[op])
                if at is not None:
                    preload[at] += experts[op]

    def _weigh(self, tensors: Sequence[StateTensor]) -> Weights:
        """Weighed anew when a tensor is another one than last time; plain tensors rarely are."""
        known = self._weighed
        if tensors is not known and (
            known is None or len(tensors) != len(known) or not all(map(is_, tensors, known))
        ):
            self._weights = self._with_peers_experts(weigh(self._catalog, tensors), tensors)
            self._compute_weights = None
            self._weighed = tuple(tensors)
            if self._sharding == "equal":
                self._fixed = parts_equal(self._weights.units, len(self._peers))
            else:
                self._fixed = parts_none(self._weights.units)
            self._fixed_writers = self._writers_of(self._fixed)
        return self._weights

    def _weigh_compute(self, tensors: Sequence[StateTensor], compute: ComputeTypes) -> Weights:
        """After ``_weigh`` of the same tensors, whose memory this shares."""
        if self._compute_weights is None or compute != self._compute_types:
            light = weigh(self._catalog, tensors, compute)
            weights = [tensor for tensor in tensors if is_weight(tensor)]
            self._compute_weights = self._with_peers_experts(light, weights)
            self._compute_types = dict(compute)
        return self._compute_weights

    def _with_peers_experts(self, weights: Weights, tensors: Sequence[StateTensor]) -> Weights:
        """Under expert parallelism, what the experts weigh that this rank or a peer writes.

        Experts of a layer weigh alike, so those of this rank tell what the others weigh, those too that a peer writes:
        all peers must come to the same numbers, and some may write no expert.
        """
        if not self._apart:
            return weights
        of_layer: dict[int, int] = {}
        held: dict[int, set[str]] = {}
        for tensor in tensors:
            for op, _ in holders(self._catalog, tensor):
                if op.kind is OperatorKind.EXPERT and op.layer is not None:
                    of_layer[op.layer] = of_layer.get(op.layer, 0) + tensor.local.nbytes
                    held.setdefault(op.layer, set()).add(op.id)
        known = {op.id: op.layer for op in self._catalog.experts if op.layer in of_layer}
        sizes = {layer: nbytes // len(held[layer]) for layer, nbytes in of_layer.items()}
        return Weights(weights.units, {op: sizes[layer] for op, layer in known.items() if layer is not None})


def expert_owners(catalog: Catalog, placement: Placement) -> dict[str, int]:
    """Expert operator -> the rank that writes what is replicated of it."""
    return {
        op.id: placement.owners[op.layer][op.expert]
        for op in catalog.experts
        if op.expert is not None and op.layer is not None
    }
