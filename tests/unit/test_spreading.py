"""Copies lie in as many failure domains as any placement of the same load reaches: against a flow made from scratch."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from itertools import permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.core.replica_placement import place_replicas

Domains = list[tuple[str, str]]
"""Per rank its node and its domain."""


class Flow:
    """Least costly flow of most copies, one after the other along the cheapest way left."""

    def __init__(self) -> None:
        self._edges: list[list] = []
        self._out: dict[Hashable, list[int]] = defaultdict(list)

    def edge(self, begin: Hashable, end: Hashable, room: int, cost: int = 0) -> None:
        for one, other, most, price in ((begin, end, room, cost), (end, begin, 0, -cost)):
            self._out[one].append(len(self._edges))
            self._edges.append([other, most, price])

    def run(self) -> tuple[int, int]:
        """Copies, and what they cost."""
        flow = cost = 0
        while True:
            costs, before, waiting = {"begin": 0}, {}, deque(["begin"])
            while waiting:
                one = waiting.popleft()
                for number in self._out[one]:
                    other, room, price = self._edges[number]
                    if room and costs[one] + price < costs.get(other, 10**9):
                        costs[other], before[other] = costs[one] + price, number
                        waiting.append(other)
            if "end" not in costs:
                return flow, cost
            at: Hashable = "end"
            while at != "begin":
                self._edges[before[at]][1] -= 1
                self._edges[before[at] ^ 1][1] += 1
                at = self._edges[before[at] ^ 1][0]
            flow, cost = flow + 1, cost + costs["end"]


def reachable(domains: Domains, replicas: int, load: int) -> tuple[int, int]:
    """Most copies that ranks can have if none holds over ``load``, and in how many domains all of them together lie."""
    flow = Flow()
    for rank, (_, own) in enumerate(domains):
        flow.edge("begin", rank, replicas)
        for domain in sorted({name for _, name in domains if name != own}):
            flow.edge(rank, (rank, domain), 1, -1)
            flow.edge(rank, (rank, domain), replicas)
        for node, domain in sorted(set(domains)):
            if domain != own:
                flow.edge((rank, domain), (rank, domain, node), 1)
        for holder, (node, domain) in enumerate(domains):
            if domain != own:
                flow.edge((rank, domain, node), ("holder", holder), 1)
    for holder in range(len(domains)):
        flow.edge(("holder", holder), "end", load)
    copies, cost = flow.run()
    return copies, -cost


def require_best(domains: Domains, replicas: int) -> None:
    placed = place_replicas(domains, replicas)
    copies = sum(map(len, placed.peers_of))
    spread = sum(len({domains[peer][1] for peer in peers}) for peers in placed.peers_of)
    load = max(map(len, placed.sources_of))
    for rank, peers in enumerate(placed.peers_of):
        outside = {node for node, domain in domains if domain != domains[rank][1]}
        assert len({domains[peer][0] for peer in peers} & outside) == len(peers) == min(replicas, len(outside))
    assert reachable(domains, replicas, load) == (copies, spread)
    assert reachable(domains, replicas, load - 1) != (copies, spread), "a lower load would have done"


def parts(whole: int, most: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Ways to write ``whole`` as a sum of at most so many numbers, the largest first."""
    if not whole:
        yield ()
    for first in range(min(whole, largest), 0, -1) if most else ():
        yield from ((first, *rest) for rest in parts(whole - first, most - 1, first))


def world(sizes: tuple[int, ...], ranks: tuple[int, ...]) -> Domains:
    """So many nodes in each domain, with so many ranks each."""
    nodes = [(f"n{domain}.{node}", f"r{domain}") for domain, size in enumerate(sizes) for node in range(size)]
    return [names for names, count in zip(nodes, ranks, strict=True) for _ in range(count)]


SHAPES = [sizes for nodes in range(2, 7) for sizes in parts(nodes, 4, nodes) if len(sizes) > 1]


def test_of_up_to_six_nodes_in_up_to_four_domains_every_world_is_placed_best():
    """In any order of domains, one rank per node."""
    for shape in SHAPES:
        for sizes in set(permutations(shape)):
            for replicas in range(1, min(4, sum(sizes))):
                require_best(world(sizes, (1,) * sum(sizes)), replicas)


def test_of_up_to_six_nodes_every_world_is_placed_best_whatever_ranks_its_nodes_have():
    for sizes in SHAPES:
        for ranks in product((1, 2), repeat=sum(sizes)):
            for replicas in range(1, min(4, sum(sizes))):
                require_best(world(sizes, ranks), replicas)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=2, max_size=5), st.integers(1, 4))
def test_worlds_of_any_shape_are_placed_best(racks: list[list[int]], replicas: int):
    domains = world(tuple(map(len, racks)), tuple(count for rack in racks for count in rack))
    require_best(domains, min(replicas, sum(map(len, racks)) - 1))


def test_literals():
    """The pair of nodes would hold one copy each, and the others three, so that each copy is in a domain of its own."""
    placed = place_replicas(world((2, 1, 1), (1, 1, 1, 1)), 2)
    assert [sorted(peers) for peers in placed.peers_of[:2]] == [[2, 3], [2, 3]]
    assert all(3 in peers for peers in placed.peers_of[:3])
    assert [len(sources) for sources in placed.sources_of] == [1, 1, 3, 3]
