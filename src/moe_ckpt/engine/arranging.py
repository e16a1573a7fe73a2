"""Where each slice of a snapshot goes in its buffer, remembered for as long as the slices are the same ones.

A dense checkpoint of a model with many experts has tens of thousands of slices, the same at every step; sorting them
anew each time would take the training thread longer than anything else that it does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, is_

from moe_ckpt.core.operators import Catalog
from moe_ckpt.engine.copying import Placed, place
from moe_ckpt.engine.pieces import Piece, shard_kind
from moe_ckpt.engine.snapshot import ALIGNMENT, HELD, ShardPart
from moe_ckpt.format.shard import lay_out

_KEPT = 8
"""Arrangements remembered per shard: those of a sparse window's slots come back in every window."""


@dataclass(frozen=True)
class _Remembered:
    pieces: tuple[Piece, ...]
    part: ShardPart
    placed: tuple[Placed, ...]


@dataclass(frozen=True)
class _Grouped:
    """pieces, by the part of the buffer that they belong to."""

    pieces: tuple[Piece, ...]
    held: frozenset[str]
    by_kind: dict[str, list[Piece]]


_NOTHING = _Grouped((), frozenset(), {"expert": [], "non_expert": [], HELD: []})


@dataclass(frozen=True)
class Arrangement:
    """parts: of the buffer, which together need ``nbytes``. placed: what is copied where."""

    parts: tuple[ShardPart, ...]
    placed: list[Placed]
    nbytes: int


class Arranger:
    """Lays pieces out as this rank's expert and non-expert shard, and those of held operators behind them."""

    def __init__(self, catalog: Catalog) -> None:
        self._kinds = {op: shard_kind(catalog, op) for op in (*catalog.by_id, "")}
        self._known: dict[str, list[_Remembered]] = {}
        self._grouped = _NOTHING

    def arrange(
        self, pieces: Sequence[Piece], held: Collection[str] = (), side: Sequence[Piece] = ()
    ) -> Arrangement:
        """pieces: of operators. held: operators whose pieces go into no shard. side: tensors of no operator."""
        grouped = self._grouped
        if not _same(grouped.pieces, pieces) or grouped.held != frozenset(held):
            grouped = self._grouped = self._group(pieces, frozenset(held))
        by_kind = grouped.by_kind | {"non_expert": [*grouped.by_kind["non_expert"], *side]}
        parts: list[ShardPart] = []
        placed: list[Placed] = []
        base = nbytes = 0
        for kind, those in by_kind.items():
            if those:
                found = self._part(kind, those, base)
                parts.append(found.part)
                placed += found.placed
                nbytes = base + found.part.nbytes
                base += -(-found.part.nbytes // ALIGNMENT) * ALIGNMENT
        return Arrangement(tuple(parts), placed, nbytes)

    def _group(self, pieces: Sequence[Piece], held: frozenset[str]) -> _Grouped:
        by_kind: dict[str, list[Piece]] = {"expert": [], "non_expert": [], HELD: []}
        for operator, run in groupby(pieces, key=attrgetter("entry.operator")):
            by_kind[HELD if operator in held else self._kinds[operator]].extend(run)
        return _Grouped(tuple(pieces), held, by_kind)

    def _part(self, kind: str, pieces: Sequence[Piece], base: int) -> _Remembered:
        known = self._known.setdefault(kind, [])
        for at, found in enumerate(known):
            if found.part.base == base and _same(found.pieces, pieces):
                known.insert(0, known.pop(at))
                return found
        part = ShardPart(kind, lay_out([piece.entry for piece in pieces]), base)
        found = _Remembered(tuple(pieces), part, tuple(place(pieces, part.entries, base)))
        if pieces[-1].entry.operator:  # side tensors are others every time
            known[:] = [found, *known[: _KEPT - 1]]
        return found

    def forget(self) -> None:
        """The live tensors are others from now on: let go of those before."""
        self._known.clear()
        self._grouped = _NOTHING


def _same(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
