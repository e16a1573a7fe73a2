"""The budget for lost tokens: how it is split over values of K, and what a checkpoint must hold to keep it."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.plan import Tier
from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.policies.budget import PLT_BUDGETS, at_risk, level_k, resolve_budget, tokens_left, top_up
from tests.unit.builders import catalog, context


def test_budgets_have_the_papers_names():
    assert PLT_BUDGETS == {"default": 0.05, "strict": 0.0375, "loose": 0.075}
    assert [resolve_budget(name) for name in PLT_BUDGETS] == list(PLT_BUDGETS.values())
    assert resolve_budget(0.01) == 0.01


def faults(*pairs):
    return tuple(FaultRecord(step, lost, 1, routed) for step, (lost, routed) in enumerate(pairs))


@pytest.mark.parametrize(
    ("history", "k"),
    [
        ((), 1),
        (((20, 1000),), 1),  # the first level may lose 2 % of 1000, half of the budget
        (((21, 1000),), 2),
        (((20, 1000), (20, 2000)), 1),  # 40 of 2000
        (((20, 1000), (21, 2000)), 2),
        (((21, 1000), (10, 1000)), 2),  # the second one 1 %, with nothing spent
        (((21, 1000), (10, 1000), (1, 1000)), 4),
        (((21, 1000), (11, 1000), (6, 1000)), 6),  # 8 experts would be more than there are
        (((21, 1000), (11, 1000), (6, 1000), (500, 1000)), 6),
        (((1, 0),), 2),
    ],
)
def test_k_doubles_when_its_share_is_spent(history, k):
    assert level_k(faults(*history), 1, 6, 0.04) == k


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 1000)), max_size=12),
    st.integers(1, 9),
    st.integers(1, 70),
    st.floats(0.001, 0.5),
)
def test_k_never_falls_and_never_leaves_its_levels(history, k, experts, budget):
    experts = max(experts, k)
    ks = [level_k(faults(*history[:n]), k, experts, budget) for n in range(len(history) + 1)]
    assert ks == sorted(ks)
    assert set(ks) <= {min(k * 2**i, experts) for i in range(10)}


@given(st.integers(1, 8), st.floats(0.001, 0.5), st.integers(1, 10**15))
def test_what_levels_may_lose_is_together_below_the_budget(levels, budget, routed):
    """Levels that each lose exactly their share stay where they are; one token more, and K doubles."""
    shares = [int(Fraction(str(budget)) * routed / 2 ** (i + 1)) for i in range(levels)]
    assert sum(shares) <= budget * routed
    history = [(share + 1, routed) for share in shares[:-1]]
    assert level_k(faults(*history, (shares[-1], routed)), 1, 2**levels, budget) == 2 ** (levels - 1)
    assert level_k(faults(*history, (shares[-1] + 1, routed)), 1, 2**levels, budget) == 2**levels


def at(unsaved, lost, routed, **facts):
    counts = np.asarray(unsaved, dtype=np.int64)
    facts |= {"unsaved": {Tier.STORAGE: counts}, "lost_tokens": lost, "routed_tokens": routed}
    return context(catalog(*counts.shape), 9, **facts)


def test_top_up_by_hand():
    now = at([[4, 0, 4], [1, 9, 4]], lost=2, routed=100)
    assert (tokens_left(now, 0.1), at_risk(now, {(1, 1)})) == (8, 13)
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
