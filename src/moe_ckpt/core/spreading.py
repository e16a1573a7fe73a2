"""Copies in as many failure domains as there can be, and then as evenly as that allows: exact, and fast at any size.

What is asked, in this order: each rank has its copies on different nodes outside of its own domain; no rank holds more
than ``MOST_TIMES`` times as many copies as it has, or than it must where copies have no other place; as many
pairs of a rank and a domain that has a copy of it as possible; loads as even as that allows, the largest first.

Ranks of one domain are alike, so numbers of copies from domain to domain are all that has to be found, and they are a
flow of least cost. It also says which nodes take them: of one domain, nodes of equally many ranks are alike. From n
ranks at most n copies go to one node, and dealt one after the other to ranks, node by node, no rank gets two of them.
So a rank has copies in two nodes of a domain only if more than n copies go to that domain.

Domains that are small beside the others are taken together, so that the flow stays small: as long as the largest of
some domains has no more than 1 / (r + 1) of their ranks, those can be put in a circle in which r + 1 neighbours are
always in different domains. Whoever takes up to r neighbours there has as many domains, whatever else is in the flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from moe_ckpt.core.least_cost_flow import Network

MOST_TIMES = 2
"""A rank may hold so many times as many copies as it has, so that copies of one rank lie in different domains."""

Shape = tuple[tuple[int, ...], ...]
"""Per domain, how many ranks each of its nodes has."""


class _Kind(NamedTuple):
    """Nodes of one domain with equally many ranks."""

    domain: int
    ranks: int
    nodes: tuple[int, ...]


class _Flow(NamedTuple):
    """Copies of the sources: each large domain, and all small ones together, which come last.

    Attributes:
        kinds: Per source and kind of nodes.
        small: Per source, to the small domains.
    """

    kinds: list[list[int]]
    small: list[int]


@lru_cache(maxsize=32)  # groups are of few shapes
def spread(shape: Shape, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Places ``replicas`` copies of each rank, or as many as there are nodes outside of its domain.

    Args:
        shape: Ranks are counted domain by domain, and in each node by node.
        replicas: At least 1.

    Returns:
        Per rank, those that hold its copies.
    """
    return _Spread(shape, replicas).made()


