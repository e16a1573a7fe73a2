"""The slices that a rank writes of one operator, described once: plans join cuts, and do not list slices again.

MoC and MoEtion choose other experts at every step, so that most of their plans are new, although each of their
operators was saved before. All Python work for a slice is done when its operator is first saved, and the result is in
the columns of a shelf: a cut is a range of numbers there, and array operations join cuts into a plan. There are few
objects for a slice, since the garbage collector visits each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.format.shard import REPLAY, TORCH_DTYPES, SliceEntry, itemsize
from moe_ckpt.ledger.coverage import cover_sum

Numbers = npt.NDArray[np.int64]


class Column:
    """An array that grows at its end. Other threads may read the rows that were there before.

    Args:
        dtype: Of its elements.
        width: Shape of a row.
    """

    def __init__(self, dtype: npt.DTypeLike, *width: int) -> None:
        self._storage: npt.NDArray[Any] = np.empty((0, *width), dtype=dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> npt.NDArray[Any]:
        return self._storage[: self._count]

    def add(self, rows: npt.NDArray[Any]) -> None:
        count = self._count + len(rows)
        if count > len(self._storage):
            grown = np.empty((max(count, 2 * len(self._storage)), *self._storage.shape[1:]), dtype=self._storage.dtype)
            grown[: self._count] = self.rows
            self._storage = grown
        self._storage[self._count : count] = rows
        self._count = count


def ranges(firsts: Numbers, counts: Numbers) -> Numbers:
    """Returns ``counts[i]`` numbers from each ``firsts[i]`` on, one range after the other."""
    ends = np.cumsum(counts)
    numbers: Numbers = np.repeat(firsts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
    return numbers


def ascending(numbers: Numbers, end: int) -> Numbers:
    """Returns each of ``numbers`` once, in order. All are from 0 to below ``end``, which is not much larger."""
    is_numbered = np.zeros(end, dtype=bool)
    is_numbered[numbers] = True
    return np.flatnonzero(is_numbered)


_GATHERED_AS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Types whose small tensors torch gathers in one loop; those of other types are gathered as bytes."""
_WEIGHT = "model/"

Table: TypeAlias = npt.NDArray[np.int64]
"""``[n, 7]``: a row per slice, with the columns below."""
ORDER, POSITION, NBYTES, MEMORY, ADDRESS, BLOCK, KIND = range(7)
"""Columns. (``ORDER``, ``POSITION``) rises in the order of ``lay_out``: by tensor, and by the position in it.
``MEMORY`` and ``ADDRESS`` are where the live elements lie, ``BLOCK`` is the number of the live tensor on the shelf,
``KIND`` tells type and device; it is negative for what must be copied element by element."""
_COLUMNS = 7
_STATE, _FROZEN, _REPEATED, _SIDE = range(4)
"""Weights and optimizer state; under ``replay/``, weights and state without rows; tensors of no operator."""
_DTYPE_BITS, _SECTION_BITS = 26, 24
"""First bits in ``ORDER`` of the type and of the kind of key; the lowest bits are the key's number."""
_DTYPES = {name: at for at, name in enumerate(sorted(TORCH_DTYPES, key=lambda name: (-itemsize(name), name)))}
_kinds: dict[tuple[torch.dtype, torch.device], int] = {}
"""(type, device) -> ``KIND``."""


@dataclass(frozen=True, eq=False, slots=True)
class SliceSource:
    """One slice to copy: its entry, and its live memory.

    Attributes:
        source: A view of ``block``, the live tensor, whose version counter tells when either is written to.
    """

    entry: SliceEntry
    source: torch.Tensor
    block: torch.Tensor


