"""Decides which rank reads the bytes of a checkpoint that several ranks need, and how they get to the others. Pure.

Ranks that hold the same tensors (under data parallelism all ranks, under Megatron those that share weights or experts)
need the same bytes. From storage, one of them reads a slice and passes it on; from another node's memory, the holder
sends it. Bytes go to every other node once, since the network between nodes is the slowest link; inside of a node they
go from memory to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TEAM = 1024
"""The most ranks that divide the reading. With more, messages are so small that it is quicker if each team reads."""

Flags = npt.NDArray[np.bool_]


class Group(NamedTuple):
    """Slices that the same ranks need.

    Attributes:
        ranks: Ascending; at most ``TEAM``, so that several groups may need the same slices.
        slices: Numbers of the slices, ascending.
    """

    ranks: tuple[int, ...]
    slices: tuple[int, ...]


Hop = tuple[int, int]
"""(sender, receiver)."""


class Route(NamedTuple):
    """The way of some bytes to the ranks that need them: once to every other node.

    Attributes:
        from_source: Hops from the rank that has the bytes, to the ranks of its node and to one rank of each other node.
        onward: The hops after those, from that one rank of a node to the others.
    """

    from_source: tuple[Hop, ...]
    onward: tuple[Hop, ...]


def route_of(
    source: int, ranks: Iterable[int], nodes: Sequence[str], choose_relay: Callable[[list[int]], int]
) -> Route:
    """Returns the route of bytes from ``source`` to the others of ``ranks``. The same on every rank.

    Args:
        source: The rank that has the bytes, or reads them.
        ranks: The ranks that need them.
        nodes: The node of each rank of the run.
        choose_relay: Chooses, of the ranks of one node that need the bytes, the one that gets them from ``source``.
    """
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        if rank != source:
            by_node.setdefault(nodes[rank], []).append(rank)
    near = by_node.pop(nodes[source], [])
    relays = {node: choose_relay(members) for node, members in by_node.items()}
    onward = ((relays[node], rank) for node, members in by_node.items() for rank in members if rank != relays[node])
    return Route(tuple((source, rank) for rank in (*near, *relays.values())), tuple(onward))


def anything_shared(needs: Sequence[Flags]) -> bool:
    """Returns whether two ranks need the same slice.

    Args:
        needs: For each rank ``[slices]``, whether it needs each slice.
    """
    seen = np.zeros_like(needs[0])
    for flags in needs:
        if (seen & flags).any():
            return True
        seen |= flags
    return False


def groups_of(rank: int, needs: Sequence[Flags]) -> list[Group]:
    """Returns the groups, of two or more ranks, that ``rank`` is in, in an order that is the same on every rank.

    Args:
        rank: The rank.
        needs: For each rank ``[slices]``, whether it needs each slice.
    """
    # First ranks with equal needs are joined, then slices that equal sets of ranks need.
    mine = np.flatnonzero(needs[rank])
    alike: dict[bytes, list[int]] = {}
    for other, flags in enumerate(needs):
        among = flags[mine]
        if among.any():
            alike.setdefault(np.packbits(among).tobytes(), []).append(other)
    if not len(mine):
        return []
    ranks_of = list(alike.values())
    rows = np.stack([needs[ranks[0]][mine] for ranks in ranks_of])
    columns: dict[bytes, list[int]] = {}
    for number, column in zip(mine.tolist(), np.packbits(rows, axis=0).T, strict=True):
        columns.setdefault(column.tobytes(), []).append(number)
    groups = []
    for numbers in columns.values():
        at = int(np.searchsorted(mine, numbers[0]))
        ranks = sorted(other for row, members in zip(rows, ranks_of, strict=True) if row[at] for other in members)
        begin = ranks.index(rank) // TEAM * TEAM
        team = tuple(ranks[begin : begin + TEAM])
        if len(team) > 1:
            groups.append(Group(team, tuple(numbers)))
    return sorted(groups, key=lambda group: group.slices)


def readers_of(sizes: Sequence[int], ranks: Sequence[int], most_nbytes: int) -> list[int]:
    """Returns the rank that reads each slice. Ranks read about equally many bytes, and neighbouring slices together.

    Args:
        sizes: Bytes of each slice, in order.
        ranks: The ranks that need them.
        most_nbytes: How many bytes are handed over at once.
    """
    loads = dict.fromkeys(ranks, 0)
    readers: list[int] = []
    for first, end in _bounded(sizes, most_nbytes):
        portion = -(-sum(sizes[first:end]) // len(ranks))
        reader, taken = _least(loads), 0
        for size in sizes[first:end]:
            if taken and 2 * taken + size > 2 * portion:  # nearer to the portion without it
                reader, taken = _least(loads), 0
            readers.append(reader)
            loads[reader] += size
            taken += size
    return readers


Chunk = tuple[int, list[int]]
"""(reader, numbers of slices that follow one another, and that it reads)."""


def rounds_of(sizes: Sequence[int], readers: Sequence[int], most_nbytes: int) -> list[list[Chunk]]:
    """Returns the rounds of a handover, each in chunks of one reader.

    Args:
        sizes: Bytes of each slice, in order.
        readers: The rank that reads each slice.
        most_nbytes: The most bytes of a round, unless one slice is larger.
    """
    return [
        [(reader, list(numbers)) for reader, numbers in groupby(range(first, end), readers.__getitem__)]
        for first, end in _bounded(sizes, most_nbytes)
    ]


def _least(loads: Mapping[int, int]) -> int:
    return min(loads, key=lambda rank: (loads[rank], rank))


def _bounded(sizes: Sequence[int], most_nbytes: int) -> list[tuple[int, int]]:
    """Returns (first, end) of runs of slices, each of at most so many bytes or of one slice."""
    runs = []
    first = nbytes = 0
    for at, size in enumerate(sizes):
        if at > first and nbytes + size > most_nbytes:
            runs.append((first, at))
            first, nbytes = at, 0
        nbytes += size
    if first < len(sizes):
        runs.append((first, len(sizes)))
    return runs


# --- memory of other nodes ---


class SlotSpan(NamedTuple):
    """Bytes of a slot on another node.

    Attributes:
        holder: The rank that has the slot.
        path: Of the file that the slot's part is read as; the same on every rank.
        begin, end: First byte, and first byte behind the span, counted from the end of the file's header.
    """

    holder: int
    path: str
    begin: int
    end: int


def routes_of(nodes: Sequence[str], spans_of: Mapping[int, Sequence[SlotSpan]]) -> list[tuple[SlotSpan, Route]]:
    """Divides what ranks need of other nodes' memory into spans that the same ranks need, each with its route.

    Of the ranks of a node, the one that has received least so far gets a span from the holder. The same on every rank.

    Args:
        nodes: The node of each rank.
        spans_of: Rank -> what it needs; no byte twice.
    """
    asking: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
    for rank, requests in sorted(spans_of.items()):
        for request in requests:
            asking.setdefault((request.holder, request.path), []).append((request.begin, request.end, rank))
    received = dict.fromkeys(spans_of, 0)

    def least(members: list[int]) -> int:
        return min(members, key=lambda rank: (received[rank], rank))

    routes = []
    for (holder, path), spans in sorted(asking.items()):
        for begin, end, ranks in _divided(spans):
            route = route_of(holder, ranks, nodes, least)
            for _, rank in route.from_source:
                received[rank] += end - begin
            routes.append((SlotSpan(holder, path, begin, end), route))
    return routes


def _divided(requests: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, list[int]]]:
    """Divides (begin, end, rank) into (begin, end, ranks that need all of it), in order and without an overlap."""
    turns = [(begin, True, rank) for begin, _, rank in requests]
    turns += [(end, False, rank) for _, end, rank in requests]
    disjoint = []
    active: set[int] = set()
    before = 0
    for at, begins, rank in sorted(turns):
        if active and at > before:
            disjoint.append((before, at, sorted(active)))
        (active.add if begins else active.discard)(rank)
        before = at
    return disjoint
