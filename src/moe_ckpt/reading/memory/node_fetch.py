"""One rank per node fetches what several of its ranks need from other nodes' memory, and gives it to the others.

Pure. Ranks that hold the same, as all do under data parallelism, want the same bytes after a lost node. The network
between nodes is the narrowest way there is; inside of a node bytes go from memory to memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class SlotSpan(NamedTuple):
    """Bytes of a slot on another node.

    Attributes:
        holder: Rank that has the slot.
        number: Of the slot among its own.
        part: Its place in the slot.
        begin, end: In the part.
    """

    holder: int
    number: int
    part: int
    begin: int
    end: int


@dataclass(frozen=True)
class Portion:
    """Bytes that go over the network once.

    Attributes:
        span: Which.
        fetcher: Rank that receives them from ``span.holder``.
        others: Ranks of the same node that receive them from the fetcher, in ascending order.
    """

    span: SlotSpan
    fetcher: int
    others: tuple[int, ...] = ()


def share_out(nodes: Sequence[str], spans_of: Mapping[int, Sequence[SlotSpan]]) -> list[Portion]:
    """Divides what ranks want into portions, each wanted by exactly the same ranks of a node.

    Of those ranks the one fetches it that fetches least so far. Alike on every rank.

    Args:
        nodes: Per rank its node.
        spans_of: Rank -> what it wants; no byte twice.
    """
    asking: dict[str, dict[tuple[int, int, int], list[tuple[int, int, int]]]] = {}
    for rank, requests in sorted(spans_of.items()):
        for request in requests:
            of_slot = asking.setdefault(nodes[rank], {}).setdefault(request[:3], [])
            of_slot.append((request.begin, request.end, rank))
    portions = []
    for _, slots in sorted(asking.items()):
        fetched: dict[int, int] = {}
        for (holder, number, part), spans in sorted(slots.items()):
            for begin, end, ranks in _divided(spans):
                fetcher = min(ranks, key=lambda rank: (fetched.get(rank, 0), rank))
                fetched[fetcher] = fetched.get(fetcher, 0) + end - begin
                others = tuple(rank for rank in ranks if rank != fetcher)
                portions.append(Portion(SlotSpan(holder, number, part, begin, end), fetcher, others))
    return portions


def _divided(requests: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, list[int]]]:
    """(begin, end, rank) -> (begin, end, ranks that want all of it), in order and without an overlap."""
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