class Shelf:
    """The slices that one rank has described, by number, with columns of facts that plans need of many at once.

    Slices are only added, on the training thread, and keep their numbers, so that other threads may read.

    Attributes:
        cuts: By number.
        entries: Of all slices.
        blocks: The live tensors of the slices, each once.
        sources: Number of a slice -> its elements in one dimension, in their type or as bytes; for a slice that must be
            copied element by element a view of any shape.
        transient: How many slices serve existing plans only.
    """

    def __init__(self) -> None:
        self.cuts: list[Cut] = []
        self.entries: list[SliceEntry] = []
        self.blocks: list[torch.Tensor] = []
        self.sources: dict[int, torch.Tensor] = {}
        self.transient = 0
        self._bounds = Column(np.int64, 3)
        self._table = Column(np.int64, _COLUMNS)
        self._numbers: dict[int, int] = {}
        self._side: dict[SliceEntry, int] = {}

    def add(self, operator: str, pieces: Sequence[SliceSource], places: Mapping[str, int], at: int = -1) -> int:
        """Adds the slices of an operator as a cut. Returns the number of the cut.

        Args:
            operator: Id of the operator.
            pieces: Its slices.
            places: Key of each tensor -> its number in alphabetical order.
            at: Number of the operator in the catalog.
        """
        first, rows = len(self.entries), []
        for number, piece in enumerate(pieces, first):
            memory, address, kind, self.sources[number] = _described(piece)
            block = self._numbers.setdefault(id(piece.block), len(self.blocks))
            if block == len(self.blocks):
                self.blocks.append(piece.block)
            rows.append((*_placed(piece.entry, places), piece.entry.nbytes, memory, address, block, kind))
        self._table.add(np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS))
        self.entries += [piece.entry for piece in pieces]
        self.cuts.append(Cut(operator, self.entries, first, len(pieces)))
        self._bounds.add(np.array([[first, len(pieces), at]], dtype=np.int64))
        return len(self.cuts) - 1

    def bounds(self, cuts: Numbers) -> Numbers:
        """Returns ``[n, 3]``: first slice of each cut, number of its slices, and its operator's number in the
        catalog."""
        bounds: Numbers = self._bounds.rows.take(cuts, axis=0)
        return bounds

    def release(self) -> None:
        """Drops all references to live tensors, once nothing more is copied from them."""
        self.blocks.clear()
        self._numbers.clear()
        self.sources.clear()

    def side_numbers(self, entries: Sequence[SliceEntry]) -> Numbers:
        """Returns the numbers of side tensors, which are added if need be; their rows are in ``table_of_side``."""
        for entry in entries:
            if entry not in self._side:
                self._side[entry] = len(self.entries)
                self._table.add(np.zeros((1, _COLUMNS), dtype=np.int64))
                self.entries.append(entry)
                self.transient += 1
        return np.array([self._side[entry] for entry in entries], dtype=np.int64)

    def table(self, numbers: Numbers) -> Table:
        rows: Table = self._table.rows.take(numbers, axis=0)
        return rows

    def source(self, number: int) -> torch.Tensor:
        """Returns a view of a slice's live elements in its shape."""
        source, entry = self.sources[number], self.entries[number]
        if self._table.rows[number, KIND] < 0:
            return source
        return source.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


@dataclass(frozen=True, eq=False)
class Cut:
    """The slices that one rank writes of one operator: ``count`` slices of a shelf, from number ``first`` on.

    There is one object as long as the shelf is used, with cached properties. It has no reference to the shelf, which
    would keep live tensors.
    """

    operator: str
    shelved: list[SliceEntry]
    first: int
    count: int

    @property
    def entries(self) -> list[SliceEntry]:
        return self.shelved[self.first : self.first + self.count]

    @cached_property
    def cover_sum(self) -> int:
        return cover_sum((entry.key, entry.box) for entry in self.entries)


@dataclass(frozen=True, eq=False)
class Cuts:
    """The cuts that one rank writes of some operators, by number, so that joining them takes no bytecode for each.

    Attributes:
        shelf: Of the cuts.
        numbers: Of the cuts on the shelf.
    """

    shelf: Shelf
    numbers: Numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def listed(self) -> list[Cut]:
        return list(map(self.shelf.cuts.__getitem__, self.numbers.tolist()))

    @property
    def slices(self) -> Numbers:
        """Numbers of the slices on the shelf."""
        firsts, counts, _ = self.shelf.bounds(self.numbers).T
        return ranges(firsts, counts)

    @property
    def places(self) -> Numbers:
        """Numbers of the operators in the catalog."""
        places: Numbers = self.shelf.bounds(self.numbers)[:, 2]
        return places

    def masked(self, chosen: npt.NDArray[np.bool_]) -> Cuts:
        """Returns the ``chosen`` cuts."""
        return Cuts(self.shelf, self.numbers[chosen])

    def joined(self, others: Cuts) -> Cuts:
        """Returns the cuts with others of the same shelf."""
        return Cuts(self.shelf, np.concatenate([self.numbers, others.numbers]))

    def same(self, others: Cuts) -> bool:
        """Returns whether ``others`` are the same cuts of the same shelf."""
        return self.shelf is others.shelf and np.array_equal(self.numbers, others.numbers)