class _Spread:
    """One world.

    Args:
        shape: See ``spread``.
        replicas: Likewise.
    """

    def __init__(self, shape: Shape, replicas: int) -> None:
        self._replicas = replicas
        nodes = [ranks for domain in shape for ranks in domain]
        firsts = [0, *accumulate(nodes)]
        self._ranks_of = [range(first, first + count) for first, count in zip(firsts, nodes, strict=False)]
        self._nodes_of = [range(end - len(domain), end) for domain, end in _ends(shape)]
        self._sizes = [sum(domain) for domain in shape]
        self._world = firsts[-1]
        self._peers: list[list[int]] = [[] for _ in range(self._world)]
        self._large, small = self._parted()
        self._circle, self._block_of = _circle([self._members(domain) for domain in small], replicas + 1)
        self._kinds = [kind for domain in self._large for kind in self._kinds_of(domain)]
        self._taken = [0] * len(nodes)

    def made(self) -> tuple[tuple[int, ...], ...]:
        """Returns the peers of each rank."""
        if self._large:
            self._deal(self._flow())
        else:
            self._turn(self._replicas)
        return tuple(map(tuple, self._peers))

    def _parted(self) -> tuple[list[int], list[int]]:
        """The domains that are large beside all smaller ones, and the others, the largest first."""
        order = sorted(range(len(self._sizes)), key=lambda domain: -self._sizes[domain])
        left = self._world
        for at, domain in enumerate(order):
            if (self._replicas + 1) * self._sizes[domain] <= left:
                return order[:at], order[at:]
            left -= self._sizes[domain]
        return order, []

    def _members(self, domain: int) -> list[int]:
        return [rank for node in self._nodes_of[domain] for rank in self._ranks_of[node]]

    def _kinds_of(self, domain: int) -> list[_Kind]:
        found: dict[int, list[int]] = {}
        for node in self._nodes_of[domain]:
            found.setdefault(len(self._ranks_of[node]), []).append(node)
        return [_Kind(domain, ranks, tuple(nodes)) for ranks, nodes in found.items()]

    # --- how many copies go where ---

    def _flow(self) -> _Flow:
        """With the bound that is wished, or else with the least that there is."""
        low = high = MOST_TIMES * self._replicas
        found = self._flow_within(high)
        while found is None:
            low, high = high, 2 * high
            found = self._flow_within(high)
        while high - low > 1:
            middle = (low + high) // 2
            flow = self._flow_within(middle)
            found, low, high = (found, middle, high) if flow is None else (flow, low, middle)
        return found

    def _flow_within(self, bound: int) -> _Flow | None:
        """The best one in which no rank holds over ``bound`` copies; None if some copies find no place then."""
        sources = [(domain, self._sizes[domain]) for domain in self._large]
        sources += [(-1, len(self._circle))] if self._circle else []
        net = Network(len(sources) * (1 + len(self._large)) + len(self._kinds) + 3)
        begin, end, small, kinds = 0, 1, 2, 3
        first_source = kinds + len(self._kinds)
        first_pair = first_source + len(sources)
        levels = MOST_TIMES * self._replicas
        gain = 1 + levels * self._world * self._replicas
        wanted, to_small, to_kinds = 0, list[int](), list[list[int]]()
        for number, (own, ranks) in enumerate(sources):
            source, copies = first_source + number, self._copies(own) * ranks
            wanted += copies
            net.add(begin, source, copies)
            to_small.append(net.add(source, small, self._replicas * ranks if self._circle else 0, -gain))
            pairs = {domain: first_pair + number * len(self._large) + at for at, domain in enumerate(self._large)}
            for domain, pair in pairs.items():
                if domain != own:
                    net.add(source, pair, ranks, -gain)
                    net.add(source, pair, ranks * (len(self._nodes_of[domain]) - 1))
            rooms = [ranks * len(kind.nodes) * (kind.domain != own) for kind in self._kinds]
            to_kinds.append([net.add(pairs[kind.domain], kinds + at, rooms[at]) for at, kind in enumerate(self._kinds)])
        holders = [(small, len(self._circle))]
        holders += [(kinds + at, kind.ranks * len(kind.nodes)) for at, kind in enumerate(self._kinds)]
        for place, ranks in holders:
            for level in range(levels):
                net.add(place, end, ranks, level)
            net.add(place, end, ranks * (bound - levels), levels)
        if net.send(begin, end) < wanted:
            return None
        return _Flow([list(map(net.sent, arcs)) for arcs in to_kinds], list(map(net.sent, to_small)))

    def _copies(self, domain: int) -> int:
        """Of each rank of a domain; there are enough nodes outside of a small one."""
        return min(self._replicas, len(self._ranks_of) - len(self._nodes_of[domain])) if domain >= 0 else self._replicas

    # --- which rank's copies these are ---

    def _deal(self, flow: _Flow) -> None:
        """Small domains are served first, by themselves, so that others go on where they ended in the circle."""
        turns = [0] * len(self._kinds)
        place = self._among_small(flow.small[-1]) if self._circle else 0
        sources = [*map(self._members, self._large), *([self._circle] if self._circle else [])]
        for number, (ranks, row) in enumerate(zip(sources, flow.kinds, strict=True)):
            inside = flow.small[number]
            if ranks is not self._circle:
                for at, rank in enumerate(ranks):
                    count = (inside + len(ranks) - 1 - at) // len(ranks)
                    self._peers[rank] += [self._circle[(place + step) % len(self._circle)] for step in range(count)]
                    place += count
            after = inside
            for at, (kind, copies) in enumerate(zip(self._kinds, row, strict=True)):
                each, rest = divmod(copies, len(kind.nodes))
                for turn in range(len(kind.nodes)):
                    node = kind.nodes[(turns[at] + turn) % len(kind.nodes)]
                    for _ in range(each + (turn < rest)):
                        self._give(ranks[after % len(ranks)], node)
                        after += 1
                turns[at] += rest

    def _give(self, rank: int, node: int) -> None:
        """A copy of a rank to the next one of a node."""
        holders = self._ranks_of[node]
        self._peers[rank].append(holders[self._taken[node] % len(holders)])
        self._taken[node] += 1

    def _among_small(self, copies: int) -> int:
        """Copies of ranks in small domains to one another; returns the place in the circle where it is to go on."""
        ranks = len(self._circle)
        each, rest = divmod(copies, ranks)
        if not rest:
            self._turn(each)
            return 0
        for at, rank in enumerate(self._circle):
            self._peers[rank] += [self._circle[(at + 1 + step) % ranks] for step in range(each + (at < rest))]
        return each + 1 + rest

    def _turn(self, copies: int) -> None:
        """Ranks of the circle that are taken together hold one another's copies, which few sets of nodes destroy."""
        for block in self._block_of:
            for at, rank in enumerate(block):
                self._peers[rank] += [block[(at + 1 + step) % len(block)] for step in range(copies)]


def _ends(shape: Shape) -> list[tuple[tuple[int, ...], int]]:
    """Each domain, and the number of nodes up to its end."""
    return list(zip(shape, accumulate(map(len, shape)), strict=True))


def _circle(domains: Sequence[Sequence[int]], apart: int) -> tuple[list[int], list[list[int]]]:
    """Ranks in an order in which ``apart`` neighbours are in different domains, around its end, too; and its blocks.

    The largest domain, which comes first, has no more ranks than there are blocks, and each block has ``apart`` ranks
    or more. Ranks are dealt to blocks one after the other. A domain then has one rank per block at most, and in
    neighbouring blocks those are at the same place, or in the first block one place behind that in the last.
    """
    order = [rank for ranks in domains for rank in ranks]
    count = len(order) // apart
    blocks = [order[block::count] for block in range(count)]
    return [rank for block in blocks for rank in block], blocks
