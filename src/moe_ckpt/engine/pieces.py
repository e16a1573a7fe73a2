"""From a plan to bytes: which rows of which live tensors this rank copies for the planned operators."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.operators import Catalog, Operator, OperatorKind, Span
from moe_ckpt.engine.shares import ComputeTypes, Dealt, has_rows, holders, is_weight
from moe_ckpt.format.dtypes import dtype_name
from moe_ckpt.format.shard import REPLAY, SliceEntry
from moe_ckpt.ports import StateTensor

if TYPE_CHECKING:
    import torch


_REMEMBERED = 1 << 16
"""Slices described once and then looked up; more than one rank's share of the models of today."""


@dataclass(frozen=True)
class Piece:
    """One slice to copy: where it belongs on disk, and the live memory it comes from (a view)."""

    entry: SliceEntry
    source: torch.Tensor


def cut(
    catalog: Catalog,
    operators: Collection[str],
    tensors: Sequence[StateTensor],
    dealt: Dealt,
    rank: int,
) -> list[Piece]:
    """The pieces that ``rank`` writes for ``operators``. Views only; nothing is copied here.

    dealt: who writes what of the tensors that all ranks hold, from ``Sharder.deal`` of the same operators and tensors.
    """
    pieces: list[Piece] = []
    for tensor in tensors:
        if tensor.duplicate:
            continue
        local = tensor.local.detach()  # once: narrowing a tensor that autograd watches is slow
        for operator, span in holders(catalog, tensor):
            if operator.id not in operators:
                continue
            mine = dealt.rows(operator, span, tensor, rank) if tensor.replicated else (span,)
            for rows in mine:
                piece = _piece(operator.id, rows, tensor, local)
                if piece is not None:
                    pieces.append(piece)
    return pieces


def cut_replay(
    catalog: Catalog,
    anchored: Collection[str],
    frozen: Collection[str],
    tensors: Sequence[StateTensor],
    dealt: Dealt,
    rank: int,
    compute: ComputeTypes,
) -> list[Piece]:
    """What ``rank`` writes besides, so that the step after one slot of a sparse window can be computed again.

    dealt: of ``anchored`` and ``frozen``. compute: types of the weights of ``frozen``.
    """
    pieces: list[Piece] = []
    for operator, span, tensor in _replayed(catalog, anchored, frozen, tensors):
        if tensor.duplicate:
            continue
        if not has_rows(catalog, tensor):
            mine: Sequence[Span] = (span,) if rank == 0 or not tensor.replicated else ()
        else:
            mine = dealt.rows(operator, span, tensor, rank) if tensor.replicated else (span,)
        for rows in mine:
            local = tensor.local.detach()
            dtype = compute.get(tensor.parameter) if is_weight(tensor) else None
            piece = _piece(operator.id, rows, tensor, local, REPLAY, dtype)
            if piece is not None:
                pieces.append(piece)
    return pieces


def _replayed(
    catalog: Catalog, anchored: Collection[str], frozen: Collection[str], tensors: Sequence[StateTensor]
) -> Iterator[tuple[Operator, Span, StateTensor]]:
    """Weights of the frozen operators, and the state without rows (Adam's ``step``) of parameters that are anchored in
    part: its home may be anchored in another slot, but the optimizer needs it from here on."""
    for tensor in tensors:
        if is_weight(tensor):
            yield from ((op, span, tensor) for op, span in holders(catalog, tensor) if op.id in frozen)
        elif not has_rows(catalog, tensor):
            [(home, span)] = holders(catalog, tensor)
            parts = catalog.spans_of[tensor.parameter]
            if home.id not in anchored and any(op.id in anchored for op, _ in parts):
                yield home, span, tensor


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
    catalog: Catalog, operators: Collection[str], tensors: Sequence[StateTensor]
) -> dict[str, list[Box]]:
    """What all ranks together must write for ``operators``: the claim that the commit proves."""
    wanted: dict[str, list[Box]] = {}
    for tensor in tensors:
        for operator, span in holders(catalog, tensor):
            if operator.id not in operators or prod(tensor.global_shape) == 0:
                continue
            start, stop = span.rows(tensor.global_shape)
            wanted.setdefault(tensor.key, []).append(_box(start, stop, tensor.global_shape))
    return wanted


def wanted_replay(
    catalog: Catalog, anchored: Collection[str], frozen: Collection[str], tensors: Sequence[StateTensor]
) -> dict[str, list[Box]]:
    """What all ranks together must write for ``cut_replay``."""
    wanted: dict[str, list[Box]] = {}
    for _, span, tensor in _replayed(catalog, anchored, frozen, tensors):
        if prod(tensor.global_shape):
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
