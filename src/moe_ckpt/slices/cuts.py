"""What a rank writes of one operator, worked out once: plans join cuts, and do not list slices again.

MoC and MoEtion choose other experts at every step, so that most of their plans are new though each operator in them is
known. Whatever takes Python work for a slice is done when its operator is first saved, and kept in the columns of a
shelf: a cut is a range of numbers there. To join cuts into a plan takes array operations. Few objects are kept for a
slice, for the garbage collector looks at each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.core.cover_sum import cover_sum
from moe_ckpt.format import tensor_words
from moe_ckpt.format.dtypes import TORCH_DTYPES, itemsize
from moe_ckpt.format.gathering import Column, Numbers, ranges
from moe_ckpt.format.header_template import HeaderTexts
from moe_ckpt.format.shard import REPLAY, SliceEntry

_GATHERED_AS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Types of which torch gathers small tensors in one loop; elements of others are gathered as bytes."""
_WEIGHT = "model/"

Table: TypeAlias = npt.NDArray[np.int64]
"""``[n, 7]``: a row per slice, with the columns below."""
ORDER, PLACE, NBYTES, MEMORY, ADDRESS, BLOCK, KIND = range(7)
"""Columns. (``ORDER``, ``PLACE``) rises in the order of ``lay_out``: by tensor, and by the place in it. ``MEMORY`` and
``ADDRESS`` are where the live elements lie, ``BLOCK`` tells the tensors apart, ``KIND`` the types on devices and what
lies ``IN_HOST_MEMORY``; it is negative for what must be copied element by element."""
IN_HOST_MEMORY = 0
"""``KIND`` of what is contiguous there, whatever its type."""
_COLUMNS = 7
_OWN, _FROZEN, _REPEATED, _SIDE = range(4)
"""Weights and optimizer state; under ``replay/``, weights and state without rows; tensors of no operator."""
_DTYPE_BITS, _SECTION_BITS = 26, 24
"""Of ``ORDER``, from where on the type and the kind of key are; below it is the key's place."""
_DTYPES = {name: at for at, name in enumerate(sorted(TORCH_DTYPES, key=lambda name: (-itemsize(name), name)))}
_kinds: dict[tuple[torch.dtype, torch.device], int] = {}
"""Of what lies on devices, from 1 on."""


@dataclass(frozen=True, eq=False, slots=True)
class SliceSource:
    """One slice to copy: where it belongs on disk, and the live memory it comes from.

    Attributes:
        source: A view of ``block``, the live tensor, whose version counter tells when either is written to.
    """

    entry: SliceEntry
    source: torch.Tensor
    block: torch.Tensor


class Shelf:
    """The slices that one rank has described, numbered as they were, with all that plans ask of many at once.

    A number stays what it is, and slices are only added, on the training thread: other threads may read meanwhile.

    Attributes:
        entries: Of all slices.
        blocks: The live tensors that they are of; None for side tensors.
        others: Number -> what a tensor gives: of slices on a device their elements in one row, as their type or as
            bytes; of those that must be copied element by element a view of any shape. Not of what is in host memory.
        transient: How many slices only existing plans still use.
    """

    def __init__(self) -> None:
        self.entries: list[SliceEntry] = []
        self.blocks: list[torch.Tensor | None] = []
        self.others: dict[int, torch.Tensor] = {}
        self.transient = 0
        self._table = Column(np.int64, _COLUMNS)
        self._counters = Column(np.int64)
        self._texts = HeaderTexts()
        self._side: dict[SliceEntry, int] = {}

    def add(self, operator: str, pieces: Sequence[SliceSource], places: Mapping[str, int]) -> Cut:
        """Describe what is written of an operator.

        Args:
            places: Of the keys of all tensors, in alphabetical order.
        """
        found, rows = Cut(operator, self, len(self.entries), len(pieces)), []
        for number, piece in enumerate(pieces, found.first):
            lying, other = _lying(piece)
            rows.append((*_placed(piece.entry, places), piece.entry.nbytes, *lying))
            if other is not None:
                self.others[number] = other
        self._table.add(np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS))
        self.blocks += [piece.block for piece in pieces]
        self.entries += [piece.entry for piece in pieces]
        return found

    def let_go(self) -> None:
        """Drops all references to live tensors: nothing more is copied from them."""
        self.blocks.clear()
        self.others.clear()

    def side_numbers(self, entries: Sequence[SliceEntry]) -> Numbers:
        """Numbers of side tensors, whose rows here mean nothing; see ``table_of_side``."""
        for entry in entries:
            if entry not in self._side:
                self._side[entry] = len(self.entries)
                self._table.add(np.zeros((1, _COLUMNS), dtype=np.int64))
                self.blocks.append(None)
                self.entries.append(entry)
                self.transient += 1
        return np.array([self._side[entry] for entry in entries], dtype=np.int64)

    def table(self, numbers: Numbers) -> Table:
        found: Table = self._table.rows[numbers]
        return found

    def counters(self, numbers: Numbers) -> Numbers | None:
        """Addresses of the version counts of slices' tensors, for ``tensor_words``; None if some cannot be read."""
        self._counters.add(tensor_words.counters(self.blocks[len(self._counters) :]))
        found: Numbers = self._counters.rows[numbers]
        return found if found.all() else None

    def texts(self) -> HeaderTexts:
        """Of all slices. On the thread that makes headers, and on it alone."""
        self._texts.add(self.entries[len(self._texts) :])
        return self._texts

    def source(self, number: int) -> torch.Tensor:
        """A view of a slice's live elements, in any shape."""
        found, block = self.others.get(number), self.blocks[number]
        if found is not None or block is None:
            return torch.empty(0) if found is None else found
        address, shape = int(self._table.rows[number, ADDRESS]), self.entries[number].shape
        first = block.storage_offset() + (address - block.data_ptr()) // block.itemsize
        return block.as_strided(shape, torch.empty(shape, device="meta").stride(), first)


