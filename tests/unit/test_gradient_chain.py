"""Chains of anchors and gradients, against a walk over everything."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import GradientGapError
from moe_ckpt.ledger.gradient_chain import Chain, LoggedStep, chain

OPERATORS = ("gate/0", "expert/0/0", "expert/0/1")


def some(*operators):
    return frozenset(operators)


@st.composite
def logs(draw):
    """Steps with gaps, gradients that were lost, skipped steps, anchors that were not updated."""
    subset = st.frozensets(st.sampled_from(OPERATORS))
    first = draw(st.integers(0, 3))
    held = draw(st.lists(st.one_of(st.none(), st.tuples(subset, subset, subset)), max_size=9))
    return {
        first + at: LoggedStep(updated, updated - lost, anchored)
        for at, found in enumerate(held)
        if found is not None
        for updated, lost, anchored in [found]
    }


def reaches(log, operator, step):
    """Whether any anchor and the gradients after it lead there: every anchor is tried."""
    return any(
        operator in log[anchor].anchored
        and all(
            at in log and (operator not in log[at].updated or operator in log[at].gradients)
            for at in range(anchor + 1, step + 1)
        )
        for anchor in log
        if anchor <= step
    )


def found(log, operator, step):
    try:
        return chain(log, operator, step)
    except GradientGapError:
        return None


@given(logs())
def test_a_chain_is_found_where_there_is_one_and_holds_every_update(log):
    for operator, step in product(OPERATORS, range(13)):
        way = found(log, operator, step)
        assert (way is not None) == reaches(log, operator, step)
        if way is not None:
            between = range(way.anchor + 1, step + 1)
            assert operator in log[way.anchor].anchored
            assert way.gradients == tuple(at for at in between if operator in log[at].updated)
            assert not any(operator in log[at].anchored for at in between), "a newer anchor makes a shorter way"


def test_a_skipped_step_needs_no_gradient_and_an_unknown_one_ends_the_chain():
    log = {1: LoggedStep(anchored=some("a")), 2: LoggedStep(), 3: LoggedStep(some("a"), some("a"))}
    assert chain(log, "a", 3) == Chain("a", 1, (3,))
    del log[2]
    with pytest.raises(GradientGapError, match="a cannot be brought to step 3") as raised:
        chain(log, "a", 3)
    assert (raised.value.operator, raised.value.missing, raised.value.step) == ("a", 2, 3)


def test_an_operator_without_an_anchor():
    log = {4: LoggedStep(anchored=some("a"))}
    with pytest.raises(GradientGapError, match=r"b cannot be brought to step 4.*no anchor of it or of an earlier step"):
        chain(log, "b", 4)


def test_nothing_logged_reaches_nothing():
    with pytest.raises(GradientGapError):
        chain({}, "a", 1)
