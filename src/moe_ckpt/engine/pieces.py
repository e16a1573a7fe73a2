"""From a plan to bytes: which rows of which live tensors this rank copies for the planned operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import is_
from typing import TYPE_CHECKING, TypeAlias

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.operators import Catalog, Operator, OperatorKind, Span
from moe_ckpt.engine.shares import ComputeTypes, Dealt, has_rows, holders, is_weight
from moe_ckpt.format.dtypes import dtype_name
from moe_ckpt.format.shard import REPLAY, SliceEntry
from moe_ckpt.ports import StateTensor, TensorSpec

if TYPE_CHECKING:
    import torch


_REMEMBERED = 1 << 16
"""Slices described once and then looked up; more than one rank's share of the models of today."""


@dataclass(frozen=True)
class Piece:
    """One slice to copy: where it belongs on disk, and the live memory it comes from (a view)."""

    entry: SliceEntry
    source: torch.Tensor


Held: TypeAlias = "tuple[Span, StateTensor, torch.Tensor]"
"""An operator's rows of a tensor, the tensor, its local block detached from autograd."""


class LocalState:
    """This rank's tensors, by operator: so that describing a snapshot costs as much as it takes, not as all there is.

    Made anew only when the tensors are others than before (``LocalState.of``).
    """

    def __init__(self, catalog: Catalog, tensors: Sequence[StateTensor]) -> None:
        self.catalog = catalog
        self.tensors = tuple(tensors)
        self.held: dict[str, list[Held]] = {}
        self.scattered: list[tuple[Operator, Span, StateTensor]] = []
        """State without rows of parameters that others than its home have a share in, with its home."""
        self._own: dict[str, list[Piece]] = {}
        self._own_light: dict[str, list[Piece]] = {}
        self._compute: ComputeTypes = {}
        for tensor in tensors:
            local = tensor.local.detach()  # once: narrowing a tensor that autograd watches is slow
            home = catalog.home[tensor.parameter]
            shared = any(operator.id != home for operator, _ in catalog.spans_of[tensor.parameter])
            for operator, span in holders(catalog, tensor):
                if not tensor.duplicate:
                    self.held.setdefault(operator.id, []).append((span, tensor, local))
                if shared and not is_weight(tensor) and not has_rows(catalog, tensor):
                    self.scattered.append((operator, span, tensor))

    def of(self, tensors: Sequence[StateTensor]) -> LocalState:
        """The same for ``tensors``; itself, if they are the same ones."""
        same = len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))
        return self if same else LocalState(self.catalog, tensors)

    def pieces(self, operator: str, dealt: Dealt, rank: int) -> Iterable[Piece]:
        """What ``rank`` writes of one operator. The very same pieces again, where peers do not share in it."""
        known = self._own.get(operator)
        return self._describe(self._own, operator, self.held[operator], dealt, rank) if known is None else known

    def light_pieces(self, operator: str, dealt: Dealt, rank: int, compute: ComputeTypes) -> Iterable[Piece]:
        """What ``rank`` writes of one operator's weights, in the types ``compute``; remembered like ``pieces``."""
        if compute is not self._compute:
            self._own_light, self._compute = {}, compute
        known = self._own_light.get(operator)
        if known is not None:
            return known
        weights = [held for held in self.held[operator] if is_weight(held[1])]
        return self._describe(self._own_light, operator, weights, dealt, rank, REPLAY, compute)

    def _describe(
        self,
        kept: dict[str, list[Piece]],
        operator: str,
        held: Sequence[Held],
        dealt: Dealt,
        rank: int,
        prefix: str = "",
        compute: ComputeTypes | None = None,
    ) -> list[Piece]:
        """The pieces of ``held``; in ``kept`` from now on, unless peers share in them, each time otherwise."""
        op, types = self.catalog.by_id[operator], compute or {}
        found = [
            piece
            for span, tensor, block in held
            for rows in (dealt.rows(op, span, tensor, rank) if tensor.replicated else (span,))
            if (piece := _piece(operator, rows, tensor, block, prefix, types.get(tensor.parameter))) is not None
        ]
        if not any(tensor.replicated for _, tensor, _ in held):
            kept[operator] = found
        return found

    def in_order(self, operators: Collection[str]) -> Iterable[str]:
        """Those of ``operators`` that this rank holds anything of, in the same order every time."""
        if len(operators) < len(self.held):
            return sorted(op for op in operators if op in self.held)
        return (op for op in self.held if op in operators)