@dataclass(frozen=True, eq=False)
class Cut:
    """What one rank writes of one operator: ``count`` slices of ``shelf``, from number ``first`` on."""

    operator: str
    shelf: Shelf
    first: int
    count: int

    @property
    def entries(self) -> list[SliceEntry]:
        return self.shelf.entries[self.first : self.first + self.count]

    @cached_property
    def cover_sum(self) -> int:
        return cover_sum((entry.key, entry.box) for entry in self.entries)

    @cached_property
    def is_replay(self) -> bool:
        """Whether only replay needs it. Such slices are never in one cut with others."""
        return self.shelf.entries[self.first].key.startswith(REPLAY)


def numbers_of(cuts: Sequence[Cut]) -> Numbers:
    """Of their slices, on the shelf that they share."""
    return ranges(*(np.fromiter(map(each, cuts), np.int64, len(cuts)) for each in (_FIRST, _COUNT)))


_FIRST: Callable[[Cut], int] = attrgetter("first")
_COUNT: Callable[[Cut], int] = attrgetter("count")


@dataclass(frozen=True, eq=False)
class Slices:
    """The slices of a part in their order, listed on first use. They hold no live memory.

    Attributes:
        entries: Of a shelf.
        numbers: There.
    """

    entries: list[SliceEntry]
    numbers: Numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def listed(self) -> list[SliceEntry]:
        return list(map(self.entries.__getitem__, self.numbers.tolist()))


def table_of_side(entries: Sequence[SliceEntry]) -> Table:
    """Of tensors that come with each snapshot, and have no memory yet."""
    places = {key: at for at, key in enumerate(sorted({entry.key for entry in entries}))}
    rows = [(*_placed(entry, places), entry.nbytes, 0, 0, 0, -1) for entry in entries]
    return np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS)


def _placed(entry: SliceEntry, places: Mapping[str, int]) -> tuple[int, int]:
    """(``ORDER``, ``PLACE``). ``model/`` and ``optim/`` come before ``replay/``, and that before ``side/``."""
    key = entry.key.removeprefix(REPLAY)
    section = _OWN
    if key != entry.key:
        section = _FROZEN if key.startswith(_WEIGHT) else _REPEATED
    elif not entry.operator:
        section = _SIDE
    at = 0
    for offset, length in zip(entry.offsets, entry.global_shape, strict=True):
        at = at * length + offset
    return _DTYPES[entry.dtype] << _DTYPE_BITS | section << _SECTION_BITS | places.get(key, 0), at


def frozen_nbytes(table: Table) -> int:
    """Bytes of weights that a window anchors later."""
    order = table[:, ORDER] & ((1 << _DTYPE_BITS) - 1)
    return int(table[order >> _SECTION_BITS == _FROZEN, NBYTES].sum())


def sorted_rows(table: Table) -> npt.NDArray[np.int64]:
    """Numbers of the rows in the order of ``lay_out``: by one number for both columns, wherever that fits."""
    order, place = table[:, ORDER], table[:, PLACE]
    bits = int(place.max(initial=0)).bit_length()
    if int(order.max(initial=0)).bit_length() + bits < 64:
        return np.argsort(order << bits | place)
    return np.lexsort((place, order))


def are_distinct(table: Table) -> bool:
    """True if no two slices are the same one; False if some may be."""
    order = (table[:, ORDER] & ((1 << _DTYPE_BITS) - 1)).astype(np.uint64)
    mixed = np.sort(order * np.uint64(0x9E3779B97F4A7C15) + table[:, PLACE].astype(np.uint64))
    return not (mixed[1:] == mixed[:-1]).any()


def _lying(piece: SliceSource) -> tuple[tuple[int, int, int, int], torch.Tensor | None]:
    """(``MEMORY``, ``ADDRESS``, ``BLOCK``, ``KIND``), and see ``Shelf.others``."""
    source, block = piece.source, id(piece.block)
    if not source.is_contiguous() or source.dtype is not TORCH_DTYPES[piece.entry.dtype]:
        return (0, 0, block, -1), source
    if source.device.type == "cpu":
        return (0, source.data_ptr(), block, IN_HOST_MEMORY), None
    # Not a view(-1): a single element counts as contiguous whatever its stride, with which bytes cannot be viewed.
    flat = source.as_strided((source.numel(),), (1,)) if source.numel() else source.new_empty(0)
    flat = flat if flat.dtype in _GATHERED_AS else flat.view(torch.uint8)
    kind = _kinds.setdefault((flat.dtype, flat.device), len(_kinds) + 1)
    return (flat.untyped_storage().data_ptr(), flat.data_ptr(), block, kind), flat
