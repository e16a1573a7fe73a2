"""Who writes what."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.operators import MoELayer
from moe_ckpt.core.placement import everywhere, expert_owner, interleaved_order


def layer(experts):
    return MoELayer(0, "moe", experts)


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
    assert interleaved_order([0, 0, 1, 1, 2, 2, 3, 3]) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert interleaved_order([5] * 8) == tuple(range(8))
    assert interleaved_order([6, 2, 6, 2, 2]) == (1, 0, 3, 2, 4)


def test_where_every_rank_holds_everything_all_are_peers_in_one_stage():
    placement = everywhere((layer(2), layer(4)), 2)
    assert placement.owners == ((0, 1), (0, 0, 1, 1))
    assert (placement.peers, placement.stages) == ((0, 1), (2,))


@given(experts=st.integers(1, 64), ranks=st.integers(1, 64))
def test_interleaving_is_a_permutation(experts, ranks):
    assert sorted(interleaved_order(everywhere((layer(experts),), ranks).owners[0])) == list(range(experts))


@given(depth=st.integers(1, 8), ranks=st.integers(1, 8))
def test_position_says_rank_when_ranks_divide_experts(depth, ranks):
    experts = depth * ranks
    owners = everywhere((layer(experts),), ranks).owners[0]
    assert [owners[expert] for expert in interleaved_order(owners)] == [p % ranks for p in range(experts)]
