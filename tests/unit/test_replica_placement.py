"""Where copies lie: outside of what fails with their source, evenly, and alike whoever asks."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.peers.replica_placement import ReplicaPlacement, place_replicas

Domains = list[tuple[str, ...]]


def nodes_of(count: int, ranks: int, per_rack: int = 0) -> Domains:
    """Equal nodes, in racks if told so."""
    found = [(f"node{n}",) if not per_rack else (f"node{n}", f"rack{n // per_rack}") for n in range(count)]
    return [names for names in found for _ in range(ranks)]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Domains, int]:
    """Racks of any number of nodes of any number of ranks, in any order, and how many copies there can be."""
    racks = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=2, max_size=5))
    named = draw(st.booleans())
    domains = [
        (f"n{rack}.{node}", f"r{rack}") if named else (f"n{rack}.{node}",)
        for rack, nodes in enumerate(racks)
        for node, ranks in enumerate(nodes)
        for _ in range(ranks)
    ]
    return draw(st.permutations(domains)), draw(st.integers(1, sum(map(len, racks)) - 1))


def outside(domains: Domains, rank: int) -> set[str]:
    """Nodes on which a copy of this rank may lie."""
    return {names[0] for names in domains if names[-1] != domains[rank][-1]}


@given(worlds())
def test_copies_are_safe_wherever_the_world_allows_it(world: tuple[Domains, int]):
    domains, replicas = world
    placed = place_replicas(domains, replicas)
    for rank, peers in enumerate(placed.peers_of):
        allowed = outside(domains, rank)
        assert {domains[peer][0] for peer in peers} <= allowed
        assert len({domains[peer][0] for peer in peers}) == len(peers) == min(replicas, len(allowed))
        assert (rank in placed.short) == (len(allowed) < replicas)
    assert placed.sources_of == tuple(
        tuple(r for r, peers in enumerate(placed.peers_of) if holder in peers) for holder in range(len(domains))
    )
    assert placed == place_replicas(list(domains), replicas)


@given(st.integers(2, 7), st.integers(1, 4), st.integers(1, 3), st.data())
def test_equal_domains_carry_equal_loads(racks: int, nodes: int, ranks: int, data: st.DataObject):
    replicas = data.draw(st.integers(1, (racks - 1) * nodes))
    domains = nodes_of(racks * nodes, ranks, per_rack=nodes)
    placed = place_replicas(domains, replicas)
    loads = {len(sources) for sources in placed.sources_of}
    assert loads == {replicas} if replicas < racks else max(loads) <= 2 * replicas
    for peers in placed.peers_of:
        assert len({domains[peer][1] for peer in peers}) == min(replicas, racks - 1), "distinct racks while there are"


@given(worlds())
def test_copies_share_a_domain_only_where_the_others_are_full(world: tuple[Domains, int]):
    domains, replicas = world
    placed = place_replicas(domains, replicas)
    held, ranks = Counter[str](), Counter(names[-1] for names in domains)
    for peers in placed.peers_of:
        held.update(domains[peer][-1] for peer in peers)
    for rank, peers in enumerate(placed.peers_of):
        unused = set(ranks) - {domains[rank][-1], *(domains[peer][-1] for peer in peers)}
        shared = len({domains[peer][-1] for peer in peers}) < len(peers)
        assert not shared or all(held[domain] >= 2 * replicas * ranks[domain] for domain in unused)


@given(worlds())
def test_a_rank_holds_over_twice_as_many_only_if_a_copy_had_no_other_node(world: tuple[Domains, int]):
    domains, replicas = world
    placed = place_replicas(domains, replicas)
    loads = [len(sources) for sources in placed.sources_of]
    roomy = {names[0] for load, names in zip(loads, domains, strict=True) if load < 2 * replicas}
    for load, sources in zip(loads, placed.sources_of, strict=True):
        others = [outside(domains, rank) - {domains[peer][0] for peer in placed.peers_of[rank]} for rank in sources]
        assert load <= 2 * replicas or any(not (nodes & roomy) for nodes in others)


@given(worlds())
def test_all_ranks_hold_alike_where_no_domain_is_large(world):
    domains, replicas = world
    loads = [len(sources) for sources in place_replicas(domains, replicas).sources_of]
    if (replicas + 1) * max(Counter(names[-1] for names in domains).values()) <= len(domains):
        assert set(loads) == {replicas}


@given(worlds())
def test_ranks_of_a_node_hold_about_as_many(world):
    domains, replicas = world
    loads = [len(sources) for sources in place_replicas(domains, replicas).sources_of]
    for node in {names[0] for names in domains}:
        held = [loads[rank] for rank, names in enumerate(domains) if names[0] == node]
        assert max(held) - min(held) <= 1


def test_a_small_domain_beside_large_ones_holds_up_to_twice_as_many():
    domains = [("a0", "A"), ("a1", "A"), ("b0", "B"), ("b1", "B"), ("c0", "C")]
    placed = place_replicas(domains, 2)
    assert all(len({domains[peer][-1] for peer in peers}) == 2 for peers in placed.peers_of)
    assert placed.sources_of[4] == (0, 1, 2, 3), "c0 holds twice as many as it has"
    large = [(f"{rack}{node}", rack) for rack, nodes in (("A", 10), ("B", 10), ("C", 1)) for node in range(nodes)]
    assert len(place_replicas(large, 2).sources_of[20]) == 4, "of 20 ranks, since no rank holds over four copies"


def lethal(placed: ReplicaPlacement, domains: Domains, lost: int) -> int:
    """Sets of so many lost nodes that take a rank along with all of its copies."""
    names = sorted({each[0] for each in domains})
    return sum(
        any(
            domains[rank][0] in gone and all(domains[peer][0] in gone for peer in peers)
            for rank, peers in enumerate(placed.peers_of)
        )
        for gone in map(set, combinations(names, lost))
    )


@pytest.mark.parametrize(("nodes", "replicas", "groups"), [(8, 1, 4), (9, 2, 3), (12, 3, 3)])
def test_as_few_sets_of_lost_nodes_as_there_can_be_destroy_a_copy(nodes: int, replicas: int, groups: int):
    """Groups of r + 1 nodes that hold one another's copies (Gemini): one set each, where a ring has one per node."""
    domains = nodes_of(nodes, 2)
    placed = place_replicas(domains, replicas)
    assert lethal(placed, domains, replicas) == 0
    assert lethal(placed, domains, replicas + 1) == groups


