"""Who reads what several ranks need of storage."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import DamagedError, StoreError
from moe_ckpt.format.manifest import FileRecord
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.reading import reading_shares as shared_reading
from moe_ckpt.reading.index import StoredSlice
from moe_ckpt.reading.reading_shares import (
    Group,
    Route,
    SlotSpan,
    anything_shared,
    groups_of,
    readers_of,
    rounds_of,
    route_of,
    routes_of,
)
from moe_ckpt.reading.shared_reading import divide_reading
from tests.unit.engine_parts import ThreadRanks, run_threads


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
    assert rounds == [[(0, [0, 1]), (1, [2])], [(0, [3])], [(1, [4])]]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(2, 6), st.integers(20, 400))
def test_each_slice_has_one_reader_and_nobody_reads_much_more_than_the_others(sizes, ranks, most):
    readers = readers_of(sizes, range(ranks), most)
    loads = [sum(size for size, by in zip(sizes, readers, strict=True) if by == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    portion = most / ranks + max(sizes)  # of a round, and the slice that it ends with
    assert max(loads) - min(loads) <= 2 * portion
    rounds = rounds_of(sizes, readers, most)
    numbers = [[at for _, numbers in chunks for at in numbers] for chunks in rounds]
    assert [at for of_round in numbers for at in of_round] == list(range(len(sizes)))
    assert all(sum(sizes[at] for at in of_round) <= max(most, max(sizes)) for of_round in numbers)


@pytest.mark.parametrize("nodes", ["aaaa", "aabb", "abab", "abbb", "abcd"])
def test_every_rank_gets_the_bytes_and_every_other_node_gets_them_once(nodes):
    ranks = [0, 1, 2, 3]
    for source in ranks:
        for turn in range(3):
            route = route_of(source, ranks, nodes, lambda members: members[turn % len(members)])  # noqa: B023
            sent = [*route.from_source, *route.onward]
            assert sorted(target for _, target in sent) == [rank for rank in ranks if rank != source]
            assert {sender for sender, _ in route.from_source} == {source}
            assert {sender for sender, _ in route.onward} <= {target for _, target in route.from_source}
            crossed = [nodes[target] for sender, target in sent if nodes[sender] != nodes[target]]
            assert sorted(crossed) == sorted(set(nodes) - {nodes[source]})


NODES = ["a", "a", "a", "b", "b"]


def test_one_rank_of_a_node_receives_and_the_others_get_it_from_that_one():
    all_of_it = SlotSpan(3, "shard", 0, 90)
    [(span, route)] = routes_of(NODES, {rank: [all_of_it] for rank in (0, 1, 2)})
    assert (span, route) == (all_of_it, Route(((3, 0),), ((0, 1), (0, 2))))


def test_what_only_some_need_goes_to_those():
    found = routes_of(NODES, {0: [SlotSpan(3, "shard", 0, 10)], 1: [SlotSpan(3, "shard", 6, 16)]})
    assert found == [
        (SlotSpan(3, "shard", 0, 6), Route(((3, 0),), ())),
        (SlotSpan(3, "shard", 6, 10), Route(((3, 1),), ((1, 0),))),
        (SlotSpan(3, "shard", 10, 16), Route(((3, 1),), ())),
    ]


def test_the_ranks_of_a_node_take_turns():
    needed = [SlotSpan(3, f"shard_{number}", 0, 8) for number in range(6)]
    found = routes_of(NODES, dict.fromkeys((0, 1, 2), needed))
    assert Counter(target for _, route in found for _, target in route.from_source) == {0: 2, 1: 2, 2: 2}


spans = st.lists(st.integers(0, 40), unique=True, max_size=8).map(
    lambda edges: [tuple(sorted(edges)[at : at + 2]) for at in range(0, len(edges) - 1, 2)]
)


@given(
    st.dictionaries(st.sampled_from([0, 1, 2, 4]), st.dictionaries(st.sampled_from(["one", "two"]), spans), max_size=4)
)
def test_every_rank_gets_what_it_needs_and_every_node_receives_it_once(asked):
    """Rank 4 is on the holder's node."""
    needed = {
        rank: [SlotSpan(3, path, *span) for path, found in slots.items() for span in found]
        for rank, slots in asked.items()
    }
    got: Counter[tuple[int, str, int]] = Counter()
    for (_, path, begin, end), route in routes_of(NODES, needed):
        crossed = [target for source, target in route.from_source if NODES[source] != NODES[target]]
        assert len(crossed) <= 1
        assert all(NODES[source] == NODES[target] for source, target in route.onward)
        for _, rank in (*route.from_source, *route.onward):
            got.update((rank, path, byte) for byte in range(begin, end))
    expected = {
        (rank, path, byte)
        for rank, those in needed.items()
        for _, path, begin, end in those
        for byte in range(begin, end)
    }
    assert got == dict.fromkeys(expected, 1)


def stored(number: int, checksum: int = 0) -> StoredSlice:
    entry = SliceEntry(f"model/{number}", "op", "F32", (0,), (4,), (4,), 16 * number, 16 * number + 16, checksum)
    return StoredSlice(entry, FileRecord("step/shard", 1000, 100, "", 1, 0))


SLICES = [stored(number) for number in range(6)]


def divided(needed, slices=SLICES):
    """Who reads each slice, by rank; None where nothing is shared. needed, slices: of a rank, or of all."""

    def body(comm):
        mine = needed(comm.rank) if callable(needed) else needed
        listed = slices(comm.rank) if callable(slices) else slices
        found = divide_reading(comm, listed, mine if callable(mine) else lambda: mine)
        return None if found is None else [found.is_read_here(each) for each in listed]

    return run_threads(ThreadRanks(2), body)


def test_each_slice_that_both_need_is_read_by_one():
    one, other = divided(SLICES)
    assert [here != there for here, there in zip(one, other, strict=True)] == [True] * 6
    assert sum(one) == sum(other) == 3


def test_what_only_one_needs_that_one_reads():
    one, other = divided(lambda rank: SLICES[rank:])
    assert one[0]
    assert sum(one) + sum(other) - other[0] == 6


def test_all_read_by_themselves_where_nothing_is_shared_or_ranks_differ_or_one_does_not_know(caplog):
    assert divided(lambda rank: SLICES[3 * rank : 3 * rank + 3]) == [None, None]
    assert divided(SLICES, lambda rank: [*SLICES[:5], stored(5, f"{rank}" * 16)]) == [None, None]

    def unknown():
        raise ValueError("no such tensor")

    assert divided(lambda rank: unknown if rank else SLICES) == [None, None]
    assert "rank 1 cannot tell what it needs of storage: no such tensor" in caplog.text


def test_an_error_of_one_rank_is_raised_on_all():
    def body(comm):
        def load():
            if comm.rank:
                raise DamagedError("step/shard", "checksum mismatch")

        try:
            divide_reading(comm, SLICES, lambda: SLICES).agreed("step", load)
        except StoreError as error:
            return type(error).__name__, str(error)

    (one, said), (other, _) = run_threads(ThreadRanks(2), body)
    assert (one, other) == ("StoreError", "DamagedError")
    assert said.startswith("rank 1 cannot resume from checkpoint step: ")
