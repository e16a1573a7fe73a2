"""Which of the ranks that need the same slices of a checkpoint reads each of them, and who hands it on.

Pure. Ranks that hold the same (all under data parallelism; under Megatron those that share weights or experts) need
the same bytes of storage. Each slice is read by one of them, and goes to every other node once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TEAM = 1024
"""Most ranks that divide the reading. More would send one another messages so small that reading is quicker."""

Flags = npt.NDArray[np.bool_]


class Group(NamedTuple):
    """Slices that exactly these ranks need.

    Attributes:
        ranks: Ascending; at most ``TEAM``, so that several groups may need the same slices.
        slices: Their numbers, ascending.
    """

    ranks: tuple[int, ...]
    slices: tuple[int, ...]


class Chunk(NamedTuple):
    """Slices that follow one another, and that one rank reads.

    Attributes:
        reader: The rank.
        first, end: Of the slices.
    """

    reader: int
    first: int
    end: int


class Paths:
    """Routes of chunks from their readers to the other ranks of a group: once to every other node.

    Args:
        ranks: Of the group.
        nodes: Per rank of the run its node.
    """

    def __init__(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._by_node: dict[str, list[int]] = {}
        for rank in ranks:
            self._by_node.setdefault(nodes[rank], []).append(rank)

    @property
    def is_one_node(self) -> bool:
        """True if readers send to every rank, and no rank hands a chunk on."""
        return len(self._by_node) == 1

    def source(self, chunk: Chunk, rank: int) -> int:
        """From whom a rank that is not the reader gets a chunk."""
        relay = self._relay(chunk, self._nodes[rank])
        return chunk.reader if rank == relay or self._nodes[rank] == self._nodes[chunk.reader] else relay

    def from_reader(self, chunk: Chunk) -> list[int]:
        """Returns the ranks that get a chunk from its reader: the others of its node, and one of every other node."""
        receivers = []
        for node, ranks in self._by_node.items():
            near = node == self._nodes[chunk.reader]
            receivers += [rank for rank in ranks if rank != chunk.reader] if near else [self._relay(chunk, node)]
        return receivers

    def onward(self, chunk: Chunk, rank: int) -> list[int]:
        """Returns the ranks that get a chunk from a rank that is not its reader."""
        node = self._nodes[rank]
        if node == self._nodes[chunk.reader] or rank != self._relay(chunk, node):
            return []
        return [other for other in self._by_node[node] if other != rank]

    def _relay(self, chunk: Chunk, node: str) -> int:
        """The rank of a node that gets it from the reader, if that is on another."""
        ranks = self._by_node[node]
        return ranks[chunk.first % len(ranks)]


def anything_shared(needs: Sequence[Flags]) -> bool:
    """Returns whether two ranks need the same slice.

    Args:
        needs: Per rank ``[slices]``, whether it needs each.
    """
    seen = np.zeros_like(needs[0])
    for flags in needs:
        if (seen & flags).any():
            return True
        seen |= flags
    return False


def groups_of(rank: int, needs: Sequence[Flags]) -> list[Group]:
    """The groups of several ranks that ``rank`` is in, in an order that is the same on every rank.

    Args:
        rank: Whose.
        needs: Per rank ``[slices]``, whether it needs each.
    """
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
    """The rank that reads each slice: evenly by bytes, and neighbours by the same.

    Args:
        sizes: Of the slices, in order.
        ranks: That need them.
        most_nbytes: That are handed over at once.
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


def rounds_of(sizes: Sequence[int], readers: Sequence[int], most_nbytes: int) -> list[list[Chunk]]:
    """Returns the rounds of a handover: each some bytes, or one slice that is larger, in chunks of one reader each.

    Args:
        sizes: Of the slices, in order.
        readers: Of each.
        most_nbytes: Of a round.
    """
    rounds = []
    for first, end in _bounded(sizes, most_nbytes):
        chunks = [Chunk(readers[first], first, first + 1)]
        for at in range(first + 1, end):
            if readers[at] == chunks[-1].reader:
                chunks[-1] = chunks[-1]._replace(end=at + 1)
            else:
                chunks.append(Chunk(readers[at], at, at + 1))
        rounds.append(chunks)
    return rounds


def _least(loads: Mapping[int, int]) -> int:
    return min(loads, key=lambda rank: (loads[rank], rank))


def _bounded(sizes: Sequence[int], most_nbytes: int) -> list[tuple[int, int]]:
    """(first, end) of runs of slices with at most so many bytes, or with one slice."""
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
