"""What is sent to peers: exactly what they do not have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt_sim.cluster.redundancy import OperatorShare, deliveries, portion_saved

RANKS = st.integers(0, 7)


@st.composite
def shares(draw: st.DrawFn) -> list[OperatorShare]:
    nbytes, on = st.integers(0, 1000), st.frozensets(RANKS)
    count = draw(st.integers(0, 6))
    return [OperatorShare(f"op/{at}", draw(nbytes), draw(nbytes), draw(on), draw(on)) for at in range(count)]


@given(shares(), st.lists(RANKS, unique=True))
def test_shares_sum_and_nothing_is_sent_that_a_peer_has(share: list[OperatorShare], peers: list[int]):
    found = deliveries(share, peers)
    whole = sum(piece.weights + piece.state for piece in share)
    assert [each.peer for each in found] == peers
    for each in found:
        assert each.nbytes + each.saved == whole
        by_hand = 0
        for piece in share:
            for sent, there, size in (
                (each.weights, piece.weights_on, piece.weights),
                (each.state, piece.state_on, piece.state),
            ):
                assert (piece.operator in sent) == (size > 0 and each.peer not in there)
                by_hand += size * (piece.operator in sent)
        assert each.nbytes == by_hand
    assert 0 <= portion_saved(found) <= 1


GROUP, EXPERT_GROUP, OWN = (0, 1, 2, 3), (0, 2), (0,)


@pytest.mark.parametrize(
    ("of_rest", "of_experts", "saved"),
    [
        ((GROUP, GROUP), (OWN, OWN), 60 / 160),
        ((GROUP, GROUP), (EXPERT_GROUP, EXPERT_GROUP), 1.0),
        ((GROUP, OWN), (EXPERT_GROUP, OWN), (10 + 20) / 160),
        ((OWN, OWN), (OWN, OWN), 0.0),
    ],
    ids=["none", "none, experts data-parallel", "ZeRO-1, ZeRO-2", "ZeRO-3"],
)
def test_what_each_sharding_saves(of_rest, of_experts, saved: float):
    share = [OperatorShare("non_expert/0", 10, 50, *of_rest), OperatorShare("expert/0/0", 20, 80, *of_experts)]
    assert portion_saved(deliveries(share, [2])) == pytest.approx(saved)


def test_without_copies_nothing_is_saved():
    assert portion_saved(deliveries([OperatorShare("gate/0", 1, 2)], [])) == 0.0
