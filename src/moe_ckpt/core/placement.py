"""Decides which rank writes which part of which operator.

Under plain data parallelism all ranks hold the same state, and the slowest rank determines the time of a checkpoint: so
the peak is minimised, the most bytes on one rank. Experts are written by their owners, in contiguous blocks (as expert
parallelism numbers them). All other tensors are dealt out anew for every checkpoint, on top of the expert bytes that
each rank writes (ADPS of MoC, arXiv 2408.04307, section 3.2): the biggest first, each to the rank with the least bytes
so far. A tensor that does not fit is split by rows, which the paper does not do: the embedding of a small model alone
is more than a rank's share. ``benchmarks/moc_sizes`` compares this with the paper's other ways.

Every rank computes the same result from the same plan, so nothing has to be sent. If the framework shards the state
already (FSDP2, ZeRO, expert and pipeline parallelism), its sharding is kept, and the adapter describes it by a
``Placement``.

Legend: R ranks, preload: bytes of experts that a rank writes in this checkpoint.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import itemgetter

from moe_ckpt.core.operators import MoELayer, Span, expert_id


@dataclass(frozen=True)
class Placement:
    """Ranks that hold each operator. Equal on every rank, except ``peers`` and ``expert_peers``.

    Attributes:
        owners: Per MoE layer, the rank that writes each of its experts; if several ranks write parts of an expert, the
            first of them, which represents them all when capacity is counted.
        peers: The ranks that hold all replicated state that this rank holds, itself included, in ascending order.
        stages: Number of ranks of each part of the model that shares no rank with another (pipeline stage).
        stage_of: Operator -> its place in ``stages``; 0 for operators that are not named.
        experts_apart: True if peers hold different experts, and each writes those that it owns (expert parallelism).
        expert_ranks: Number of ranks that divide the bytes of each expert; None if all other tensors are dealt out so
            that the bytes of experts and others together are balanced over the ranks.
        expert_peers: The ranks that hold all experts that this rank holds, itself included; empty if these are its
            ``peers``.
        experts_whole: True if each expert is written by its owner alone, and other tensors are dealt out around that
            (plain data parallelism): no rank writes less than the experts that it owns.
    """

    owners: tuple[tuple[int, ...], ...]
    peers: tuple[int, ...]
    stages: tuple[int, ...]
    stage_of: Mapping[str, int] = field(default_factory=dict)
    experts_apart: bool = False
    expert_ranks: int | None = None
    experts_whole: bool = False
    expert_peers: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks of the run."""
        return sum(self.stages)

    @cached_property
    def owner_of(self) -> Mapping[str, int]:
        """Operator id of an expert -> its owner."""
        return {
            expert_id(layer, expert): rank for layer, row in enumerate(self.owners) for expert, rank in enumerate(row)
        }


@lru_cache(maxsize=64)
def everywhere(layers: tuple[MoELayer, ...], ranks: int) -> Placement:
    """Returns the placement in which each of ``ranks`` ranks holds everything."""
    owners = tuple(
        tuple(expert_owner(expert, layer.experts, ranks) for expert in range(layer.experts)) for layer in layers
    )
    return Placement(owners, tuple(range(ranks)), (ranks,), experts_whole=True)


def expert_owner(expert: int, experts: int, ranks: int) -> int:
    """Returns the rank that owns ``expert`` if ``experts`` are divided among ``ranks`` in contiguous blocks."""
    return expert * ranks // experts


def lends(rank: int, alike: Sequence[int]) -> int | None:
    """Returns the rank whose experts ``rank`` also seals when training stops; None if no other rank has the same ones.

    A survivor does not know which ranks are gone, so the experts of each rank are sealed by one other rank.

    Args:
        rank: The survivor.
        alike: Ranks that hold the same experts, ``rank`` included, ascending.
    """
    if rank not in alike or len(alike) < 2:
        return None
    return alike[(alike.index(rank) + 1) % len(alike)]


def interleaved_order(owners: Sequence[int]) -> tuple[int, ...]:
    """Returns the experts of one layer, one of each owner rank in turn (MoC, section 3.2).

    If each of R ranks owns equally many, position p belongs to the ``p mod R``-th of them, so that any run of
    consecutive positions loads the ranks evenly.

    Args:
        owners: Rank of each expert.
    """
    blocks: dict[int, list[int]] = {rank: [] for rank in sorted(set(owners))}
    for expert, rank in enumerate(owners):
        blocks[rank].append(expert)
    depth = max((len(block) for block in blocks.values()), default=0)
    return tuple(block[i] for i in range(depth) for block in blocks.values() if i < len(block))


GRAIN_BYTES = 1 << 16
"""Tensors up to this size are never split: describing and checksumming a slice costs about as much as copying it."""

Name = tuple[str, Span]
"""(operator, its span of one parameter)."""


@dataclass(frozen=True)
class ShardingUnit:
    """One operator's span of one parameter, rows ``[start, stop)``, with all state that belongs to them.

    Attributes:
        operator: Id of the operator.
        span: Its span of the parameter.
        start: First row.
        stop: Row behind the last.
        row_bytes: Bytes of one row, of the parameter and of all optimizer state that is divided like it.
        whole_bytes: Bytes of the parameter's state without such rows (Adam's step, column factors), which goes with the
            first rows. A unit may have no rows at all: the step of a stack of experts belongs to the layer's gate.
    """

    operator: str
    span: Span
    start: int = 0
    stop: int = 0
    row_bytes: int = 0
    whole_bytes: int = 0

    @cached_property
    def name(self) -> Name:
        return self.operator, self.span

    @cached_property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.row_bytes + self.whole_bytes


