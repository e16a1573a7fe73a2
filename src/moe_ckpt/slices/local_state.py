"""From a plan to bytes: which rows of which live tensors this rank copies for the planned operators, and how
large its share of a complete checkpoint will be, as far as that is known before training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, filterfalse
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from moe_ckpt.core.operators import Catalog, Operator, Span
from moe_ckpt.core.placement import Placement
from moe_ckpt.format.shard import REPLAY, SliceEntry, dtype_name, itemsize
from moe_ckpt.ports import StateTensor, TensorSpec
from moe_ckpt.slices.assignment import (
    ComputeTypes,
    Sharder,
    UnitShare,
    WriteAssignment,
    has_rows,
    holders,
    is_weight,
    places_of,
)
from moe_ckpt.slices.cuts import NBYTES, Cuts, Numbers, Shelf, SliceSource

if TYPE_CHECKING:
    import torch


_REMEMBERED = 1 << 14
"""Slices described once and then looked up: those of operators that peers share by rows are described for each plan."""

LocalRows: TypeAlias = tuple[int, int]
"""Number of a tensor; place of the operator among its ``holders``. Numbers: the garbage collector passes them over."""


class LocalState:
    """This rank's tensors, by operator. Describing a snapshot costs time for what it saves, not for the whole model.

    Args:
        catalog: Of the model.
        tensors: This rank's.
        source: Another rank, of whose share this is only what this rank's tensors also hold; None for the rank's own.
        alike: What is replicated here is so on ``source``.
    """

    def __init__(
        self, catalog: Catalog, tensors: Sequence[StateTensor], source: int | None = None, *, alike: bool = False
    ) -> None:
        self.catalog = catalog
        self.tensors = tuple(tensors)
        self.local_rows: dict[str, list[LocalRows]] = {}
        """Operator -> its rows of this rank's tensors."""
        self.scattered: list[tuple[Operator, Span, StateTensor]] = []
        """State without rows of parameters that others than its home have a share in, with its home."""
        self._shelf = Shelf()
        self._places = {key: at for at, key in enumerate(sorted(tensor.key for tensor in tensors))}
        self._own_scattered: dict[str, int] = {}
        self._full, self._light = _DescribedCuts(), _DescribedCuts()
        self._compute: ComputeTypes = {}
        # Narrowing a tensor that autograd watches is slow. No other object where it does not: there are thousands.
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
        self._is_local[places_of(catalog, self.local_rows.keys())] = True

    @property
    def is_crowded(self) -> bool:
        """True if so many descriptions were made for one plan only that it should be rebuilt."""
        return self._shelf.transient > max(_REMEMBERED, len(self._shelf.entries) // 2)

    def cuts(
        self, operators: Collection[str], assignment: WriteAssignment, rank: int, compute: ComputeTypes | None = None
    ) -> Cuts:
        """Returns what ``rank`` writes of ``operators``, none of it empty: all state, or weights in the types
        ``compute``.

        Of an operator the very same cuts again, but of units that peers share by rows. What other ranks hold costs no
        bytecode, nor do operators that are known, as long as units are assigned as before.
        """
        if compute is not None and compute is not self._compute and compute != self._compute:
            self._light, self._compute = _DescribedCuts(), compute
        catalog, described = self.catalog, self._full if compute is None else self._light
        described.begin(rank, len(self._is_local))
        places = places_of(catalog, operators)
        places = places[self._is_local[places]]
        for at in places[described.cuts[places] < 0].tolist():
            operator = catalog.everything[at]
            writes = assignment.owners.get(operator) == rank
            if (at, writes) not in described.apart:
                described.apart[at, writes] = self._describe(operator, writes, compute)
            described.cuts[at] = described.apart[at, writes]
        others = places[~catalog.is_expert[places]].tolist()
        units = described.cuts_of(unit_shares := assignment.unit_shares(rank))
        for at in filterfalse(units.__contains__, others):
            operator = catalog.everything[at]
            units[at] = [self._unit(operator, share, described, compute) for share in unit_shares.get(operator, ())]
        of_units = np.array(list(chain.from_iterable(map(units.__getitem__, others))), dtype=np.int64)
        return self._filled(np.concatenate([described.cuts[places], of_units]))

    def _filled(self, cuts: Numbers) -> Cuts:
        """Those that are not empty."""
        return Cuts(self._shelf, cuts[self._shelf.bounds(cuts)[:, 1] > 0])

    def _unit(self, operator: str, share: UnitShare, described: _DescribedCuts, compute: ComputeTypes | None) -> int:
        """What is replicated of one unit, as far as it was given to the rank."""
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
        """Returns what ``rank`` writes besides, so that the step after one slot of a sparse window can be computed
        again: weights of ``compute_only`` in the types ``compute``, and state whose home is anchored in another slot.

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
        """Describe an operator. Returns the number of its cut.

        Args:
            share: One unit alone, and what of it; else whether what is replicated is in it beside what is not.
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
        """Those that were given of a tensor with the operator's rows ``span``; None for none."""
        if not tensor.replicated or span != share.span:
            return None
        if share.rows is share.span or has_rows(self.catalog, tensor):
            return share.rows
        return span if share.first else None


class _DescribedCuts:
    """What was described of operators, by the numbers of cuts.

    Attributes:
        apart: By place of the operator, and whether the writer writes what is replicated of it: all but ``units``.
        units: Of operators that are no experts, what is replicated of one unit.
        cuts: Of each place, of ``apart``, what the newest rank writes; -1 where that is not known.
    """

    def __init__(self) -> None:
        self.apart: dict[tuple[int, bool], int] = {}
        self.units: dict[tuple[str, UnitShare], int] = {}
        self.cuts: Numbers = np.zeros(0, dtype=np.int64)
        self._rank: int | None = None
        self._unit_shares: Mapping[str, Sequence[UnitShare]] = {}
        self._cuts_of_units: dict[int, list[int]] = {}

    def begin(self, rank: int, operators: int) -> None:
        """``rank`` is asked about, of a catalog of so many operators."""
        if rank != self._rank:
            self.cuts, self._rank = np.full(operators, -1), rank

    def cuts_of(self, unit_shares: Mapping[str, Sequence[UnitShare]]) -> dict[int, list[int]]:
        """Place of an operator -> the cuts of what was given of its units, as far as known.

        What is no expert is in every plan, and nearly always given as before: by the very same ``unit_shares`` then,
        so that no unit need be looked up.
        """
        if unit_shares is not self._unit_shares:
            self._unit_shares, self._cuts_of_units = unit_shares, {}
        return self._cuts_of_units


class Repeated:
    """Tells which state without rows (Adam's ``step``) is needed besides what is anchored: that of a parameter that is
    anchored in part, whose home may be anchored in another slot. The optimizer needs it from here on."""

    def __init__(self, catalog: Catalog, anchored: Collection[str]) -> None:
        self._catalog, self._anchored = catalog, frozenset(anchored)
        self._in_part: dict[frozenset[str], bool] = {}

    def has(self, parameter: str, home: Operator) -> bool:
        """Returns whether the state of a parameter that is at ``home`` is needed."""
        if home.id in self._anchored:
            return False
        sharing = self._catalog.sharing[parameter]  # a layer's stacks are shared by the same experts
        if sharing not in self._in_part:
            self._in_part[sharing] = not self._anchored.isdisjoint(sharing)
        return self._in_part[sharing]


def _piece(
    operator: str, span: Span, tensor: StateTensor, block: torch.Tensor, prefix: str = "", dtype: str | None = None
) -> SliceSource | None:
    """The part of the span's rows that lies in this rank's ``block``, or None if none does."""
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


@lru_cache(maxsize=_REMEMBERED)
def _entry(
    key: str,
    operator: str,
    dtype: str,
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
    global_shape: tuple[int, ...],
    *,
    on_param_device: bool,
) -> SliceEntry:
    """Entries are values and the same at every step; remembering them also keeps their names and sizes."""
    return SliceEntry(key, operator, dtype, offsets, shape, global_shape, on_param_device=on_param_device)


# --- before training ---

_MOMENTS = 2


class ExpectedShare:
    """This rank's share once its optimizer has state.

    Where the optimizer has none yet, two moments are counted for each weight that it updates (Adam), in the type in
    which it consumes gradients.

    Args:
        tensors: This rank's, as they are now.
        specs: Of all ranks' tensors.
    """

    def __init__(self, tensors: Sequence[StateTensor], specs: Sequence[TensorSpec]) -> None:
        self._tensors = [tensor for tensor in tensors if not tensor.duplicate]
        self._divided = any(not tensor.updated_here for tensor in tensors)  # by a distributed optimizer
        self._moments = self._missing_moments({spec.parameter: spec for spec in specs if is_weight(spec)})
        self.is_estimated = bool(self._moments)
        """Whether such moments are counted."""

    @property
    def most_nbytes(self) -> int:
        """The bytes that this rank holds: its share if it has no peers, and more than that otherwise."""
        return sum(tensor.local.nbytes for tensor in self._tensors) + sum(n for _, n in self._moments)

    def nbytes(self, catalog: Catalog, placement: Placement, rank: int) -> int:
        """Returns the bytes that this rank writes, plain state apart: its own, and its part of what its peers hold as
        well.

        Takes as long as describing a first snapshot.

        Args:
            catalog: Of the model.
            placement: Who holds what.
            rank: This one.
        """
        dealt = Sharder(catalog, placement).assign(catalog.everything, self._tensors)
        cuts = LocalState(catalog, self._tensors).cuts(catalog.everything, dealt, rank)
        written = int(cuts.shelf.table(cuts.slices)[:, NBYTES].sum())
        undivided = sum(tensor.local.nbytes for tensor in self._tensors if not tensor.replicated)
        alike = sum(tensor.local.nbytes for tensor in self._tensors if tensor.replicated)
        moments = sum(n for tensor, n in self._moments if tensor.replicated and not self._divided)
        own_moments = sum(n for _, n in self._moments) - moments
        return written + own_moments + (written - undivided) * moments // max(1, alike)

    def _missing_moments(self, weights: Mapping[str, TensorSpec]) -> list[tuple[StateTensor, int]]:
        """Each block of weights that this rank's optimizer updates, with the bytes of moments that it will make."""
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


def roughly(specs: Iterable[TensorSpec]) -> int:
    """Bytes of a complete checkpoint of all ranks with Adam's moments, and masters where gradients are of another type.

    Args:
        specs: Of all ranks' tensors.
    """
    total = 0
    for spec in specs:
        copies = 0 if spec.gradient is None else _MOMENTS + (spec.gradient != spec.dtype)
        if is_weight(spec):
            total += prod(spec.global_shape) * (itemsize(spec.dtype) + copies * itemsize(spec.gradient or spec.dtype))
    return total
