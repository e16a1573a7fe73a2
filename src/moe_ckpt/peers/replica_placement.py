"""Decides which ranks hold the copies of which rank's snapshots. Pure.

Each rank belongs to domains that fail as a whole: its node, and a rack or switch if the user names one. Copies are
placed outside the widest domain of their source, each on a different node, and in different domains as long as no rank
therefore holds more than twice as many copies as it has itself.

If no domain has more than one (r + 1)-th of the ranks, every rank holds r copies: with all ranks in a row, one domain
after the other, copy k of a rank is k / (r + 1) of the row further on. If r + 1 divides the number of ranks, that makes
groups of r + 1 ranks which hold one another's copies and no others: of all placements the one that the fewest sets of
lost nodes destroy (Gemini, SOSP'23, section 4, Theorem 1). Otherwise each copy goes to the emptiest possible domain,
node and rank: a rank of a small domain beside large ones then holds more copies than it has itself.

Copies go first to ranks on other nodes that hold the same training state, even in a domain that already has a copy:
state that such a peer has need not be sent (MoEtion, arXiv 2412.15411 v1, Algorithm 2; ``MirroredShares``). The paper
computes these groups from rank numbers, by a formula that gives pipelines instead; here they are the process groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_ckpt.errors import ConfigError

MOST_TIMES = 2
"""A rank holds at most this many times as many copies as it has itself, unless two copies would share a domain."""


@dataclass(frozen=True)
class ReplicaPlacement:
    """The ranks that hold copies of each rank's snapshots. Equal on every rank.

    Attributes:
        peers_of: Per rank, the ranks that hold its copies.
        sources_of: Per rank, the ranks whose copies it holds, in ascending order.
        short: Ranks with fewer copies than requested.
    """

    peers_of: tuple[tuple[int, ...], ...]
    sources_of: tuple[tuple[int, ...], ...]
    short: tuple[int, ...] = ()


def place_replicas(
    domains: Sequence[Sequence[str]], replicas: int, groups: Sequence[Sequence[Sequence[int]]] = ()
) -> ReplicaPlacement:
    """Places ``replicas`` copies of every rank.

    Args:
        domains: Per rank its domains, from its node outwards; the first and the last are used.
        replicas: Number of copies of each rank, without its own snapshot.
        groups: Per kind of data parallelism, from the one whose ranks share most state: per rank the ranks of its
            group, itself included. Copies are placed inside the first groups that have other nodes, and outside of
            them only if these have no more nodes.

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
    """Places missing copies of ``members`` on one another, as far as possible; adds to ``peers``."""
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
    _fill_up(peers, domains, order, replicas)


def _fill_up(peers: list[list[int]], domains: Sequence[Sequence[str]], order: Sequence[int], replicas: int) -> None:
    """Gives one copy after the other to the emptiest domain that has none of its source, there to the emptiest node.

    A node whose ranks hold ``MOST_TIMES`` as many copies as they have gets more only if no other is left.

    Args:
        peers: Per rank of the world the ranks that hold its copies; added to.
        domains: Per rank of the world its domains, of which the first and the last count.
        order: Ranks that hold one another's copies, those of a domain one after the other.
        replicas: Copies that each rank is to have, as far as there are nodes.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in order:
        ranks_of.setdefault(domains[rank][0], []).append(rank)
    nodes, groups = {node: at for at, node in enumerate(ranks_of)}, list(ranks_of.values())
    spans: dict[str, slice] = {}  # of the nodes of each domain
    for at, ranks in enumerate(groups):
        domain = domains[ranks[0]][-1]
        spans[domain] = slice(spans[domain].start if domain in spans else at, at + 1)
    sizes = np.array(list(map(len, groups)))
    loads = Counter(holder for rank in order for holder in peers[rank])
    held = np.array([sum(map(loads.__getitem__, ranks)) for ranks in groups])
    per_rank, in_domain = held / sizes, np.zeros(len(groups))  # copies per rank: of each node, and of all its domain
    for span in spans.values():
        in_domain[span] = held[span].sum() / sizes[span].sum()

    def emptiest(rank: int) -> int | None:
        """Returns the place of the node for the next copy; None if no other node is left."""
        used = [domains[holder] for holder in peers[rank]]
        closed = [spans[domains[rank][-1]], *(slice(nodes[n], nodes[n] + 1) for n, *_ in used if n in nodes)]
        shared = [spans[domain] for *_, domain in used if domain in spans]
        for besides, most in ((shared, MOST_TIMES * replicas), ([], MOST_TIMES * replicas), ([], np.inf)):
            fullness = in_domain.copy()
            fullness[per_rank >= most] = np.inf
            for span in (*closed, *besides):
                fullness[span] = np.inf
            first = int(fullness.argmin())
            if fullness[first] < np.inf:
                span = spans[domains[groups[first][0]][-1]]
                in_span = np.where(fullness[span] < np.inf, per_rank[span], np.inf)
                return int(span.start + in_span.argmin())
        return None

    for copies in range(1, replicas + 1):
        for rank in order:
            node = emptiest(rank) if len(peers[rank]) < copies else None
            if node is not None:
                holder = min(groups[node], key=loads.__getitem__)
                peers[rank].append(holder)
                loads[holder] += 1
                held[node] += 1
                per_rank[node], span = held[node] / sizes[node], spans[domains[holder][-1]]
                in_domain[span] = held[span].sum() / sizes[span].sum()