@dataclass(frozen=True)
class RowRange:
    """Rows ``[start, stop)`` of a unit, and the rank that writes them. The unit's first part has the state without
    rows."""

    rank: int
    start: int
    stop: int


@lru_cache(maxsize=1 << 16)
def _whole_on(rank: int, start: int, stop: int) -> tuple[RowRange, ...]:
    """Returns the only part of a unit that is not split. Cached, since most units are not."""
    return (RowRange(rank, start, stop),)


Parts = Mapping[Name, tuple[RowRange, ...]]
"""Name of a unit -> its parts in row order, which tile its rows."""


@dataclass(frozen=True)
class Shares:
    """The ranks' shares of one checkpoint.

    Attributes:
        units: Units of the checkpoint.
        dealt: The parts of each unit.
        loads: ``[R]`` bytes that each rank writes, experts included.
    """

    units: tuple[ShardingUnit, ...]
    dealt: tuple[tuple[RowRange, ...], ...]
    loads: tuple[int, ...]

    @cached_property
    def parts(self) -> Parts:
        return {unit.name: parts for unit, parts in zip(self.units, self.dealt, strict=True)}


def in_dealing_order(units: Iterable[ShardingUnit]) -> list[ShardingUnit]:
    """Returns the units, biggest first; equal ones by name, so that the order of ``units`` does not matter."""
    return sorted(units, key=lambda unit: (-unit.nbytes, unit.operator, unit.span.parameter, unit.start))


def shares_adaptive(ordered: Sequence[ShardingUnit], preload: Sequence[int], grain_bytes: int = GRAIN_BYTES) -> Shares:
    """Assigns units so that the bytes of experts and other tensors together are balanced over the ranks.

    Args:
        ordered: The checkpoint's units, from ``in_dealing_order``.
        preload: ``[R]`` bytes of experts that each rank writes.
        grain_bytes: Units up to this size are not split. With the sum of all units none is split, as in the paper.

    Let N be the sum of the units, T that of all bytes, and the level the least whole number with
    ``sum(max(0, level - preload[r])) >= N``: no way of dealing has a peak below it, nor below the biggest preload. Let
    g be the most that is ever given at once although it does not fit below the level: over the units, the greater of
    ``whole_bytes + row_bytes``, of one with rows, and ``min(grain_bytes, nbytes)``. Then

        peak <= max(biggest preload, level + g - 1)
        peak <= max(biggest preload, level, T/R + (1 - 1/R) * g)     (list scheduling with preloads, Graham 1966)

    Everything goes to the rank with the least bytes. While anything is left, that rank is below the level, since with
    all ranks at the level N bytes would have been given. A part that fits ends at most at the level, one that does not
    adds at most g: the first line. Before such a part p, the least rank has at most the mean of all bytes given by
    then, ``(T - p)/R``, and so at most ``(T - p)/R + p`` after it: the second.
    """
    # Each split fills a rank, so there are about R of them, however many units there are.
    level = water_level(preload, sum(unit.nbytes for unit in ordered))
    heap = [(load, rank) for rank, load in enumerate(preload)]
    heapq.heapify(heap)
    assigned: list[tuple[RowRange, ...]] = []
    for unit in ordered:
        remaining = unit.nbytes
        load, rank = heap[0]
        if remaining <= grain_bytes or remaining <= level - load:
            heapq.heapreplace(heap, (load + remaining, rank))
            assigned.append(_whole_on(rank, unit.start, unit.stop))
            continue
        parts, start = [], unit.start
        while True:
            load, rank = heap[0]
            stop, nbytes = unit.stop, remaining
            if remaining > max(grain_bytes, level - load):
                stop, nbytes = _first_rows(unit, start, remaining, level - load)
            parts.append(RowRange(rank, start, stop))
            heapq.heapreplace(heap, (load + nbytes, rank))
            start, remaining = stop, remaining - nbytes
            if stop == unit.stop:
                break
        assigned.append(tuple(parts))
    loads = (load for load, _ in sorted(heap, key=itemgetter(1)))
    return Shares(tuple(ordered), tuple(assigned), tuple(loads))


def water_level(preload: Sequence[int], nbytes: int) -> int:
    """Returns the least whole level to which ranks must be filled so that ``nbytes`` more bytes find room."""
    loaded, below = 0, 0
    levels = sorted(preload)
    for below, at in enumerate(levels, start=1):
        loaded += at
        level = -(-(nbytes + loaded) // below)
        if below == len(levels) or level <= levels[below]:
            return level
    raise ValueError("preload: there must be at least one rank")


def _first_rows(unit: ShardingUnit, start: int, remaining: int, room: int) -> tuple[int, int]:
    """Returns (stop, bytes) of the rows from ``start`` on that fit into ``room``: at least one row, and some bytes."""
    if unit.row_bytes == 0:
        return unit.stop, remaining
    whole = unit.whole_bytes if start == unit.start else 0
    rows = max(1, (room - whole) // unit.row_bytes)
    stop = min(unit.stop, start + rows)
    return stop, (stop - start) * unit.row_bytes + whole