def test_literals():
    assert place_replicas(nodes_of(2, 2), 1).peers_of == ((2,), (3,), (0,), (1,))
    assert place_replicas(nodes_of(4, 1), 1).peers_of == ((2,), (3,), (0,), (1,))
    assert place_replicas(nodes_of(3, 1), 1).peers_of == ((1,), (2,), (0,))
    two_racks = place_replicas(nodes_of(4, 1, per_rack=2), 2)
    assert two_racks.peers_of == ((2, 3), (3, 2), (0, 1), (1, 0))
    renumbered = place_replicas([("b",), ("a",), ("b",), ("a",)], 1)
    assert renumbered.peers_of == ((1,), (0,), (3,), (2,))


def test_unequal_nodes_share_the_load_where_two_copies_can():
    domains = [("a",)] * 3 + [("b",)] * 2 + [("c",)] * 2 + [("d",)] * 3
    placed = place_replicas(domains, 2)
    assert {len(sources) for sources in placed.sources_of} == {2}


def test_who_cannot_have_as_many_is_named():
    domains = [("a", "r0"), ("b", "r0"), ("c", "r0"), ("d", "r1")]
    placed = place_replicas(domains, 2)
    assert placed.short == (0, 1, 2), "outside of r0 there is one node"
    assert placed.peers_of == ((3,), (3,), (3,), placed.peers_of[3])
    assert len(placed.peers_of[3]) == 2


@pytest.mark.parametrize(
    ("domains", "replicas", "said"),
    [
        (nodes_of(1, 4), 1, r"replicas=1.*0 other nodes \(1 in all\)"),
        (nodes_of(3, 2), 3, r"replicas=3.*2 other nodes \(3 in all\)"),
        (nodes_of(3, 1, per_rack=3), 1, "failure_domain='rack0'.*all 3 nodes"),
        ([("a", "r0"), ("a", "r1"), ("b", "r1")], 1, "rank 1 says 'r1'.*'r0'"),
    ],
)
def test_impossible_wishes_name_both_numbers(domains: Domains, replicas: int, said: str):
    with pytest.raises(ConfigError, match=said):
        place_replicas(domains, replicas)


def test_no_copies_are_no_placement():
    assert place_replicas(nodes_of(1, 2), 0) == ReplicaPlacement(((), ()), ((), ()))


def test_a_large_world_takes_time_in_proportion():
    """Not measured in seconds: what a rank's turn costs does not depend on how many ranks there are."""
    placed = place_replicas(nodes_of(2048, 8, per_rack=16), 3)
    assert {len(sources) for sources in placed.sources_of} == {3}


