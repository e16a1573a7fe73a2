"""Which ranks hold copies of which rank's snapshots: a pure function of where the ranks are.

A rank is in domains that fail as a whole: its node, and what holds that (a rack, a switch), where the user names it.
Copies lie outside the widest domain of their source, each on a different node, and every rank holds as many as it has.

Where all domains are alike, copy k goes to the rank at the same place of another domain, at a distance of k / (r + 1)
of all domains. If r + 1 divides their number, that makes groups of r + 1 which hold one another's copies and nothing
else: of all placements the one that the fewest sets of lost nodes destroy (Gemini, SOSP'23, section 4, Theorem 1).

Of one rank, copies lie in different domains as far as no rank holds more copies than some rank would without that. Up
to 128 ranks are spread as well as that load allows (``core.spreading``), more of them by exchanges of two copies.

Copies lie first on ranks that hold the same training state, as far as those are on other nodes, and be they in a domain
that has a copy already: what such a peer has anyway need not be sent (MoEtion, arXiv 2412.15411 v1, Algorithm 2;
``slices.mirroring``). The paper computes the groups from rank numbers, by a formula that gives pipelines instead; here
they are those of the process groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moe_ckpt.core.spreading import Spread
from moe_ckpt.errors import ConfigError

_LOOKED_AT = 128
"""Ranks with which one rank is compared, so that placing takes time in proportion to ranks."""
_SMALL = 128
"""Ranks of a world for which the best placement is looked for, in a fifth of a second at most."""


@dataclass(frozen=True)
class ReplicaPlacement:
    """Who holds copies of whom. Alike on every rank.

    Attributes:
        peers_of: Per rank, those that hold its copies.
        sources_of: Per rank, those whose copies it holds, in ascending order.
        short: Ranks with fewer copies than requested.
    """

    peers_of: tuple[tuple[int, ...], ...]
    sources_of: tuple[tuple[int, ...], ...]
    short: tuple[int, ...] = ()


@dataclass(frozen=True)
class _World:
    """Ranks by domain and node: those of one domain follow one another, and in it those of one node.

    Attributes:
        order: All ranks.
        domains: Per domain its nodes, each a list of ranks.
    """

    order: tuple[int, ...]
    domains: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def nodes(self) -> int:
        return sum(map(len, self.domains))

    @cached_property
    def domain_of(self) -> dict[int, int]:
        """Rank -> number of its domain."""
        return {rank: at for at, nodes in enumerate(self.domains) for ranks in nodes for rank in ranks}

    @cached_property
    def node_of(self) -> dict[int, tuple[int, ...]]:
        """Rank -> the ranks of its node."""
        return {rank: ranks for nodes in self.domains for ranks in nodes for rank in ranks}

    @property
    def largest_domain(self) -> int:
        """Its ranks."""
        return max(sum(map(len, nodes)) for nodes in self.domains)

    @property
    def largest_node(self) -> int:
        """Its ranks."""
        return max(len(ranks) for nodes in self.domains for ranks in nodes)

    @property
    def is_even(self) -> bool:
        """Domains have equally many nodes, and nodes equally many ranks."""
        shapes = {(len(nodes), *{len(ranks) for ranks in nodes}) for nodes in self.domains}
        return len(shapes) == 1 and len(shapes.pop()) == 2


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
    world = _world(domains)
    others = world.nodes - 1
    if replicas > others:
        raise ConfigError(
            f"Memory(replicas={replicas}): a copy lies on another node, and this run has {others} other nodes "
            f"({world.nodes} in all). Set at most replicas={others}, or start the run on more nodes"
        )
    if len(world.domains) == 1:
        raise ConfigError(
            f"Memory(replicas={replicas}, failure_domain={domains[0][-1]!r}): a copy lies outside the failure domain "
            f"of its source, and all {world.nodes} nodes of this run are in this one"
        )
    peers: list[list[int]] = [[] for _ in domains]
    for each in groups:
        for members in sorted({tuple(sorted(group)) for group in each}):
            _place_inside(peers, domains, members, replicas)
    _place_inside(peers, domains, range(len(domains)), replicas)
    sources: list[list[int]] = [[] for _ in domains]
    for rank, holders in enumerate(peers):
        for holder in holders:
            sources[holder].append(rank)
    short = tuple(rank for rank, holders in enumerate(peers) if len(holders) < replicas)
    return ReplicaPlacement(tuple(map(tuple, peers)), tuple(map(tuple, sources)), short)


def _world(domains: Sequence[Sequence[str]]) -> _World:
    """In the order in which domains and nodes first appear."""
    found: dict[str, dict[str, list[int]]] = {}
    outer: dict[str, str] = {}
    for rank, names in enumerate(domains):
        node, widest = names[0], names[-1]
        if outer.setdefault(node, widest) != widest:
            raise ConfigError(
                f"Memory(failure_domain=...): rank {rank} says {widest!r}, and another rank of its node ({node}) says "
                f"{outer[node]!r}"
            )
        found.setdefault(widest, {}).setdefault(node, []).append(rank)
    grouped = tuple(tuple(map(tuple, nodes.values())) for nodes in found.values())
    return _World(tuple(rank for nodes in grouped for ranks in nodes for rank in ranks), grouped)


def _place_inside(
    peers: list[list[int]], domains: Sequence[Sequence[str]], members: Sequence[int], replicas: int
) -> None:
    """Place among ``members`` what copies of theirs have no place yet, as far as it goes; adds to ``peers``."""
    if any(peers[rank] for rank in members):
        _fill(peers, domains, members, replicas)
        return
    world = _world([domains[rank] for rank in members])
    for place, holders in enumerate(_spread(world, replicas)):
        peers[members[place]] = [members[holder] for holder in holders]


def _spread(world: _World, replicas: int) -> list[list[int]]:
    """Copies of all ranks of a world that has none yet: as many as there are nodes outside of a rank's domain."""
    if len(world.domains) < 2:
        return []
    rotated = _rotated(world, replicas)
    if rotated:
        return rotated
    peers = _Exchange(world, _shifted(world, replicas) or _dealt(world, replicas)).made()
    return _spread_best(world, peers) if len(world.order) <= _SMALL else peers


