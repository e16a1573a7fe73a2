"""Who writes what."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.core.placement import deal_by_bytes, expert_owner, interleaved_order


def test_owners_are_contiguous_blocks():
    assert [expert_owner(e, 8, 4) for e in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [expert_owner(e, 8, 3) for e in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [expert_owner(e, 2, 4) for e in range(2)] == [0, 2]


@given(experts=st.integers(1, 64), ranks=st.integers(1, 64))
def test_owners_are_even(experts, ranks):
    owners = [expert_owner(e, experts, ranks) for e in range(experts)]
    assert owners == sorted(owners)
    assert all(0 <= owner < ranks for owner in owners)
    assert max(Counter(owners).values()) == -(-experts // ranks)


def test_interleaving_takes_one_of_each_rank_in_turn():
    assert interleaved_order(8, 4) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert interleaved_order(8, 1) == tuple(range(8))


@given(experts=st.integers(1, 64), ranks=st.integers(1, 64))
def test_interleaving_is_a_permutation(experts, ranks):
    assert sorted(interleaved_order(experts, ranks)) == list(range(experts))


@given(depth=st.integers(1, 8), ranks=st.integers(1, 8))
def test_position_says_rank_when_ranks_divide_experts(depth, ranks):
    experts = depth * ranks
    owners = [expert_owner(e, experts, ranks) for e in interleaved_order(experts, ranks)]
    assert owners == [p % ranks for p in range(experts)]


def test_dealing_gives_the_biggest_first_to_the_least_loaded():
    assert deal_by_bytes({"a": 1, "b": 1, "c": 2}, 2) == {"c": 0, "a": 1, "b": 1}
    assert deal_by_bytes({}, 2) == {}


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 50), max_size=7), ranks=st.integers(1, 3))
def test_dealing_is_within_four_thirds_of_the_best(sizes, ranks):
    items = {f"op{i}": n for i, n in enumerate(sizes)}
    owner = deal_by_bytes(items, ranks)
    assert owner.keys() == items.keys()

    def peak(assignment):
        return max(sum(n for n, r in zip(sizes, assignment, strict=True) if r == rank) for rank in range(ranks))

    best = min(peak(choice) for choice in product(range(ranks), repeat=len(sizes)))
    assert 3 * peak([owner[f"op{i}"] for i in range(len(sizes))]) <= 4 * best


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=12), st.integers(1, 5), st.randoms())
def test_dealing_does_not_depend_on_order(sizes, ranks, random):
    shuffled = list(sizes.items())
    random.shuffle(shuffled)
    assert deal_by_bytes(sizes, ranks) == deal_by_bytes(dict(shuffled), ranks)
