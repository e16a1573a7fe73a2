"""From a plan to bytes: which rows of which live tensors this rank copies for the planned operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.operators import Catalog, Operator, OperatorKind, Span
from moe_ckpt.format.dtypes import dtype_name
from moe_ckpt.format.shard import REPLAY, SliceEntry
from moe_ckpt.ports import StateTensor, TensorSpec
from moe_ckpt.slices.cuts import Cut, Shelf, SliceSource
from moe_ckpt.slices.shares import ComputeTypes, WriteAssignment, has_rows, holders, is_weight

if TYPE_CHECKING:
    import torch


_REMEMBERED = 1 << 14
"""Slices described once and then looked up: those of operators that peers share by rows are described for each plan."""

_UNKNOWN = Cut("", Shelf(), 0, 0)
_COUNT: Callable[[Cut], int] = attrgetter("count")

Held: TypeAlias = tuple[int, int]
"""Number of a tensor; place of the operator among its ``holders``. Numbers: the garbage collector passes them over."""


class LocalState:
    """This rank's tensors, by operator: describing a snapshot costs as much as it takes, not as all there is.

    Args:
        catalog: Of the model.
        tensors: This rank's.
        source: Another rank, of whose share this is only what this rank's tensors have alike; None for the rank's own.
        alike: What is replicated here is so on ``source``.
    """

    def __init__(
        self, catalog: Catalog, tensors: Sequence[StateTensor], source: int | None = None, *, alike: bool = False
    ) -> None:
        self.catalog = catalog
        self.tensors = tuple(tensors)
        self.held: dict[str, list[Held]] = {}
        """Operator -> its rows of this rank's tensors."""
        self.scattered: list[tuple[Operator, Span, StateTensor]] = []
        """State without rows of parameters that others than its home have a share in, with its home."""
        self._shelf = Shelf()
        self._places = {key: at for at, key in enumerate(sorted(tensor.key for tensor in tensors))}
        self._own: dict[tuple[str, bool | None], Cut] = {}
        self._own_light: dict[tuple[str, bool | None], Cut] = {}
        self._own_scattered: dict[str, Cut] = {}
        self._known: dict[str, Cut] = {}
        self._known_light: dict[str, Cut] = {}
        self._writers: Mapping[str, frozenset[int]] | None = None
        self._rank = -1
        self._compute: ComputeTypes = {}
        # Narrowing a tensor that autograd watches is slow. No other object where it does not: there are thousands.
        local = (tensor.local for tensor in tensors)
        self._blocks = [block.detach() if block.requires_grad else block for block in local]
        for number, tensor in enumerate(tensors):
            home = catalog.home[tensor.parameter]
            shared = any(operator.id != home for operator, _ in catalog.spans_of[tensor.parameter])
            for place, (operator, span) in enumerate(holders(catalog, tensor)):
                if not tensor.duplicate if source is None else (alike and tensor.replicated) or tensor.writer == source:
                    self.held.setdefault(operator.id, []).append((number, place))
                if shared and not is_weight(tensor) and not has_rows(catalog, tensor):
                    self.scattered.append((operator, span, tensor))

    @property
    def is_crowded(self) -> bool:
        """So much was described for one plan alone that it is time to begin anew."""
        return self._shelf.transient > max(_REMEMBERED, len(self._shelf.entries) // 2)

    def cuts(
        self, operators: Collection[str], dealt: WriteAssignment, rank: int, compute: ComputeTypes | None = None
    ) -> list[Cut]:
        """What ``rank`` writes of ``operators``, none of it empty: all state, or weights in the types ``compute``.

        Of an operator the very same cut again, unless peers share in it by rows. As long as the same ranks write what
        is no expert, they are looked up without bytecode for each.
        """
        if compute is not None and compute is not self._compute:
            self._own_light, self._known_light, self._compute = {}, {}, compute
        if rank != self._rank or (dealt.writers is not self._writers and dealt.writers != self._writers):
            self._known, self._known_light, self._writers, self._rank = {}, {}, dealt.writers, rank
        own, known = (self._own, self._known) if compute is None else (self._own_light, self._known_light)
        found = list(map(known.get, operators, repeat(_UNKNOWN)))
        for at, operator in enumerate(operators) if _UNKNOWN in found else ():
            if found[at] is _UNKNOWN:
                whole = dealt.writes_whole(operator, rank)
                found[at] = own.get((operator, whole)) or self._describe(operator, dealt, rank, compute)
                if whole is None:
                    self._shelf.transient += found[at].count
                else:
                    own[operator, whole] = known[operator] = found[at]
        return list(filter(_COUNT, found))

    def scattered_cut(self, home: Operator, span: Span, tensor: StateTensor) -> Cut:
        """State without rows, to be written once more though its home is not."""
        found = self._own_scattered.get(tensor.key)
        if found is None:
            piece = _piece(home.id, span, tensor, tensor.local.detach(), REPLAY)
            found = self._shelf.add(home.id, () if piece is None else (piece,), self._places)
            self._own_scattered[tensor.key] = found
        return found

    def _describe(self, operator: str, dealt: WriteAssignment, rank: int, compute: ComputeTypes | None) -> Cut:
        op, prefix, types = self.catalog.by_id[operator], "" if compute is None else REPLAY, compute or {}
        pieces = []
        for number, place in self.held.get(operator, ()):
            tensor, block = self.tensors[number], self._blocks[number]
            if compute is not None and not is_weight(tensor):
                continue
            _, span = holders(self.catalog, tensor)[place]
            for rows in dealt.rows(op, span, tensor, rank) if tensor.replicated else (span,):
                piece = _piece(operator, rows, tensor, block, prefix, types.get(tensor.parameter, tensor.stored))
                pieces += [] if piece is None else [piece]
        return self._shelf.add(operator, pieces, self._places)


def cut(local: LocalState, operators: Collection[str], dealt: WriteAssignment, rank: int) -> list[Cut]:
    """What ``rank`` writes of ``operators``, none of it empty. Views only; nothing is copied here.

    Args:
        dealt: Who writes what of the tensors that all peers hold, from ``Sharder.deal`` of the same operators and
            tensors.
    """
    return local.cuts(operators, dealt, rank)


def cut_replay(
    local: LocalState,
    anchored: Collection[str],
    frozen: Collection[str],
    dealt: WriteAssignment,
    rank: int,
    compute: ComputeTypes,
) -> list[Cut]:
    """What ``rank`` writes besides, so that the step after one slot of a sparse window can be computed again.

    Args:
        dealt: Of ``anchored`` and ``frozen``.
        compute: Types of the weights of ``frozen``.
    """
    cuts = local.cuts(frozen, dealt, rank, compute)
    counted = _Counted(local.catalog, anchored)
    for operator, span, tensor in local.scattered:
        if tensor.duplicate or not counted.here(tensor.parameter, operator):
            continue
        if rank == 0 or not tensor.replicated:
            cuts += filter(_COUNT, [local.scattered_cut(operator, span, tensor)])
    return cuts


class _Counted:
    """Which state without rows (Adam's ``step``) is needed besides what is anchored: that of a parameter that is
    anchored in part, whose home may be anchored in another slot. The optimizer needs it from here on."""

    def __init__(self, catalog: Catalog, anchored: Collection[str]) -> None:
        self._catalog, self._anchored = catalog, frozenset(anchored)
        self._in_part: dict[frozenset[str], bool] = {}

    def here(self, parameter: str, home: Operator) -> bool:
        """home: of that state."""
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
    name = dtype or dtype_name(local.dtype)
    entry = _entry(
        prefix + tensor.key, operator, name, offsets, tuple(local.shape), tensor.global_shape, tensor.on_param_device
    )
    return SliceSource(entry, local, block)


@lru_cache(maxsize=_REMEMBERED)
def _entry(
    key: str,
    operator: str,
    dtype: str,
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
    global_shape: tuple[int, ...],
    on_param_device: bool,
) -> SliceEntry:
    """Entries are values and the same at every step; remembering them also keeps their names and sizes."""
    return SliceEntry(key, operator, dtype, offsets, shape, global_shape, on_param_device=on_param_device)


def wanted_boxes(catalog: Catalog, operators: Collection[str], specs: Sequence[TensorSpec]) -> dict[str, list[Box]]:
    """What all ranks together must write for ``operators``: the claim that the commit proves."""
    wanted: dict[str, list[Box]] = {}
    for tensor in specs:
        for operator, span in holders(catalog, tensor):
            if operator.id not in operators or prod(tensor.global_shape) == 0:
                continue
            start, stop = span.rows(tensor.global_shape)
            wanted.setdefault(tensor.key, []).append(box_of_rows(start, stop, tensor.global_shape))
    return wanted


def wanted_replay(
    catalog: Catalog, anchored: Collection[str], frozen: Collection[str], specs: Sequence[TensorSpec]
) -> dict[str, list[Box]]:
    """What all ranks together must write for ``cut_replay``."""
    wanted: dict[str, list[Box]] = {}
    counted = _Counted(catalog, anchored)
    for tensor in specs:
        if not prod(tensor.global_shape):
            continue
        weight, rows = is_weight(tensor), has_rows(catalog, tensor)
        for operator, span in holders(catalog, tensor) if weight or not rows else ():
            due = operator.id in frozen if weight else counted.here(tensor.parameter, operator)
            if due:
                start, stop = span.rows(tensor.global_shape)
                wanted.setdefault(REPLAY + tensor.key, []).append(box_of_rows(start, stop, tensor.global_shape))
    return wanted


@lru_cache(maxsize=_REMEMBERED)
def box_of_rows(start: int, stop: int, global_shape: tuple[int, ...]) -> Box:
    """Rows ``[start, stop)`` of a tensor, whole in all other dimensions."""
    rest = global_shape[1:]
    return Box((start, *(0 for _ in rest)), (stop - start, *rest)) if global_shape else Box((), ())


def shard_kind(catalog: Catalog, operator: str) -> str:
    """Which of a rank's two shards holds the operator."""
    kind = catalog.by_id[operator].kind if operator else OperatorKind.NON_EXPERT
    return "expert" if kind is OperatorKind.EXPERT else "non_expert"