def no_cuts() -> Cuts:
    """Returns no cuts, with a shelf for side tensors alone."""
    return Cuts(Shelf(), np.zeros(0, dtype=np.int64))


def table_of_side(entries: Sequence[SliceEntry]) -> Table:
    """Returns the table of side tensors, which have no live memory."""
    places = {key: at for at, key in enumerate(sorted({entry.key for entry in entries}))}
    rows = [(*_placed(entry, places), entry.nbytes, 0, 0, 0, -1) for entry in entries]
    return np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS)


def _placed(entry: SliceEntry, places: Mapping[str, int]) -> tuple[int, int]:
    """(``ORDER``, ``POSITION``). ``model/`` and ``optim/`` come before ``replay/``, and that before ``side/``."""
    key = entry.key.removeprefix(REPLAY)
    section = _STATE
    if key != entry.key:
        section = _FROZEN if key.startswith(_WEIGHT) else _REPEATED
    elif not entry.operator:
        section = _SIDE
    at = 0
    for offset, length in zip(entry.offsets, entry.global_shape, strict=True):
        at = at * length + offset
    return _DTYPES[entry.dtype] << _DTYPE_BITS | section << _SECTION_BITS | places.get(key, 0), at


def stretches(table: Table) -> list[tuple[str, int, int]]:
    """Returns (type, first slice, the one after the last) for each type, in the order of ``lay_out``, without side
    tensors."""
    types, sides = table[:, ORDER] >> _DTYPE_BITS, (table[:, ORDER] >> _SECTION_BITS & 3) == _SIDE
    ranges_of, names = [], list(_DTYPES)
    for number in np.unique(types).tolist():
        first, stop = np.searchsorted(types, [number, number + 1]).tolist()
        ranges_of.append((names[number], first, stop - int(sides[first:stop].sum())))
    return ranges_of


def frozen_nbytes(table: Table) -> int:
    """Returns the bytes of weights that a window anchors later."""
    order = table[:, ORDER] & ((1 << _DTYPE_BITS) - 1)
    return int(table[order >> _SECTION_BITS == _FROZEN, NBYTES].sum())


def sorted_rows(table: Table) -> npt.NDArray[np.int64]:
    """Returns the numbers of the rows in the order of ``lay_out``. Both columns become one number if that fits."""
    order, position = table[:, ORDER], table[:, POSITION]
    bits = int(position.max(initial=0)).bit_length()
    if int(order.max(initial=0)).bit_length() + bits < 64:
        return np.argsort(order << bits | position)
    return np.lexsort((position, order))


def are_distinct(table: Table) -> bool:
    """Returns True if all slices are different; False if two may be the same."""
    order = (table[:, ORDER] & ((1 << _DTYPE_BITS) - 1)).astype(np.uint64)
    mixed = np.sort(order * np.uint64(0x9E3779B97F4A7C15) + table[:, POSITION].astype(np.uint64))
    return not (mixed[1:] == mixed[:-1]).any()


def on_cuda(table: Table, shelf: Shelf) -> bool:
    """Returns whether any of the slices lies on a GPU."""
    kinds = np.bincount(table[:, KIND] + 1).nonzero()[0] - 1
    if any(device.type == "cuda" for (_, device), kind in _kinds.items() if kind in kinds):
        return True
    apart = table[table[:, KIND] < 0, BLOCK].tolist()
    return any(shelf.blocks[at].is_cuda for at in apart)


def _described(piece: SliceSource) -> tuple[int, int, int, torch.Tensor]:
    """Returns (``MEMORY``, ``ADDRESS``, ``KIND``, see ``Shelf.sources``)."""
    source = piece.source
    if not source.is_contiguous() or source.dtype is not TORCH_DTYPES[piece.entry.dtype]:
        return 0, 0, -1, source
    # Not a view(-1): a single element counts as contiguous whatever its stride, with which bytes cannot be viewed.
    flat = source.as_strided((source.numel(),), (1,)) if source.numel() else source.new_empty(0)
    flat = flat if flat.dtype in _GATHERED_AS else flat.view(torch.uint8)
    kind = _kinds.setdefault((flat.dtype, flat.device), len(_kinds))
    return flat.untyped_storage().data_ptr(), flat.data_ptr(), kind, flat
