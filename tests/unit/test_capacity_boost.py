"""The arithmetic of the capacity boost: what is dealt out, conserved, and when it ends. In numpy and torch alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moe_ckpt.boost.layer import UNIT, allowance, capacities, deal, parts_of, share

COUNTS = st.lists(st.integers(0, 10_000), min_size=1, max_size=9)


def ints(values) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


@st.composite
def passes(draw):
    """Assigned tokens, tokens left to make up, capacity."""
    assigned = draw(COUNTS)
    left = draw(st.lists(st.integers(0, 300), min_size=len(assigned), max_size=len(assigned)))
    return ints(assigned), ints(left), draw(st.integers(1, 5_000))


@given(COUNTS, st.integers(0, 100_000))
@example([4702, 8212, 10_000, 10_000], 2429)  # the first one's share is a whole number
def test_share_gives_all_there_is_and_nobody_more_than_wanted(wanted, pool):
    wanted = ints(wanted)
    dealt = share(wanted, np.int64(pool))
    assert dealt.sum() == min(pool, wanted.sum())
    assert (dealt >= 0).all()
    assert (dealt <= wanted).all()
    exact = wanted * min(pool, wanted.sum()) / max(wanted.sum(), 1)
    assert (np.abs(dealt - exact) < 1).all()


@given(passes(), st.floats(0.001, 1))
def test_a_layers_capacity_is_conserved_and_nobody_has_less_than_it_uses(found, boost):
    assigned, left, capacity = found
    unused, over = (capacity - assigned).clip(min=0), (assigned - capacity).clip(min=0)
    most, carried = allowance(np.full_like(assigned, capacity), left, np.zeros_like(left), parts_of(boost))
    extra = share(over.clip(max=most), unused.sum())
    room = capacities(capacity, unused, extra)
    assert room.sum() == capacity * len(assigned)
    assert (room >= np.minimum(assigned, capacity + extra)).all(), "what an expert used stays its own"
    assert (room[left == 0] <= capacity).all(), "only experts that lost tokens have more"
    assert (extra <= left).all()
    assert (extra <= over).all()
    assert (extra <= np.ceil(capacity * boost + 1e-3)).all()
    assert (carried < UNIT).all()


@given(passes(), st.floats(0.001, 1), st.integers(0, 2**31))
def test_torch_computes_the_same(found, boost, pool):
    assigned, left, capacity = found
    carried = ints(np.arange(len(left)) * 1000 % UNIT)
    there = allowance(torch.from_numpy(assigned), torch.from_numpy(left), torch.from_numpy(carried), parts_of(boost))
    here = allowance(assigned, left, carried, parts_of(boost))
    assert [part.tolist() for part in there] == [part.tolist() for part in here]
    assert share(torch.from_numpy(left), torch.tensor(pool)).tolist() == share(left, np.int64(pool)).tolist()
    unused, extra = (capacity - assigned).clip(min=0), share(left * (assigned >= capacity), np.int64(0))
    rooms = [capacities(capacity, *pair) for pair in ((unused, extra), map(torch.from_numpy, (unused, extra)))]
    assert rooms[0].tolist() == rooms[1].tolist()


@given(st.integers(1, 500), st.integers(1, 200), st.floats(0.01, 1))
def test_a_boost_ends_when_the_lost_tokens_are_made_up_not_before_and_not_after(lost, ordinary, boost):
    parts, left, carried, taken, passes_needed = parts_of(boost), ints([lost]), ints([0]), 0, 0
    while left[0]:
        most, carried = allowance(ints([ordinary]), left, carried, parts)
        left, taken, passes_needed = left - most, taken + int(most[0]), passes_needed + 1
        assert taken == min(lost, passes_needed * ordinary * parts // UNIT), "the portion, however small a pass is"
    assert taken == lost
    assert carried[0] < UNIT
    assert not allowance(ints([ordinary]), left, carried, parts)[0].any()
    assert not allowance(ints([ordinary]), left, carried, parts)[1].any(), "nothing is carried into a later boost"


@given(COUNTS, st.integers(1, 7))
def test_parts_of_ranks_are_the_whole_and_about_equal(tokens, ranks):
    tokens = ints(tokens)
    parts = [deal(tokens, ranks, place) for place in range(ranks)]
    assert (sum(parts) == tokens).all()
    assert (np.max(parts, axis=0) - np.min(parts, axis=0) <= 1).all()


def test_single_tokens_go_to_different_ranks():
    parts = [deal(ints([[1, 1, 1, 1], [0, 1, 0, 1]]), 2, place).tolist() for place in range(2)]
    assert parts == [[[1, 0, 1, 0], [0, 1, 0, 0]], [[0, 1, 0, 1], [0, 0, 0, 1]]]


@pytest.mark.parametrize(("boost", "parts"), [(0.1, 100_000), (1, UNIT), (1e-9, 1)])
def test_parts(boost, parts):
    assert parts_of(boost) == parts
