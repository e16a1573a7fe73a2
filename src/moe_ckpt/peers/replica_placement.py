"""Which ranks hold copies of which rank's snapshots: a pure function of where the ranks are.

A rank is in domains that fail as a whole: its node, and what holds that (a rack, a switch), where the user names it.
Copies lie outside the widest domain of their source, each on a different node, and in different domains as long as no
rank holds over twice as many copies as it has because of that.

Where no domain has more than one part in r + 1 of the ranks, every rank holds r copies: of all ranks, one domain after
the other, copy k lies k / (r + 1) of them further on. If r + 1 divides their number, that makes groups of r + 1 which
hold one another's copies and nothing else: of all placements the one that the fewest sets of lost nodes destroy
(Gemini, SOSP'23, section 4, Theorem 1). Elsewhere each copy goes to the emptiest domain, node and rank that may have
it: a rank of a small domain beside large ones then holds more copies than it has.

Copies lie first on ranks that hold the same training state, as far as those are on other nodes, and be they in a domain
that has a copy already: what such a peer has anyway need not be sent (MoEtion, arXiv 2412.15411 v1, Algorithm 2;
``slices.mirroring``). The paper computes the groups from rank numbers, by a formula that gives pipelines instead; here
they are those of the process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from moe_ckpt.errors import ConfigError

MOST_TIMES = 2
"""A rank holds so many times as many copies as it has before copies of one rank come to lie in one domain."""


@dataclass(frozen=True)
class ReplicaPlacement:
    """Ranks that hold copies of each rank's snapshots. Alike on every rank.

    Attributes:
        peers_of: Per rank, those that hold its copies.
        sources_of: Per rank, those whose copies it holds, in ascending order.
        short: Ranks with fewer copies than requested.
    """

    peers_of: tuple[tuple[int, ...], ...]
    sources_of: tuple[tuple[int, ...], ...]
    short: tuple[int, ...] = ()


def place_replicas(
    domains: Sequence[Sequence[str]], replicas: int, groups: Sequence[Sequence[Sequence[int]]] = ()
) -> ReplicaPlacement:
    """Place ``replicas`` copies of every rank, in time proportional to ranks and copies.

    Args:
        domains: Per rank its domains, from its node outwards; of several the first and the last count.
        replicas: Copies of each rank, not counting its own.
        groups: Kinds of data parallelism, from the one whose ranks share most state: per rank the ranks of its group,
            itself included. Copies lie inside the first groups that have other nodes, and outside only when those
            have no more.

    Raises:
        ConfigError: There are no other nodes for so many copies, or no other domain.
    """
    if replicas <= 0:
        nothing = ((),) * len(domains)
        return ReplicaPlacement(nothing, nothing)
    world = _by_domain(domains)
    nodes = sum(map(len, world.values()))
    others = nodes - 1
    if replicas > others:
        raise ConfigError(
            f"Memory(replicas={replicas}): a copy lies on another node, and this run has {others} other nodes "
            f"({nodes} in all). Set at most replicas={others}, or start the run on more nodes"
        )
    if len(world) == 1:
        raise ConfigError(
            f"Memory(replicas={replicas}, failure_domain={domains[0][-1]!r}): a copy lies outside the failure domain "
            f"of its source, and all {nodes} nodes of this run are in this one"
        )
    peers: list[list[int]] = [[] for _ in domains]
    for groups_of_ranks in groups:
        for members in sorted({tuple(sorted(group)) for group in groups_of_ranks}):
            _place_inside(peers, domains, members, replicas)
    _place_inside(peers, domains, range(len(domains)), replicas)
    sources: list[list[int]] = [[] for _ in domains]
    for rank, holders in enumerate(peers):
        for holder in holders:
            sources[holder].append(rank)
    short = tuple(rank for rank, holders in enumerate(peers) if len(holders) < replicas)
    return ReplicaPlacement(tuple(map(tuple, peers)), tuple(map(tuple, sources)), short)


def _by_domain(domains: Sequence[Sequence[str]]) -> dict[str, dict[str, list[int]]]:
    """Returns domain -> node -> its ranks, in the order in which they first appear."""
    nodes_of: dict[str, dict[str, list[int]]] = {}
    outer: dict[str, tuple[str, int]] = {}
    for rank, names in enumerate(domains):
        node, widest = names[0], names[-1]
        domain, first = outer.setdefault(node, (widest, rank))
        if domain != widest:
            raise ConfigError(
                f"Memory(failure_domain=...): rank {rank} says {widest!r}, and rank {first}, on the same node "
                f"({node}), says {domain!r}. Set the same on all ranks of a node"
            )
        nodes_of.setdefault(widest, {}).setdefault(node, []).append(rank)
    return nodes_of


def _place_inside(
    peers: list[list[int]], domains: Sequence[Sequence[str]], members: Sequence[int], replicas: int
) -> None:
    """Place among ``members`` what copies of theirs have no place yet, as far as it goes; adds to ``peers``."""
    if all(len(peers[rank]) == replicas for rank in members):
        return
    world = _by_domain([domains[rank] for rank in members]).values()
    if len(world) < 2:
        return
    by_domain = [[members[number] for ranks in nodes.values() for number in ranks] for nodes in world]
    distance = len(members) // (replicas + 1)
    if max(map(len, by_domain)) <= distance and not any(peers[rank] for rank in members):
        order = [rank for ranks in by_domain for rank in ranks]
        for at, rank in enumerate(order):
            peers[rank] = [order[(at + copy * distance) % len(order)] for copy in range(1, replicas + 1)]
        return
    # Ranks of large domains first: they have the fewest places to choose from.
    order = [rank for ranks in sorted(by_domain, key=len, reverse=True) for rank in ranks]
    _Greedy(domains, order, peers, replicas).fill()


class _Greedy:
    """Gives one copy after the other to the emptiest domain that has none of its source, there to the emptiest node.

    A domain whose ranks hold ``MOST_TIMES`` as many copies as they have gets more only if no other node is left.

    Args:
        domains: Per rank of the world its domains, of which the first and the last count.
        order: Ranks that hold one another's copies, those of a domain one after the other.
        peers: Per rank of the world the ranks that hold its copies; added to.
        replicas: Copies that each rank is to have.
    """

    def __init__(
        self, domains: Sequence[Sequence[str]], order: Sequence[int], peers: list[list[int]], replicas: int
    ) -> None:
        self._domains, self._order, self._peers, self._replicas = domains, order, peers, replicas
        self._most = MOST_TIMES * replicas
        self._ranks: dict[str, list[int]] = {}
        nodes: dict[str, list[str]] = {}
        for rank in order:
            node, domain = domains[rank][0], domains[rank][-1]
            if node not in self._ranks:
                nodes.setdefault(domain, []).append(node)
            self._ranks.setdefault(node, []).append(rank)
        self._loads = dict.fromkeys(order, 0)
        for rank in order:
            for holder in peers[rank]:
                if holder in self._loads:
                    self._loads[holder] += 1
        self._in_nodes = {
            domain: _ByFullness([(node, self._ranks[node]) for node in names], self._loads)
            for domain, names in nodes.items()
        }
        members = [(domain, [rank for node in names for rank in self._ranks[node]]) for domain, names in nodes.items()]
        self._in_domains = _ByFullness(members, self._loads)

    def fill(self) -> None:
        """Adds copies until each rank has as many as it is to have, or no other node is left for more."""
        for copies in range(1, self._replicas + 1):
            for rank in self._order:
                if len(self._peers[rank]) < copies:
                    self._add(rank)

    def _add(self, rank: int) -> None:
        domain = self._domains[rank][-1]
        nodes = {self._domains[holder][0] for holder in self._peers[rank]}
        used = {domain, *(self._domains[holder][-1] for holder in self._peers[rank])}
        for without, most in ((used, self._most), ({domain}, self._most), ({domain}, inf)):
            choice = self._choose(without, nodes, most)
            if choice is not None:
                self._give(rank, *choice)
                return

    def _choose(self, domains: set[str], nodes: set[str], most: float) -> tuple[str, str] | None:
        """Returns the emptiest domain outside of ``domains``, and the emptiest node there that is none of ``nodes``.

        None if all such nodes hold ``most`` copies per rank or more.
        """

        def node_of(domain: str) -> str | None:
            return self._in_nodes[domain].emptiest(lambda node: node not in nodes, most)

        domain = self._in_domains.emptiest(lambda name: name not in domains and node_of(name) is not None)
        node = None if domain is None else node_of(domain)
        return None if domain is None or node is None else (domain, node)

    def _give(self, rank: int, domain: str, node: str) -> None:
        holder = min(self._ranks[node], key=self._loads.__getitem__)
        self._peers[rank].append(holder)
        self._loads[holder] += 1
        self._in_domains.add(domain)
        self._in_nodes[domain].add(node)


class _ByFullness:
    """Sorts sets of ranks by the copies that they hold, per rank, in a heap that drops outdated entries late.

    Args:
        members: The name of each set and its ranks.
        loads: Copies that each rank holds.
    """

    def __init__(self, members: Sequence[tuple[str, Sequence[int]]], loads: dict[int, int]) -> None:
        self._sizes = {name: len(ranks) for name, ranks in members}
        self._held = {name: sum(loads[rank] for rank in ranks) for name, ranks in members}
        self._numbers = {name: number for number, (name, _) in enumerate(members)}
        self._heap = [self._entry(name) for name in self._sizes]
        heapify(self._heap)

    def _entry(self, name: str) -> tuple[float, int, str]:
        return self._held[name] / self._sizes[name], self._numbers[name], name

    def add(self, name: str) -> None:
        """Counts one more copy."""
        self._held[name] += 1
        heappush(self._heap, self._entry(name))

    def emptiest(self, is_fit: Callable[[str], bool], most: float = inf) -> str | None:
        """Returns the set with the fewest copies per rank, below ``most``, of those that fit; None if none does."""
        passed = []
        chosen = None
        while self._heap and chosen is None and self._heap[0][0] < most:
            entry = heappop(self._heap)
            if entry == self._entry(entry[-1]):
                passed.append(entry)
                chosen = entry[-1] if is_fit(entry[-1]) else None
        for entry in passed:
            heappush(self._heap, entry)
        return chosen