# --- groups that hold the same state (MoEtion, Algorithm 2) ---


@st.composite
def grouped_worlds(draw: st.DrawFn) -> tuple[Domains, int, list[list[tuple[int, ...]]]]:
    """Worlds whose ranks are in groups of any size, and those in larger ones."""
    domains, replicas = draw(worlds())
    ranks = draw(st.permutations(range(len(domains))))
    inner, outer = draw(st.integers(1, len(ranks))), draw(st.integers(1, 3))
    kinds = []
    for size in (inner, inner * outer):
        groups = [tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)]
        kinds.append([next(group for group in groups if rank in group) for rank in range(len(ranks))])
    return domains, replicas, kinds


@given(grouped_worlds())
def test_groups_change_where_copies_lie_and_not_how_safe_they_are(world):
    domains, replicas, kinds = world
    placed = place_replicas(domains, replicas, kinds)
    for rank, peers in enumerate(placed.peers_of):
        allowed = outside(domains, rank)
        assert {domains[peer][0] for peer in peers} <= allowed
        assert len({domains[peer][0] for peer in peers}) == len(peers) == min(replicas, len(allowed))
        for groups in kinds:
            inside = {domains[peer][0] for peer in groups[rank]} & allowed
            placed_inside = [peer for peer in peers if peer in groups[rank]]
            assert len(placed_inside) >= min(replicas, len(inside)), "first inside, as far as there are nodes"
    assert (len(placed.short) == 0) == all(len(peers) == replicas for peers in placed.peers_of)
    assert placed.sources_of == tuple(
        tuple(r for r, peers in enumerate(placed.peers_of) if holder in peers) for holder in range(len(domains))
    )


def test_a_group_of_neighbours_holds_its_own_copies():
    pairs = [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert place_replicas(nodes_of(4, 1), 1, [pairs]).peers_of == ((1,), (0,), (3,), (2,))
    assert place_replicas(nodes_of(2, 2), 1, [pairs]).peers_of == ((2,), (3,), (0,), (1,)), "a node is no other node"
    both = place_replicas(nodes_of(4, 1), 2, [pairs]).peers_of
    assert [peers[0] for peers in both] == [1, 0, 3, 2], "one inside, one outside"
    assert sorted(peers[1] for peers in both) == [0, 1, 2, 3], "evenly"


def test_a_group_comes_before_another_rack_and_then_a_rack_without_a_copy():
    domains = [("a0", "A"), ("a1", "A"), ("b0", "B"), ("b1", "B"), ("c0", "C"), ("c1", "C")]
    four, rest = (0, 1, 2, 3), (4, 5)
    placed = place_replicas(domains, 2, [[four] * 4 + [rest] * 2]).peers_of
    assert placed[:4] == ((2, 3), (3, 2), (0, 1), (1, 0)), "inside the group"
    pairs = [(0, 2), (1, 3), (0, 2), (1, 3), rest, rest]
    for rank, peers in enumerate(place_replicas(domains, 2, [pairs]).peers_of):
        assert {domains[peer][1] for peer in (rank, *peers)} == {"A", "B", "C"}, "one inside, one in the third rack"


def test_groups_of_a_large_world_take_no_longer_where_all_copies_are_inside():
    groups = [tuple(range(at // 16 * 16, at // 16 * 16 + 16)) for at in range(2048)]
    placed = place_replicas(nodes_of(2048, 1), 3, [groups])
    assert all(set(peers) <= set(groups[rank]) for rank, peers in enumerate(placed.peers_of))
    assert {len(sources) for sources in placed.sources_of} == {3}


class Counted(list):
    """Counts how often it is asked."""

    asked = 0

    def __getitem__(self, at):
        self.asked += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("racks", [(2,) * 16, (14, 11, 5, 2)])
def test_what_lies_outside_of_groups_takes_time_in_proportion_to_ranks(racks):
    """Per rank, of a world and of one that is twice as large."""
    asked = []
    for times in (32, 64):
        domains = Counted(
            (f"n{rack}.{node}", f"r{rack}") for rack, nodes in enumerate(racks) for node in range(nodes * times)
        )
        ranks, half = len(domains), len(domains) // 2
        place_replicas(domains, 3, [[tuple(sorted((rank, (rank + half) % ranks))) for rank in range(ranks)]])
        asked.append(domains.asked / ranks)
    assert asked[1] < 1.5 * asked[0], asked
