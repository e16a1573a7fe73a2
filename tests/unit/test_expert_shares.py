"""MoEtion's Algorithm 1: how many experts each layer saves, and which ones while their owners have room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.expert_shares import Taking, layer_shares
from moe_ckpt.policies.selectors import best_first


@pytest.mark.parametrize(
    ("risk", "sizes", "total", "shares"),
    [
        ((60, 30, 10), (8, 8, 8), 10, (6, 3, 1)),  # no remainder
        ((60, 30, 10), (8, 8, 8), 0, (0, 0, 0)),
        ((5, 3, 3), (8, 8, 8), 5, (2, 2, 1)),  # 2.27, 1.36, 1.36: the largest fraction, the first of equal ones
        ((1, 3), (8, 8), 2, (0, 2)),  # 0.5, 1.5: of equal fractions the one with more at risk
        ((7, 2, 1), (8, 8, 8), 3, (2, 1, 0)),  # 2.1, 0.6, 0.3
        ((90, 6, 4), (4, 4, 4), 10, (4, 4, 2)),  # 9 of 4: 6 are handed on, 3.6 and 2.4
        ((100, 10, 1), (2, 2, 2), 5, (2, 2, 1)),  # handed on twice
        ((10, 0, 0), (4, 4, 4), 6, (4, 1, 1)),  # to layers with nothing at risk at last
        ((10, 0, 0), (4, 4, 4), 3, (3, 0, 0)),  # and not before
        ((10, 10), (2, 8), 6, (2, 4)),  # layers of several sizes
        ((8, 1, 1), (4, 0, 4), 5, (4, 0, 1)),  # one without experts left
        ((0, 0, 0), (4, 4, 4), 5, (2, 2, 1)),  # nothing at risk: alike
        ((0, 0, 0), (1, 4, 4), 7, (1, 3, 3)),
        ((3, 1), (2, 2), 9, (2, 2)),  # more than there are
        ((), (), 3, ()),
    ],
)
def test_shares(risk, sizes, total, shares):
    assert layer_shares(risk, sizes, total) == shares


@pytest.mark.parametrize(("first", "shares"), [(0, (2, 2, 1)), (1, (1, 2, 2)), (2, (2, 1, 2)), (3, (2, 2, 1))])
def test_equal_fractions_go_round_from_the_first_layer(first, shares):
    assert layer_shares((0, 0, 0), (4, 4, 4), 5, first) == shares


def test_shares_are_exact_where_floats_would_not_be():
    """Fractions of 0.5 to 17 digits: the layer with less at risk has the larger one, or both are equal."""
    big = 10**18
    assert layer_shares((3 * big - 1, big + 1), (8, 8), 2) == (1, 1)
    assert layer_shares((3 * big, big), (8, 8), 2) == (2, 0)


layers = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=6)


@given(layers, st.integers(0, 60), st.integers(0, 9))
def test_all_is_shared_out_and_nobody_gets_less_than_the_formula_says(rows, total, first):
    risk, sizes = zip(*rows, strict=True)
    shares = layer_shares(risk, sizes, total, first)
    assert sum(shares) == min(total, sum(sizes))
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))
    total = min(total, sum(sizes))
    for one, size, share in zip(risk, sizes, shares, strict=True):
        assert share >= min(size, one * total // (sum(risk) or 1))


@given(layers, st.integers(0, 60), st.integers(1, 1000))
def test_only_the_ratios_of_what_is_at_risk_count(rows, total, times):
    risk, sizes = zip(*rows, strict=True)
    assert layer_shares([one * times for one in risk], sizes, total) == layer_shares(risk, sizes, total)


@given(st.lists(st.integers(0, 60), min_size=2, max_size=6), st.integers(1, 9), st.integers(0, 60))
def test_more_at_risk_never_gets_less(risk, size, total):
    shares = layer_shares(risk, [size] * len(risk), total)
    for one, its in zip(risk, shares, strict=True):
        assert all(its >= other for less, other in zip(risk, shares, strict=True) if less < one)


OWNERS = np.array((0, 0, 1, 1, 0, 0, 1, 1))
"""Of two layers of four experts each."""
LAYERS = np.array((0, 0, 0, 0, 1, 1, 1, 1))


def taken_already(*experts, of=8):
    return np.isin(np.arange(of), experts)


def taken(taking):
    return set(np.flatnonzero(taking.is_taken).tolist())


def test_experts_are_taken_best_first_within_layer_and_owner():
    taking = Taking(OWNERS, capacity=2, is_taken=taken_already())
    ordered = np.array([0, 4, 1, 2, 5, 7, 3])
    refused = taking.take_shares(ordered, 4, LAYERS, (2, 1))
    assert taken(taking) == {0, 4, 2}  # owner 0 is full, and layer 1
    assert refused.tolist() == [5, 7, 3], "their layers were full: they come next"
    taking.take(refused, most=4)
    assert taken(taking) == {0, 4, 2, 7}
    taking.take(ordered, most=9)
    assert taking.count == 4, "both owners are full"


def test_what_is_forced_counts_but_is_not_refused():
    taking = Taking(OWNERS, capacity=1, is_taken=taken_already(0, 1))
    taking.take(np.array([4, 6, 7]), most=4)
    assert taken(taking) == {0, 1, 6}
    assert taking.count == 3
    taking.take(np.array([2, 3]), most=2)
    assert taking.count == 3, "more than the most are taken already"


def test_without_a_capacity_owners_do_not_matter():
    taking = Taking(OWNERS, capacity=None, is_taken=taken_already())
    taking.take(np.array([0, 1, 4, 6]), most=3)
    assert taken(taking) == {0, 1, 4}


@given(
    st.permutations(range(12)),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
    st.tuples(*[st.integers(0, 4)] * 3),
    st.integers(0, 12),
    st.integers(0, 4) | st.none(),
)
def test_two_passes_take_what_a_second_look_at_all_of_them_would(ordered, owners, shares, most, capacity):
    groups = np.arange(12) // 4
    taking = Taking(np.array(owners), capacity, taken_already(of=len(owners)))
    taking.take(taking.take_shares(np.array(ordered), most, groups, shares), most)
    found: set[int] = set()
    for left in (dict(enumerate(shares)), None):
        for expert in ordered:
            mine = sum(owners[other] == owners[expert] for other in found)
            room = capacity is None or mine < capacity
            if expert not in found and len(found) < most and room and (left is None or left[groups[expert]]):
                found.add(expert)
                if left is not None:
                    left[groups[expert]] -= 1
    assert taken(taking) == found


@given(
    st.permutations(range(12)),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.integers(0, 12),
    st.integers(1, 4),
    st.sets(st.integers(0, 11), max_size=4),
)
def test_those_refused_are_whose_layer_was_full_when_their_turn_came(ordered, owners, left, most, capacity, forced):
    groups = np.arange(12) // 4
    taking = Taking(np.array(owners), capacity, taken_already(*forced, of=len(owners)))
    refused = taking.take_shares(np.array(ordered), most, groups, tuple(left))
    found, expected = {*forced}, []
    for expert in ordered:
        if expert in found or len(found) >= most:
            continue
        if not left[groups[expert]]:
            expected.append(expert)
        elif sum(owners[other] == owners[expert] for other in found) < capacity:
            found.add(expert)
            left[groups[expert]] -= 1
    assert taken(taking) == found
    if len(found) < most:  # else nobody asks
        assert refused.tolist() == expected


GROUPS = np.repeat([0, 1], [5, 4])


@given(
    st.lists(st.integers(0, 4), min_size=9, max_size=9),
    st.lists(st.integers(-1, 4), min_size=9, max_size=9),
    st.sampled_from((1, 1 << 40, 1 << 60)),  # the last one is too large for one number that says it all
)
def test_groups_are_put_in_order_one_by_one(unsaved, chosen_at, times):
    unsaved, chosen_at = np.array(unsaved) * times, np.array(chosen_at)
    order = sorted(range(9), key=lambda one: (GROUPS[one], -unsaved[one], chosen_at[one], one))
    assert best_first(GROUPS, unsaved, chosen_at).tolist() == order
