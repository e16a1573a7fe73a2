"""Who reads what several ranks need of storage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core import shared_reading
from moe_ckpt.core.shared_reading import Group, Paths, anything_shared, groups_of, readers_of, rounds_of


def needs(*rows: str) -> list[np.ndarray]:
    return [np.array([each == "x" for each in row]) for row in rows]


MEGATRON = needs("xx.x.", "xx..x", "x.xx.", "x.x.x")
"""EP2 x DP2: weights that all have, experts of two ranks each, and optimizer state of two."""


def test_slices_are_shared_by_exactly_those_that_need_them():
    assert groups_of(0, MEGATRON) == [Group((0, 1, 2, 3), (0,)), Group((0, 1), (1,)), Group((0, 2), (3,))]
    assert groups_of(3, MEGATRON) == [Group((0, 1, 2, 3), (0,)), Group((2, 3), (2,)), Group((1, 3), (4,))]


def test_what_nobody_shares_is_in_no_group():
    apart = needs("xx..", "..x.", "...x")
    assert not anything_shared(apart)
    assert anything_shared(MEGATRON)
    assert [groups_of(rank, apart) for rank in range(3)] == [[], [], []]
    assert groups_of(1, needs("xx", "..", "x.")) == []


def test_more_ranks_than_a_team_divide_it_in_teams(monkeypatch):
    monkeypatch.setattr(shared_reading, "TEAM", 2)
    every = needs(*["x"] * 5)
    assert [groups_of(rank, every) for rank in range(5)] == [
        *[[Group((0, 1), (0,))]] * 2,
        *[[Group((2, 3), (0,))]] * 2,
        [],
    ]


def test_neighbours_are_read_by_the_same_rank_and_large_slices_by_the_one_with_least():
    assert readers_of([10] * 8, [4, 7], 80) == [4] * 4 + [7] * 4
    assert readers_of([100, 30, 30, 40, 100], [0, 1], 100) == [0, 1, 1, 1, 0]


def test_a_round_is_bounded_unless_one_slice_is_larger():
    sizes = [10, 10, 10, 500, 10]
    rounds = rounds_of(sizes, [0, 0, 1, 0, 1], 30)
    assert [[tuple(chunk) for chunk in each] for each in rounds] == [[(0, 0, 2), (1, 2, 3)], [(0, 3, 4)], [(1, 4, 5)]]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(2, 6), st.integers(20, 400))
def test_each_slice_has_one_reader_and_nobody_reads_much_more_than_the_others(sizes, ranks, most):
    readers = readers_of(sizes, range(ranks), most)
    loads = [sum(size for size, by in zip(sizes, readers, strict=True) if by == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    portion = most / ranks + max(sizes)  # of a round, and the slice that it ends with
    assert max(loads) - min(loads) <= 2 * portion
    rounds = rounds_of(sizes, readers, most)
    covered = [at for chunks in rounds for chunk in chunks for at in range(chunk.first, chunk.end)]
    assert covered == list(range(len(sizes)))
    assert all(sum(sizes[chunks[0].first : chunks[-1].end]) <= max(most, max(sizes)) for chunks in rounds)


@pytest.mark.parametrize("nodes", ["aaaa", "aabb", "abab", "abbb", "abcd"])
def test_every_rank_gets_every_chunk_and_every_other_node_gets_it_once(nodes):
    ranks = [0, 1, 2, 3]
    paths = Paths(ranks, nodes)
    assert paths.is_one_node == (nodes == "aaaa")
    for reader in ranks:
        for first in range(3):
            chunk = shared_reading.Chunk(reader, first, first + 1)
            sent = [(reader, target) for target in paths.from_reader(chunk)]
            sent += [(rank, target) for rank in ranks if rank != reader for target in paths.onward(chunk, rank)]
            assert sorted(target for _, target in sent) == [rank for rank in ranks if rank != reader]
            assert all(paths.source(chunk, target) == source for source, target in sent)
            crossed = [nodes[target] for source, target in sent if nodes[source] != nodes[target]]
            assert sorted(crossed) == sorted(set(nodes) - {nodes[reader]})
