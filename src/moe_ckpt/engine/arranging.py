"""Where each slice of a snapshot goes in its buffer, remembered for as long as the slices are the same ones.

A dense checkpoint of a model with many experts has tens of thousands of slices, the same at every step; sorting them
anew each time would take the training thread longer than anything else that it does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import is_

from moe_ckpt.core.operators import Catalog
from moe_ckpt.engine.copying import Placed, place
from moe_ckpt.engine.pieces import Piece, shard_kind
from moe_ckpt.engine.snapshot import ALIGNMENT, HELD, ShardPart
from moe_ckpt.format.shard import lay_out


@dataclass(frozen=True)
class _Remembered:
    pieces: tuple[Piece, ...]
    part: ShardPart
    placed: tuple[Placed, ...]


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
        self._last: dict[str, _Remembered] = {}

    def arrange(self, pieces: Sequence[Piece], held: Collection[str] = ()) -> Arrangement:
        by_kind: dict[str, list[Piece]] = {"expert": [], "non_expert": [], HELD: []}
        for piece in pieces:
            operator = piece.entry.operator
            by_kind[HELD if operator in held else self._kinds[operator]].append(piece)
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

    def _part(self, kind: str, pieces: Sequence[Piece], base: int) -> _Remembered:
        last = self._last.get(kind)
        if last is not None and last.part.base == base and _same(last.pieces, pieces):
            return last
        part = ShardPart(kind, lay_out([piece.entry for piece in pieces]), base)
        found = _Remembered(tuple(pieces), part, tuple(place(pieces, part.entries, base)))
        self._last[kind] = found
        return found


def _same(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
