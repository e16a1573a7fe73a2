"""The budget for lost tokens: how it is split over values of K, and what a checkpoint must hold to keep it."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.policies.budget import (
    MLT_BUDGETS,
    PLT_BUDGETS,
    dynamic_k,
    resolve_budget,
    tokens_left,
    top_up,
    top_up_mlt,
)
from tests.unit.builders import catalog, context


def test_budgets_have_the_papers_names():
    assert PLT_BUDGETS == {"default": 0.05, "strict": 0.0375, "loose": 0.075}
    assert [resolve_budget(name) for name in PLT_BUDGETS] == list(PLT_BUDGETS.values())
    assert resolve_budget(0.01) == 0.01
    assert resolve_budget("default", names=MLT_BUDGETS) == 0.03


@pytest.mark.parametrize(
    ("lost", "routed", "k"),
    [
        (0, 0, 1),
        (1, 0, 6),
        (20, 1000, 1),  # the first level may lose 2 %, half of the budget
        (21, 1000, 2),
        (30, 1000, 2),  # the second one 1 %, half of the rest
        (31, 1000, 4),
        (35, 1000, 4),
        (36, 1000, 6),  # 8 experts would be more than there are
        (500, 1000, 6),
        (36, 1199, 4),  # more is routed, and the same loss is a smaller part of it
        (36, 1200, 2),
        (36, 1800, 1),
    ],
)
def test_k_doubles_when_its_share_is_spent(lost, routed, k):
    assert dynamic_k(1, 6, lost, routed, 0.04) == k


TOKENS = st.integers(0, 10**15)


@given(TOKENS, TOKENS, TOKENS, st.integers(1, 9), st.integers(1, 70), st.floats(0.001, 0.5))
def test_k_rises_with_lost_tokens_and_falls_with_routed_ones(lost, more, routed, k, experts, budget):
    experts = max(experts, k)
    found = dynamic_k(k, experts, lost, routed, budget)
    assert found in {min(k * 2**i, experts) for i in range(10)}
    assert found <= dynamic_k(k, experts, lost + more, routed, budget)
    assert found >= dynamic_k(k, experts, lost, routed + more, budget)


@given(st.integers(1, 8), st.floats(0.001, 0.5), st.integers(0, 10**15))
def test_what_levels_may_lose_is_together_below_the_budget(levels, budget, routed):
    """Levels that each lose exactly their share stay where they are; one token more, and K doubles."""
    shares = [Fraction(str(budget)) * routed / 2 ** (i + 1) for i in range(levels)]
    lost = int(sum(shares))
    assert lost <= Fraction(str(budget)) * routed
    assert dynamic_k(1, 2**levels, lost, routed, budget) <= 2 ** (levels - 1)
    assert dynamic_k(1, 2**levels, lost + 1, routed, budget) == 2**levels


def at(unsaved, lost, routed, **facts):
    counts = np.asarray(unsaved, dtype=np.int64)
    facts |= {"unsaved": counts, "lost_tokens": lost, "routed": np.atleast_1d(routed)}
    return context(catalog(*counts.shape), 9, **facts)


def test_top_up_by_hand():
    now = at([[4, 0, 4], [1, 9, 4]], lost=2, routed=100)
    assert tokens_left(now, 0.1) == 8
    assert top_up(now, {(1, 1)}, 0.1) == ((0, 0), (0, 2))
    assert top_up(now, {(1, 1), (0, 0), (0, 2)}, 0.1) == ()
    assert top_up(now, set(), 0.1) == ((0, 0), (0, 2), (1, 1))
    assert top_up(now, {(1, 1)}, 0.15) == ()


def test_where_the_budget_is_broken_already_all_that_lack_tokens_are_saved():
    assert top_up(at([[4, 0, 3]], lost=11, routed=100), {(0, 0)}, 0.1) == ((0, 2),)


def test_nothing_known_nothing_added():
    assert top_up(context(catalog(2, 4)), set(), 0.05) == ()
    assert top_up(context(catalog(0, 0)), set(), 0.05) == ()


@given(st.data())
def test_top_up_keeps_the_budget_with_the_fewest_experts(data):
    shape = data.draw(st.sampled_from([(1, 5), (2, 3), (2, 4)]))
    cells = [(layer, expert) for layer in range(shape[0]) for expert in range(shape[1])]
    unsaved = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(cells), max_size=len(cells)))).reshape(shape)
    lost, routed = data.draw(st.integers(0, 12)), data.draw(st.integers(60, 300))
    stored = set(data.draw(st.lists(st.sampled_from(cells))))
    budget = 0.07

    def kept(more):
        return (
            lost + sum(int(unsaved[c]) for c in cells if c not in stored | set(more)) <= Fraction(str(budget)) * routed
        )

    more = top_up(at(unsaved, lost, routed), stored, budget)
    assert not set(more) & stored
    if lost <= Fraction(str(budget)) * routed:
        assert kept(more)
        others = [c for c in cells if c not in stored]
        assert not any(kept(fewer) for n in range(len(more)) for fewer in combinations(others, n))
    else:
        assert set(more) == {c for c in cells if c not in stored and unsaved[c]}


def test_top_up_of_mlt_by_hand():
    """Parts of the layers' own tokens: 4/100, 0, 4/100 and 1/1000, 90/1000, 40/1000; mean over two layers."""
    now = at([[4, 0, 4], [1, 90, 40]], lost=500, routed=[100, 1000])
    assert top_up_mlt(now, {(1, 1)}, 0.0606) == ()
    assert top_up_mlt(now, {(1, 1)}, 0.0604) == ((0, 0),)
    assert top_up_mlt(now, set(), 0.0606) == ((1, 1),)
    assert top_up_mlt(now, set(), 1e-9) == ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2))
    assert top_up_mlt(context(catalog(0, 0)), set(), 0.05) == ()


@given(st.data())
def test_top_up_of_mlt_keeps_the_budget_with_the_fewest_experts(data):
    cells = [(layer, expert) for layer in range(2) for expert in range(3)]
    unsaved = np.array(data.draw(st.lists(st.integers(0, 9), min_size=6, max_size=6))).reshape(2, 3)
    routed = [data.draw(st.integers(27, 300)) for _ in range(2)]
    stored, budget = set(data.draw(st.lists(st.sampled_from(cells)))), 0.07

    def mlt(more):
        left = [c for c in cells if c not in stored | set(more)]
        return sum(Fraction(int(unsaved[c]), routed[c[0]]) for c in left) / 2

    now = at(unsaved, 0, routed)
    more = top_up_mlt(now, stored, budget)
    assert not set(more) & stored
    assert mlt(more) <= Fraction(str(budget))
    others = [c for c in cells if c not in stored]
    tight = Fraction(str(budget)) - Fraction(1, 10**11)  # by which parts are rounded up
    assert not any(mlt(fewer) <= tight for n in range(len(more)) for fewer in combinations(others, n))
