"""From a plan to bytes: which rows of which live tensors this rank copies for the planned operators, of its own share
and of the shares of others, and how large its share of a complete checkpoint will be, as far as that is known before
training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, filterfalse
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from moe_ckpt.core.operators import Catalog, Operator, OperatorKind, Span
from moe_ckpt.core.placement import Placement
from moe_ckpt.format.shard import REPLAY, SliceEntry, dtype_name, itemsize
from moe_ckpt.policies.base import ALL_SENT, Sends
from moe_ckpt.ports import StateTensor, TensorSpec
from moe_ckpt.slices.assignment import (
    ComputeTypes,
    Sharder,
    UnitShare,
    WriteAssignment,
    has_rows,
    holders,
    is_weight,
)
from moe_ckpt.slices.cuts import NBYTES, Cuts, Numbers, Shelf, SliceSource

if TYPE_CHECKING:
    import torch


_REMEMBERED = 1 << 14
"""Entries that are made once and then looked up: those of units that peers share by rows are needed by each plan."""

LocalRows: TypeAlias = tuple[int, int]
"""Number of a tensor, and of the operator among its ``holders``: the garbage collector does not visit numbers."""


class LocalState:
    """This rank's tensors, by operator. Takes time for the operators that a snapshot saves, not for the whole model.

    Args:
        catalog: Of the model.
        tensors: This rank's.
        source: Another rank, for the part of its share that this rank's tensors also hold; None for the own share.
        alike: State that is replicated on this rank is so on ``source``.
    """

    def __init__(
        self, catalog: Catalog, tensors: Sequence[StateTensor], source: int | None = None, *, alike: bool = False
    ) -> None:
        self.catalog = catalog
        self.tensors = tuple(tensors)
        self.local_rows: dict[str, list[LocalRows]] = {}
        """Operator -> its rows of this rank's tensors."""
        self.scattered: list[tuple[Operator, Span, StateTensor]] = []
        """State without rows (Adam's ``step``) of parameters that several operators share, each with its home."""
        self._shelf = Shelf()
        self._places = {key: at for at, key in enumerate(sorted(tensor.key for tensor in tensors))}
        self._own_scattered: dict[str, int] = {}
        self._full, self._light = _DescribedCuts(), _DescribedCuts()
        self._compute: ComputeTypes = {}
        # Narrowing a tensor that autograd tracks is slow. The others are used as they are, since there are thousands.
        local = (tensor.local for tensor in tensors)
        self._blocks = [block.detach() if block.requires_grad else block for block in local]
        for number, tensor in enumerate(tensors):
            home = catalog.home[tensor.parameter]
            shared = any(operator.id != home for operator, _ in catalog.spans_of[tensor.parameter])
            for position, (operator, span) in enumerate(holders(catalog, tensor)):
                if not tensor.duplicate if source is None else (alike and tensor.replicated) or tensor.writer == source:
                    self.local_rows.setdefault(operator.id, []).append((number, position))
                if shared and not is_weight(tensor) and not has_rows(catalog, tensor):
                    self.scattered.append((operator, span, tensor))
        self._is_local = np.zeros(len(catalog.operators), dtype=bool)
        self._is_local[catalog.places_of(tuple(self.local_rows))] = True

    @property
    def is_crowded(self) -> bool:
        """True if so many slices serve one plan only that this object should be made anew."""
        return self._shelf.transient > max(_REMEMBERED, len(self._shelf.entries) // 2)

    def cuts(
        self, operators: Collection[str], assignment: WriteAssignment, rank: int, compute: ComputeTypes | None = None
    ) -> Cuts:
        """Returns the slices that ``rank`` writes of ``operators``, none of them empty: all state, or weights in the
        types ``compute``.

        An operator has the same cuts each time, except for units that peers share by rows. Operators of other ranks
        cost no bytecode, nor do operators with cuts, as long as units are assigned as before.
        """
        if compute is not None and compute is not self._compute and compute != self._compute:
            self._light, self._compute = _DescribedCuts(), compute
        catalog, described = self.catalog, self._full if compute is None else self._light
        if rank != described.rank:
            described.rank, described.cuts = rank, np.full(len(self._is_local), -1)
        places = catalog.places_of(tuple(operators))
        places = places[self._is_local[places]]
        for at in places[described.cuts[places] < 0].tolist():
            operator = catalog.everything[at]
            writes = assignment.owners.get(operator) == rank
            if (at, writes) not in described.apart:
                described.apart[at, writes] = self._describe(operator, writes, compute)
            described.cuts[at] = described.apart[at, writes]
        others = places[~catalog.is_expert[places]].tolist()
        unit_shares = assignment.unit_shares(rank)
        if unit_shares is not described.unit_shares:
            described.unit_shares, described.cuts_of_units = unit_shares, {}
        units = described.cuts_of_units
        for at in filterfalse(units.__contains__, others):
            operator = catalog.everything[at]
            units[at] = [self._unit(operator, share, described, compute) for share in unit_shares.get(operator, ())]
        of_units = np.array(list(chain.from_iterable(map(units.__getitem__, others))), dtype=np.int64)
        return self._filled(np.concatenate([described.cuts[places], of_units]))

    def _filled(self, cuts: Numbers) -> Cuts:
        """Returns the cuts that are not empty."""
        return Cuts(self._shelf, cuts[self._shelf.bounds(cuts)[:, 1] > 0])

    def _unit(self, operator: str, share: UnitShare, described: _DescribedCuts, compute: ComputeTypes | None) -> int:
        """Returns the number of the cut with a rank's share of the replicated state of one unit."""
        number = described.units.get((operator, share))
        if number is None:
            number = self._describe(operator, share, compute)
            if share.rows is share.span:
                described.units[operator, share] = number
            else:
                self._shelf.transient += self._shelf.cuts[number].count
        return number

    def replay_cuts(
        self,
        anchored: Collection[str],
        compute_only: Collection[str],
        assignment: WriteAssignment,
        rank: int,
        compute: ComputeTypes,
    ) -> Cuts:
        """Returns the slices that ``rank`` writes besides, for a replay of the step after one slot of a sparse window:
        weights of ``compute_only`` in the types ``compute``, and state whose home is anchored in another slot.

        Args:
            assignment: Of ``anchored`` and ``compute_only``.
        """
        cuts, repeated = self.cuts(compute_only, assignment, rank, compute), Repeated(self.catalog, anchored)
        numbers = []
        for home, span, tensor in self.scattered:
            if tensor.duplicate or (tensor.replicated and rank) or not repeated.has(tensor.parameter, home):
                continue
            if tensor.key not in self._own_scattered:
                piece = _piece(home.id, span, tensor, tensor.local.detach(), REPLAY)
                self._own_scattered[tensor.key] = self._add(home.id, () if piece is None else (piece,))
            numbers.append(self._own_scattered[tensor.key])
        return cuts.joined(self._filled(np.array(numbers, dtype=np.int64)))

    def _add(self, operator: str, pieces: Sequence[SliceSource]) -> int:
        return self._shelf.add(operator, pieces, self._places, self.catalog.index_of[operator])

    def _describe(self, operator: str, share: UnitShare | bool, compute: ComputeTypes | None) -> int:
        """Makes the cut of an operator. Returns its number.

        Args:
            operator: Id of the operator.
            share: A share of one unit, for its replicated state alone; else whether replicated state is in the cut,
                beside state that is not replicated.
            compute: As of ``cuts``.
        """
        prefix, types = "" if compute is None else REPLAY, compute or {}
        pieces = []
        for number, position in self.local_rows.get(operator, ()):
            tensor, block = self.tensors[number], self._blocks[number]
            if compute is not None and not is_weight(tensor):
                continue
            _, span = holders(self.catalog, tensor)[position]
            rows: Span | None = span
            if isinstance(share, UnitShare):
                rows = self._rows(tensor, span, share)
            elif tensor.replicated and not share:
                rows = None
            piece = None
            if rows is not None:
                piece = _piece(operator, rows, tensor, block, prefix, types.get(tensor.parameter, tensor.stored))
            pieces += [] if piece is None else [piece]
        return self._add(operator, pieces)

    def _rows(self, tensor: StateTensor, span: Span, share: UnitShare) -> Span | None:
        """Returns the rows of a tensor that ``share`` gives, of the operator's rows ``span``; None for none."""
        if not tensor.replicated or span != share.span:
            return None
        if share.rows is share.span or has_rows(self.catalog, tensor):
            return share.rows
        return span if share.first else None


@dataclass(eq=False)
class _DescribedCuts:
    """Numbers of the cuts that were made of operators.

    Attributes:
        apart: (number of the operator in the catalog, whether replicated state is in the cut) -> all but ``units``.
        units: Share of a unit of an operator that is no expert -> its replicated state.
        rank: The rank of the newest ``LocalState.cuts``.
        cuts: For each operator of the catalog the cut of ``apart`` that ``rank`` writes; -1 where there is none yet.
        unit_shares: Those of ``rank``. Operators that are no experts are in every plan, nearly always with this very
            object, so that no unit need be looked up.
        cuts_of_units: Number of an operator -> the cuts of its ``unit_shares``.
    """

    apart: dict[tuple[int, bool], int] = field(default_factory=dict)
    units: dict[tuple[str, UnitShare], int] = field(default_factory=dict)
    rank: int | None = None
    cuts: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    unit_shares: Mapping[str, Sequence[UnitShare]] = field(default_factory=dict)
    cuts_of_units: dict[int, list[int]] = field(default_factory=dict)


class Repeated:
    """Tells which state without rows (Adam's ``step``) a slot must repeat: that of a parameter of which the slot
    anchors some rows, but not the home. The optimizer needs it from this slot on."""

    def __init__(self, catalog: Catalog, anchored: Collection[str]) -> None:
        self._catalog, self._anchored = catalog, frozenset(anchored)
        self._in_part: dict[frozenset[str], bool] = {}

    def has(self, parameter: str, home: Operator) -> bool:
        """Returns whether the slot must repeat the state of a parameter that belongs to ``home``."""
        if home.id in self._anchored:
            return False
        sharing = self._catalog.sharing[parameter]  # a layer's stacks are shared by the same experts
        if sharing not in self._in_part:
            self._in_part[sharing] = not self._anchored.isdisjoint(sharing)
        return self._in_part[sharing]


def _piece(
    operator: str, span: Span, tensor: StateTensor, block: torch.Tensor, prefix: str = "", dtype: str | None = None
) -> SliceSource | None:
    """Returns the part of the span's rows that this rank's ``block`` has; None if it has none."""
    offsets, local = tensor.offsets, block
    if tensor.global_shape:
        start, stop = span.rows(tensor.global_shape)
        first = max(start, offsets[0])
        last = min(stop, offsets[0] + local.shape[0])
        if first >= last:
            return None
        local = local.narrow(0, first - offsets[0], last - first)
        offsets = (first, *offsets[1:])
    if local.numel() == 0:
        return None
    name = dtype or dtype_name(local.dtype, tensor.key)
    key, shape = prefix + tensor.key, tuple(local.shape)
    on_device = tensor.on_param_device
    entry = _entry(key, operator, name, offsets, shape, tensor.global_shape, on_param_device=on_device)
    return SliceSource(entry, local, block)


_entry = lru_cache(maxsize=_REMEMBERED)(SliceEntry)
"""Makes entries, which are values, and the same at every step. A cached entry has its name and size already."""


# --- parts of other ranks' shares ---
#
# A rank that keeps copies of a data-parallel peer's snapshots copies the peer's share from its own tensors, as far as
# it has the same state, beside its own share. These bytes need not be sent: ``peers.store`` puts them into the copy,
# compares each slice with the peer's checksum, and requests slices that differ or are missing. So a copy is whole,
# whichever way its bytes came, and a recovery reads it like any other (MoEtion, arXiv 2412.15411 v1, Algorithm 2 and
# section 5.1).

MIRROR = "mirror/"
"""Prefix of the kinds of parts that duplicate another rank's share; the number of that rank follows."""


class MirroredShares:
    """Cuts the part of other ranks' shares that this rank's state also holds. For the training thread only.

    Args:
        catalog: Of the model.
        placement: Of this rank.
        sources: Ranks of whose snapshots this rank keeps copies.
        tensors: This rank's: its state, or the gradients that it consumed.
    """

    def __init__(
        self, catalog: Catalog, placement: Placement, sources: Sequence[int], tensors: Sequence[StateTensor]
    ) -> None:
        self._catalog = catalog
        self._alike = frozenset(placement.peers)
        self._experts_alike = frozenset(placement.expert_peers)
        self._sources = frozenset(sources)
        self._tensors = tensors
        self._local = {source: LocalState(catalog, tensors, source, alike=source in self._alike) for source in sources}

    @cached_property
    def sends(self) -> Sends:
        """State that sources must send, since this rank lacks it: non-experts, experts, and the weights alone of both.
        Everything without tensors."""
        if not self._tensors:
            return ALL_SENT
        # [of non-experts, of experts]. With a distributed optimizer, ranks have all weights, and know which rank
        # updates each; with FSDP2, a rank has its own part alone.
        replicated, updated, weights, gathered = [True, True], [True, True], [True, True], [False, False]
        for tensor in self._tensors:
            experts = any(op.kind is OperatorKind.EXPERT for op, _ in holders(self._catalog, tensor))
            has_writer = not tensor.duplicate or tensor.writer is not None
            replicated[experts] &= tensor.replicated
            updated[experts] &= has_writer and (tensor.updated_here or not tensor.duplicate)
            if is_weight(tensor):
                weights[experts] &= has_writer
                gathered[experts] |= has_writer and not tensor.updated_here
        alike, apart = self._sources <= self._alike, self._sources <= self._experts_alike
        shared = replicated[False] and alike
        experts_alike = (replicated[True] and alike) or (not replicated[True] and updated[True] and apart)
        shared_weights = shared or (weights[False] and gathered[False] and alike)
        expert_weights = experts_alike or (weights[True] and gathered[True] and apart)
        return Sends(not shared, not experts_alike, not shared_weights, not expert_weights)

    @property
    def is_crowded(self) -> bool:
        """True if one of them is, as ``LocalState.is_crowded`` says."""
        return any(local.is_crowded for local in self._local.values())

    def cuts(self, operators: Collection[str], assignment: WriteAssignment) -> dict[str, Cuts]:
        """Returns kind of part -> cuts, for each source.

        Args:
            operators: Saved in full, and sent.
            assignment: Of replicated state to its writers.
        """
        return {f"{MIRROR}{source}": local.cuts(operators, assignment, source) for source, local in self._local.items()}


# --- before training ---

_MOMENTS = 2


class ExpectedShare:
    """The size of this rank's share once its optimizer has state.

    If the optimizer has none yet, two moments are counted for each weight that it updates (Adam), in the type of the
    gradients that it consumes.

    Args:
        tensors: This rank's, as they are now.
        specs: Of all ranks' tensors.
        sources: As of ``MirroredShares``.
    """

    def __init__(
        self, tensors: Sequence[StateTensor], specs: Sequence[TensorSpec], sources: Sequence[int] = ()
    ) -> None:
        self._all, self._sources = tensors, sources
        self._tensors = [tensor for tensor in tensors if not tensor.duplicate]
        self._divided = any(not tensor.updated_here for tensor in tensors)  # by a distributed optimizer
        self._moments = self._missing_moments({spec.parameter: spec for spec in specs if is_weight(spec)})
        self.is_estimated = bool(self._moments)
        """True if such moments are counted."""

    @property
    def most_nbytes(self) -> int:
        """Bytes of this rank's tensors: its share if it has no peers, and more than its share otherwise."""
        return sum(tensor.local.nbytes for tensor in self._tensors) + sum(n for _, n in self._moments)

    def nbytes(self, catalog: Catalog, placement: Placement, rank: int) -> int:
        """Returns the bytes that this rank writes, without plain state: its own tensors, its share of the tensors that
        its peers hold as well, and what it holds of the shares of ``sources``.

        Takes as long as to describe a first snapshot.

        Args:
            catalog: Of the model.
            placement: Who holds what.
            rank: This one.
        """
        dealt = Sharder(catalog, placement, self._tensors).assign(catalog.everything)
        cuts = LocalState(catalog, self._tensors).cuts(catalog.everything, dealt, rank)
        written = int(cuts.shelf.table(cuts.slices)[:, NBYTES].sum())
        mirrors = MirroredShares(catalog, placement, self._sources, self._all).cuts(catalog.everything, dealt)
        mirrored = sum(int(cuts.shelf.table(cuts.slices)[:, NBYTES].sum()) for cuts in mirrors.values())
        undivided = sum(tensor.local.nbytes for tensor in self._tensors if not tensor.replicated)
        alike = sum(tensor.local.nbytes for tensor in self._tensors if tensor.replicated)
        moments = sum(n for tensor, n in self._moments if tensor.replicated and not self._divided)
        own_moments = sum(n for _, n in self._moments) - moments
        return written + mirrored + own_moments + (written - undivided + mirrored) * moments // max(1, alike)

    def _missing_moments(self, weights: Mapping[str, TensorSpec]) -> list[tuple[StateTensor, int]]:
        """Returns each block of weights that this rank's optimizer updates, with the bytes of its future moments."""
        updated = [
            (tensor, weights[tensor.parameter].dtype, gradient)
            for tensor in self._tensors
            if is_weight(tensor) and tensor.updated_here
            if (gradient := weights[tensor.parameter].gradient) is not None
        ]
        masters = sum(tensor.local.numel() for tensor, dtype, gradient in updated if gradient != dtype)
        state = sum(t.local.numel() for t in self._tensors if not is_weight(t) and prod(t.global_shape) > 1)
        if state > masters:  # there are moments
            return []
        return [(tensor, _MOMENTS * tensor.local.numel() * itemsize(gradient)) for tensor, _, gradient in updated]


def estimate_checkpoint_bytes(specs: Iterable[TensorSpec]) -> int:
    """Returns the bytes of a complete checkpoint of all ranks with Adam's moments, and with master weights for
    parameters whose gradients are of another type.

    Args:
        specs: Of all ranks' tensors.
    """
    total = 0
    for spec in specs:
        copies = 0 if spec.gradient is None else _MOMENTS + (spec.gradient != spec.dtype)
        if is_weight(spec):
            total += prod(spec.global_shape) * (itemsize(spec.dtype) + copies * itemsize(spec.gradient or spec.dtype))
    return total
