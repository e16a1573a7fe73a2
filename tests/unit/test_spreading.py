"""Copies lie in as many failure domains as any placement within the bound reaches: against a flow made from scratch."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.core.replica_placement import place_replicas

Domains = list[tuple[str, str]]
"""Per rank its node and its domain."""
Peers = Sequence[Sequence[int]]


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


def reachable(domains: Domains, replicas: int, load: int, inside: Peers = ()) -> tuple[int, int]:
    """Most copies that ranks can have if none holds over ``load``, and in how many domains all of them together lie.

    inside: Of each rank, copies that have a place already; they are not counted.
    """
    flow, held = Flow(), Counter(holder for holders in inside for holder in holders)
    ranks_of = Counter(domains)
    for rank, (_, own) in enumerate(domains):
        there = [domains[holder] for holder in (inside[rank] if inside else ())]
        flow.edge("begin", rank, replicas - len(there))
        for domain in sorted({name for _, name in domains if name != own}):
            flow.edge(rank, (rank, domain), domain not in dict(map(reversed, there)), -1)
            flow.edge(rank, (rank, domain), replicas)
        for name in sorted(ranks_of):
            if name[1] != own and name not in there:
                flow.edge((rank, name[1]), name, 1)
    for name, ranks in sorted(ranks_of.items()):
        here = [max(0, load - held[rank]) for rank, each in enumerate(domains) if each == name]
        assert len(here) == ranks
        flow.edge(name, "end", sum(here))
    copies, cost = flow.run()
    return copies, -cost


def spread_of(domains: Domains, peers: Peers) -> int:
    """Pairs of a rank and a domain that has a copy of it."""
    return sum(len({domains[peer][1] for peer in holders}) for holders in peers)


def require_best(domains: Domains, replicas: int) -> None:
    """Most pairs of all placements in which no rank holds over twice its copies, or over what it must; of those, the
    least largest load."""
    placed = place_replicas(domains, replicas)
    copies, spread = sum(map(len, placed.peers_of)), spread_of(domains, placed.peers_of)
    load = max(map(len, placed.sources_of))
    for rank, peers in enumerate(placed.peers_of):
        outside = {node for node, domain in domains if domain != domains[rank][1]}
        assert len({domains[peer][0] for peer in peers} & outside) == len(peers) == min(replicas, len(outside))
    bound = 2 * replicas
    if load > bound:
        bound = load
        assert reachable(domains, replicas, load - 1)[0] < copies, "copies had another place"
    assert reachable(domains, replicas, bound) == (copies, spread)
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


def test_large_worlds_reach_the_load_that_counting_gives():
    """Where each copy can have a domain. Some of them, the t largest, may be left out of account: of each rank
    replicas - t copies lie in the others, or one more if it is in one of the t itself."""
    random, counted = Random(1), 0
    for _ in range(150):
        replicas, steep = random.randint(1, 6), random.choice((0.1, 1.0, 3.0))
        nodes = [1 + int(60 * random.random() ** (1 + steep * at)) for at in range(random.randint(replicas + 1, 40))]
        racks = [[random.choice((1, 4, 8)) for _ in range(count)] for count in nodes]
        sizes, ranks = sorted(map(sum, racks), reverse=True), sum(map(sum, racks))
        largest = [sum(sizes[:count]) for count in range(replicas + 1)]
        least = max(-(-(ranks * (replicas - t) + top) // (ranks - top)) for t, top in enumerate(largest))
        if least <= 2 * replicas or replicas == 1:
            domains = world(tuple(map(len, racks)), tuple(count for rack in racks for count in rack))
            placed = place_replicas(domains, replicas)
            assert spread_of(domains, placed.peers_of) == replicas * ranks
            assert max(map(len, placed.sources_of)) == least
            counted += replicas < least
    assert counted > 20, "of these no placement is even"


@pytest.mark.parametrize(("racks", "replicas"), [(((40, 40), (40, 8), (8,)), 2), (((40,), (30,), (20, 20), (20,)), 3)])
def test_worlds_of_over_a_hundred_ranks_are_placed_best(racks: tuple[tuple[int, ...], ...], replicas: int):
    require_best(world(tuple(map(len, racks)), tuple(count for rack in racks for count in rack)), replicas)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=3), min_size=2, max_size=5), st.data())
def test_what_groups_have_no_place_for_lies_in_as_many_domains_as_there_can_be(racks: list[list[int]], data):
    domains = world(tuple(map(len, racks)), tuple(count for rack in racks for count in rack))
    replicas = data.draw(st.integers(1, min(4, sum(map(len, racks)) - 1)))
    ranks, size = data.draw(st.permutations(range(len(domains)))), data.draw(st.integers(2, 4))
    groups = [tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)]
    group_of = [next(group for group in groups if rank in group) for rank in range(len(domains))]
    peers = place_replicas(domains, replicas, [group_of]).peers_of
    inside = [[peer for peer in peers[rank] if peer in group_of[rank]] for rank in range(len(domains))]
    copies, spread = reachable(domains, replicas, 2 * replicas, inside)
    if copies == sum(map(len, peers)) - sum(map(len, inside)):
        assert spread_of(domains, peers) - spread_of(domains, inside) >= spread


def test_copies_of_others_make_room_where_the_domains_that_are_left_are_full():
    """Ranks 0, 1 and 6 are racks of their own, and can take four each, of which groups took one or none."""
    domains, groups = world((1, 1, 4, 1), (1,) * 7), [(3, 4), (0, 1), (2, 6), (5,)]
    group_of = [next(group for group in groups if rank in group) for rank in range(7)]
    peers = place_replicas(domains, 2, [group_of]).peers_of
    assert all(len({domains[peer] for peer in holders}) == 2 for holders in peers)
    assert spread_of(domains, peers) == 14, "each in two racks"


def test_literals():
    """The pair of nodes would hold one copy each, and the others three, so that each copy is in a domain of its own."""
    placed = place_replicas(world((2, 1, 1), (1, 1, 1, 1)), 2)
    assert [sorted(peers) for peers in placed.peers_of[:2]] == [[2, 3], [2, 3]]
    assert all(3 in peers for peers in placed.peers_of[:3])
    assert [len(sources) for sources in placed.sources_of] == [1, 1, 3, 3]