def cut(local: LocalState, operators: Collection[str], dealt: Dealt, rank: int) -> list[Piece]:
    """The pieces that ``rank`` writes for ``operators``. Views only; nothing is copied here.

    dealt: who writes what of the tensors that all peers hold, from ``Sharder.deal`` of the same operators and tensors.
    """
    return [piece for name in local.in_order(operators) for piece in local.pieces(name, dealt, rank)]


def cut_replay(
    local: LocalState,
    anchored: Collection[str],
    frozen: Collection[str],
    dealt: Dealt,
    rank: int,
    compute: ComputeTypes,
) -> list[Piece]:
    """What ``rank`` writes besides, so that the step after one slot of a sparse window can be computed again.

    dealt: of ``anchored`` and ``frozen``. compute: types of the weights of ``frozen``.
    """
    pieces = [p for name in local.in_order(frozen) for p in local.light_pieces(name, dealt, rank, compute)]
    for operator, span, tensor in local.scattered:
        if not _counted_here(local.catalog, tensor.parameter, operator, anchored) or tensor.duplicate:
            continue
        if rank == 0 or not tensor.replicated:
            piece = _piece(operator.id, span, tensor, tensor.local.detach(), REPLAY)
            if piece is not None:
                pieces.append(piece)
    return pieces


def _counted_here(catalog: Catalog, parameter: str, home: Operator, anchored: Collection[str]) -> bool:
    """Whether state without rows (Adam's ``step``) is needed besides: of a parameter that is anchored in part, whose
    home may be anchored in another slot. The optimizer needs it from here on."""
    parts = catalog.spans_of[parameter]
    return home.id not in anchored and any(op.id in anchored for op, _ in parts)


def _piece(
    operator: str, span: Span, tensor: StateTensor, local: torch.Tensor, prefix: str = "", dtype: str | None = None
) -> Piece | None:
    """The part of the span's rows that lies in this rank's block ``local``, or None if none does."""
    offsets = tensor.offsets
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
    return Piece(entry, local)


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


def wanted_boxes(
    catalog: Catalog, operators: Collection[str], specs: Sequence[TensorSpec]
) -> dict[str, list[Box]]:
    """What all ranks together must write for ``operators``: the claim that the commit proves."""
    wanted: dict[str, list[Box]] = {}
    for tensor in specs:
        for operator, span in holders(catalog, tensor):
            if operator.id not in operators or prod(tensor.global_shape) == 0:
                continue
            start, stop = span.rows(tensor.global_shape)
            wanted.setdefault(tensor.key, []).append(_box(start, stop, tensor.global_shape))
    return wanted


def wanted_replay(
    catalog: Catalog, anchored: Collection[str], frozen: Collection[str], specs: Sequence[TensorSpec]
) -> dict[str, list[Box]]:
    """What all ranks together must write for ``cut_replay``."""
    wanted: dict[str, list[Box]] = {}
    for tensor in specs:
        if not prod(tensor.global_shape):
            continue
        weight, rows = is_weight(tensor), has_rows(catalog, tensor)
        for operator, span in holders(catalog, tensor) if weight or not rows else ():
            due = operator.id in frozen if weight else _counted_here(catalog, tensor.parameter, operator, anchored)
            if due:
                start, stop = span.rows(tensor.global_shape)
                wanted.setdefault(REPLAY + tensor.key, []).append(_box(start, stop, tensor.global_shape))
    return wanted


@lru_cache(maxsize=_REMEMBERED)
def _box(start: int, stop: int, global_shape: tuple[int, ...]) -> Box:
    rest = global_shape[1:]
    return Box((start, *(0 for _ in rest)), (stop - start, *rest)) if global_shape else Box((), ())


def shard_kind(catalog: Catalog, operator: str) -> str:
    """Which of a rank's two shards holds the operator."""
    kind = catalog.by_id[operator].kind if operator else OperatorKind.NON_EXPERT
    return "expert" if kind is OperatorKind.EXPERT else "non_expert"
