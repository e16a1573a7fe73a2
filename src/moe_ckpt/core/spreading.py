"""The best way to spread copies over failure domains, where a world is small enough: a flow without negative cycles.

Each source has its copies on different nodes outside of its own domain. Of all ways to place them with no more than a
bound on each node, the best is the one with most (source, domain) pairs, and of those one with loads as even as they
can be. What is given is improved cycle by cycle until none is left that improves it, which is then the best (Klein,
1967): a copy goes to another node, another source's copy makes room for it, and so on, back to where the first one
was, or to a node that has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

_Arc = tuple[int, int, int]
"""From, to, and what it costs: less than nothing if it improves something."""


class Spread:
    """Copies of some sources on nodes; all are numbers from 0 on.

    Args:
        homes: Of each source, its own domain.
        domain_of: Of each node, its domain.
        ranks_of: Of each node, its ranks, over which its copies are dealt evenly.
        most: Copies that no rank may exceed.
        held: Of each source, the nodes that hold its copies; changed in place.
    """

    def __init__(
        self,
        homes: Sequence[int],
        domain_of: Sequence[int],
        ranks_of: Sequence[int],
        most: int,
        held: list[list[int]],
    ) -> None:
        self._homes, self._domain_of, self._ranks_of, self._most = homes, domain_of, ranks_of, most
        self._held = held
        self._sources, self._domains = len(homes), max(domain_of) + 1
        self._gain = 1 + sum(map(len, held)) * (most + 1)
        self._end = self._sources * (1 + self._domains) + len(domain_of)

    def improved(self) -> bool:
        """Returns whether anything could be improved; then it is as good as it can be."""
        changed = False
        while cycle := self._cycle():
            changed = True
            for one, other in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
                self._follow(one, other)
        return changed

    # Places of the flow: a source, a source in a domain, a node, and the end of all copies.

    def _pair(self, source: int, domain: int) -> int:
        return self._sources + source * self._domains + domain

    def _node(self, node: int) -> int:
        return self._sources * (1 + self._domains) + node

    def _follow(self, one: int, other: int) -> None:
        """A copy is placed, or taken away, where the cycle goes from a source's domain to a node, or back."""
        first_pair, first_node = self._sources, self._sources * (1 + self._domains)
        if first_pair <= one < first_node <= other < self._end:
            self._held[(one - first_pair) // self._domains].append(other - first_node)
        elif first_pair <= other < first_node <= one < self._end:
            self._held[(other - first_pair) // self._domains].remove(one - first_node)

    def _arcs(self) -> Iterator[_Arc]:
        """What can be changed by one copy, and what that costs."""
        loads = Counter(node for nodes in self._held for node in nodes)
        for source, nodes in enumerate(self._held):
            there = Counter(self._domain_of[node] for node in nodes)
            for domain in range(self._domains):
                if domain != self._homes[source]:
                    pair, count = self._pair(source, domain), there[domain]
                    yield source, pair, 0 if count else -self._gain
                    if count:
                        yield pair, source, self._gain if count == 1 else 0
            for node, domain in enumerate(self._domain_of):
                if domain != self._homes[source]:
                    pair = self._pair(source, domain)
                    yield (self._node(node), pair, 0) if node in nodes else (pair, self._node(node), 0)
        for node, ranks in enumerate(self._ranks_of):
            if loads[node] < ranks * self._most:
                yield self._node(node), self._end, loads[node] // ranks
            if loads[node]:
                yield self._end, self._node(node), -((loads[node] - 1) // ranks)

    def _cycle(self) -> list[int]:
        """The places of a cycle that costs less than nothing, in order; empty if there is none (Bellman and Ford)."""
        arcs = list(self._arcs())
        costs, before = [0] * (self._end + 1), [-1] * (self._end + 1)
        relaxed = True
        while relaxed:
            relaxed = False
            for one, other, cost in arcs:
                if costs[one] + cost < costs[other]:
                    costs[other], before[other], relaxed = costs[one] + cost, one, True
            if relaxed and (cycle := _closed(before)):
                return cycle
        return []


def _closed(before: Sequence[int]) -> list[int]:
    """A cycle of the predecessors, in the direction of the arcs; empty if there is none."""
    seen = [0] * len(before)
    for walk, start in enumerate(range(len(before)), 1):
        at = start
        while at >= 0 and not seen[at]:
            seen[at] = walk
            at = before[at]
        if at >= 0 and seen[at] == walk:
            cycle, place = [at], before[at]
            while place != at:
                cycle.append(place)
                place = before[place]
            return cycle[::-1]
    return []