def _spread_best(world: _World, peers: list[list[int]]) -> list[list[int]]:
    """Copies in as many domains as there can be, where no rank holds more than some rank does now (``Spread``)."""
    nodes = [ranks for members in world.domains for ranks in members]
    node_of = {rank: at for at, ranks in enumerate(nodes) for rank in ranks}
    domain_of = [world.domain_of[ranks[0]] for ranks in nodes]
    loads = Counter(holder for holders in peers for holder in holders)
    held = [[node_of[holder] for holder in holders] for holders in peers]
    homes = [world.domain_of[rank] for rank in range(len(peers))]
    if not Spread(homes, domain_of, list(map(len, nodes)), max(loads.values()), held).improved():
        return peers
    taken = Counter[int]()
    found: list[list[int]] = []
    for holders in held:
        found.append([nodes[node][taken[node] % len(nodes[node])] for node in holders])
        taken.update(holders)
    return found


def _fill(peers: list[list[int]], domains: Sequence[Sequence[str]], members: Sequence[int], replicas: int) -> None:
    """The copies that some members lack, one after the other: on the next rank that has fewer than ``replicas`` yet, as
    in the paper, or else on the one that has fewest, since no rank goes without; either first in a domain without a
    copy, where one of the next ranks is in such a domain."""
    world = _world([domains[rank] for rank in members])
    order = [members[place] for place in world.order]
    loads = dict.fromkeys(members, 0)
    for rank in members:
        for holder in peers[rank]:
            if holder in loads:
                loads[holder] += 1
    room = Counter(domains[rank][-1] for rank in members if loads[rank] < replicas)
    rooms = room.total()
    for at, rank in enumerate(order):
        widest, used = domains[rank][-1], {domains[holder][0] for holder in peers[rank]}
        while len(peers[rank]) < replicas:
            taken = {widest, *(domains[holder][-1] for holder in peers[rank])}
            elsewhere = rooms > sum(room[domain] for domain in taken)
            best, least = None, (replicas, True)
            for step in range(len(order)):
                holder = order[(at + len(order) // 2 + step) % len(order)]
                if domains[holder][-1] != widest and domains[holder][0] not in used:
                    cost = max(loads[holder], replicas - 1), domains[holder][-1] in taken
                    if best is None or cost < least:
                        best, least = holder, cost
                if least == (replicas - 1, not elsewhere) or (least[0] < replicas and step >= _LOOKED_AT):
                    break
            if best is None:
                break
            peers[rank].append(best)
            used.add(domains[best][0])
            loads[best] += 1
            if loads[best] == replicas:
                room[domains[best][-1]] -= 1
                rooms -= 1


class _Exchange:
    """Has copies of one rank lie in more domains, while no rank holds more copies than some rank held before.

    A copy that has another one of its source in its domain goes to a domain without one, in exchange for a copy that
    loses nothing by that, or without where fewer copies lie. So it ends: each step adds a domain to some rank.

    Args:
        world: Where the ranks are.
        peers: Per place in ``world``, those that hold its copies; changed in place.
    """

    def __init__(self, world: _World, peers: list[list[int]]) -> None:
        self._world = world
        self._peers = peers
        self._loads = Counter(holder for holders in peers for holder in holders)

    def made(self) -> list[list[int]]:
        """Returns the peers after all exchanges."""
        while sum(self._spread_out(rank) for rank in self._world.order):
            pass
        return self._peers

    def _spread_out(self, rank: int) -> bool:
        """Whether a copy of this rank came to lie in another domain."""
        domain_of, holders = self._world.domain_of, self._peers[rank]
        had = Counter(domain_of[holder] for holder in holders)
        if len(had) == min(len(holders), len(self._world.domains) - 1):
            return False
        taken = {domain_of[rank], *had}
        for at, holder in enumerate(holders):
            if had[domain_of[holder]] > 1 and (self._moved(rank, at, taken) or self._exchanged(rank, at, taken)):
                return True
        return False

    def _others(self, rank: int) -> Iterator[int]:
        """Those that are looked at."""
        order = self._world.order
        return (order[(rank + len(order) // 2 + step) % len(order)] for step in range(min(len(order), _LOOKED_AT)))

    def _moved(self, rank: int, at: int, taken: set[int]) -> bool:
        """Ranks of one node stay as even as they are."""
        node_of, domain_of, loads, old = self._world.node_of, self._world.domain_of, self._loads, self._peers[rank][at]
        if loads[old] < max(loads[each] for each in node_of[old]):
            return False
        for new in self._others(rank):
            fewer = domain_of[new] not in taken and loads[new] < loads[old]
            if fewer and loads[new] == min(loads[each] for each in node_of[new]):
                self._peers[rank][at] = new
                loads[old] -= 1
                loads[new] += 1
                return True
        return False

    def _exchanged(self, rank: int, at: int, taken: set[int]) -> bool:
        domain_of, old = self._world.domain_of, self._peers[rank][at]
        for other in self._others(rank):
            for place, new in enumerate(self._peers[other]):
                if domain_of[new] not in taken and self._takes(other, place, old):
                    self._peers[rank][at], self._peers[other][place] = new, old
                    return True
        return False

    def _takes(self, rank: int, place: int, holder: int) -> bool:
        """Whether a holder can take the place of another one of this rank, which then has as many domains as before."""
        domain_of, node_of = self._world.domain_of, self._world.node_of
        rest = [each for at, each in enumerate(self._peers[rank]) if at != place]
        if domain_of[holder] == domain_of[rank] or any(node_of[holder] == node_of[each] for each in rest):
            return False
        kept = {domain_of[each] for each in rest}
        return domain_of[holder] not in kept or domain_of[self._peers[rank][place]] in kept


def _rotated(world: _World, replicas: int) -> list[list[int]]:
    """Every copy at the same place of another domain, or one node further there; empty where domains differ."""
    count, nodes = len(world.domains), len(world.domains[0])
    if not world.is_even or replicas > (count - 1) * nodes:
        return []
    rounds, rest = divmod(replicas, count - 1)
    turns = [(step, onward) for onward in range(rounds) for step in range(1, count)]
    turns += [(copy * count // (rest + 1), rounds) for copy in range(1, rest + 1)]
    peers: list[list[int]] = [[] for _ in world.order]
    for domain, members in enumerate(world.domains):
        for node, ranks in enumerate(members):
            for step, onward in turns:
                holders = world.domains[(domain + step) % count][(node + onward) % nodes]
                for rank, holder in zip(ranks, holders, strict=True):
                    peers[rank].append(holder)
    return peers


def _shifted(world: _World, replicas: int) -> list[list[int]]:
    """Every copy so many ranks further in the order; empty where that leads into the same domain, or twice to a node.

    Two ranks that are at least as far apart as the largest domain has ranks, both ways around, are in different ones.
    """
    ranks, widest = len(world.order), world.largest_domain
    room = ranks - 2 * widest
    between = room // (replicas - 1) if replicas > 1 else widest
    if room < 0 or between < world.largest_node:
        return []
    shifts = [widest + between * copy for copy in range(replicas)] if replicas > 1 else [ranks // 2]
    peers: list[list[int]] = [[] for _ in world.order]
    for at, rank in enumerate(world.order):
        peers[rank] = [world.order[(at + shift) % ranks] for shift in shifts]
    return peers


def _dealt(world: _World, replicas: int) -> list[list[int]]:
    """As many copies as there are nodes outside of a rank's domain; no rank of a node has two more than another."""
    nodes = [ranks for members in world.domains for ranks in members]
    taken = [0] * len(nodes)
    peers: list[list[int]] = [[] for _ in world.order]
    after = 0
    for members in world.domains:
        after += len(members)  # the first node behind this domain
        outside = len(nodes) - len(members)
        copies = min(replicas, outside)
        for at, rank in enumerate(rank for ranks in members for rank in ranks):
            for copy in range(copies):
                node = (after + (at + copy * outside // copies) % outside) % len(nodes)
                peers[rank].append(nodes[node][taken[node] % len(nodes[node])])
                taken[node] += 1
    return peers
