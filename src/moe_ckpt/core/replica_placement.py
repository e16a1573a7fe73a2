"""Which ranks hold copies of which rank's snapshots: a pure function of where the ranks are.

A rank is in domains that fail as a whole: its node, and what holds that (a rack, a switch), where the user names it.
Copies lie outside the widest domain of their source, each on a different node.

Where all domains are alike, every rank holds as many copies as it has. Copy k goes to the rank at the same place of
another domain, at a distance of k / (r + 1) of all domains. If r + 1 divides their number, that makes groups of r + 1
which hold one another's copies and nothing else: of all placements the one that the fewest sets of lost nodes destroy
(Gemini, SOSP'23, section 4, Theorem 1).

Where they are not, copies of one rank lie in different domains as far as no rank holds over twice as many as it has
because of that, and then as evenly as that allows (``core.spreading``).

Copies lie first on ranks that hold the same training state, as far as those are on other nodes, and be they in a domain
that has a copy already: what such a peer has anyway need not be sent (MoEtion, arXiv 2412.15411 v1, Algorithm 2;
``slices.mirroring``). The others lie in as many domains as they can (``core.leftover_copies``). The paper computes the
groups from rank numbers, by a formula that gives pipelines instead; here they are those of the process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.core.leftover_copies import LeftoverCopies
from moe_ckpt.core.spreading import MOST_TIMES, Shape, spread
from moe_ckpt.errors import ConfigError


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

    @property
    def shape(self) -> Shape:
        """Per domain, how many ranks each of its nodes has."""
        return tuple(tuple(map(len, nodes)) for nodes in self.domains)

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
    outer: dict[str, tuple[str, int]] = {}
    for rank, names in enumerate(domains):
        node, widest = names[0], names[-1]
        said, first = outer.setdefault(node, (widest, rank))
        if said != widest:
            raise ConfigError(
                f"Memory(failure_domain=...): rank {rank} says {widest!r}, and rank {first}, on the same node "
                f"({node}), says {said!r}. Set the same on all ranks of a node"
            )
        found.setdefault(widest, {}).setdefault(node, []).append(rank)
    grouped = tuple(tuple(map(tuple, nodes.values())) for nodes in found.values())
    return _World(tuple(rank for nodes in grouped for ranks in nodes for rank in ranks), grouped)


def _place_inside(
    peers: list[list[int]], domains: Sequence[Sequence[str]], members: Sequence[int], replicas: int
) -> None:
    """Place among ``members`` what copies of theirs have no place yet, as far as it goes; adds to ``peers``."""
    if all(len(peers[rank]) == replicas for rank in members):
        return
    world = _world([domains[rank] for rank in members])
    if any(peers[rank] for rank in members):
        order = [members[place] for place in world.order]
        LeftoverCopies(domains, order, peers, replicas, MOST_TIMES * replicas).place()
        return
    for place, holders in enumerate(_spread(world, replicas)):
        peers[members[place]] = [members[holder] for holder in holders]


def _spread(world: _World, replicas: int) -> list[list[int]]:
    """Copies of all ranks of a world that has none yet: as many as there are nodes outside of a rank's domain."""
    if len(world.domains) < 2:
        return []
    rotated = _rotated(world, replicas)
    if rotated:
        return rotated
    peers: list[list[int]] = [[] for _ in world.order]
    for rank, holders in zip(world.order, spread(world.shape, replicas), strict=True):
        peers[rank] = [world.order[holder] for holder in holders]
    return peers


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
