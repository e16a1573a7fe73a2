"""Selectors over pipeline stages: each part of the model that shares no rank with another is dealt by itself."""

from __future__ import annotations

from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.core.placement import Placement, interleaved_order
from moe_ckpt.policies.selectors import SELECTORS, Dealer, Request, group_of
from tests.unit.builders import catalog, context

every = pytest.mark.parametrize("selector", SELECTORS.values(), ids=list(SELECTORS))
by_load = pytest.mark.parametrize(
    "selector", [SELECTORS["load_aware"], SELECTORS["least_loss"]], ids=["load_aware", "least_loss"]
)


def staged(depths: list[int], experts: int, ranks: int) -> tuple[Placement, list[range]]:
    """Stages of ``depths`` layers on ``ranks`` ranks each, experts in contiguous blocks. Also the rows of each."""
    owners, rows = [], []
    for stage, depth in enumerate(depths):
        rows.append(range(len(owners), len(owners) + depth))
        owners += [tuple(stage * ranks + e * ranks // experts for e in range(experts))] * depth
    return Placement(tuple(owners), (0,), (ranks,) * len(depths)), rows


def loads(chosen, placement: Placement) -> Counter:
    return Counter(placement.owners[layer][expert] for layer, expert in chosen)


@by_load
@settings(max_examples=40)
@given(
    depths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    ranks=st.sampled_from([1, 2, 4]),
    k=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)
def test_no_rank_of_any_stage_is_over_its_own_capacity(selector, depths, ranks, k, seed):
    """ceil(K * experts owned / E), of uneven stages too, whatever the loads, where no expert is overdue."""
    experts = 8
    placement, stages = staged(depths, experts, ranks)
    model = catalog(sum(depths), experts)
    unsaved = np.random.default_rng(seed).integers(0, 100, (sum(depths), experts))
    asked = context(model, 9, placement=placement, expected_unsaved=unsaved, chosen_at=unsaved * 0 + 8, index=9)
    stored = selector(asked, Request(k, k)).stored
    assert Counter(layer for layer, _ in stored) == dict.fromkeys(range(sum(depths)), k)
    found = loads(stored, placement)
    for stage, rows in enumerate(stages):
        for rank in range(stage * ranks, (stage + 1) * ranks):
            assert found[rank] <= ceil(k * len(rows) * experts / ranks / experts)


@by_load
def test_what_one_stage_has_at_stake_changes_nothing_in_another(selector):
    placement, (first, second) = staged([2, 3], 4, 2)
    model = catalog(5, 4)
    rng = np.random.default_rng(3)
    base = rng.integers(0, 50, (5, 4))
    other = base.copy()
    other[list(second)] = rng.integers(0, 5000, (3, 4))
    picks = []
    for unsaved in (base, other):
        asked = context(model, 9, placement=placement, expected_unsaved=unsaved, chosen_at=base * 0 + 3, index=9)
        picks.append([pair for pair in selector(asked, Request(1, 2)).stored if pair[0] in first])
    assert picks[0] == picks[1]


@by_load
def test_alone_on_its_stage_a_rank_gives_the_busiest_of_each_layer(selector):
    """One rank per stage has capacity for all; dealt over both stages together, layers would be passed over."""
    placement, _ = staged([1, 1], 4, 1)
    unsaved = np.array([[1, 2, 3, 4], [9, 8, 7, 6]])
    asked = context(catalog(2, 4), 9, placement=placement, expected_unsaved=unsaved, chosen_at=unsaved * 0, index=9)
    assert selector(asked, Request(1, 1)).stored == ((0, 3), (1, 0))


@every
@settings(max_examples=20)
@given(depths=st.lists(st.integers(1, 4), min_size=1, max_size=3), k=st.integers(1, 4), seed=st.integers(0, 999))
def test_held_experts_are_dealt_by_stage_too(selector, depths, k, seed):
    experts, ranks = 4, 2
    placement, _ = staged(depths, experts, ranks)
    model = catalog(sum(depths), experts)
    unsaved = np.random.default_rng(seed).integers(0, 9, (sum(depths), experts))
    asked = context(model, 5, placement=placement, expected_unsaved=unsaved, chosen_at=unsaved * 0, index=5)
    chosen = selector(asked, Request(k, 4))
    assert len(set(chosen.stored + chosen.host_only)) == sum(depths) * 4


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([1, 2, 4]), st.integers(1, 8))
def test_sequential_is_even_within_each_stage(depths, ranks, k):
    experts = 8
    placement, stages = staged(depths, experts, ranks)
    model = catalog(sum(depths), experts)
    chosen_at = np.ones((sum(depths), experts), dtype=np.int64)
    for step in range(2, 8):
        asked = context(model, step, placement=placement, chosen_at=chosen_at.copy(), index=step)
        stored = SELECTORS["sequential"](asked, Request(k, k)).stored
        found = loads(stored, placement)
        for stage, rows in enumerate(stages):
            for rank in range(stage * ranks, (stage + 1) * ranks):
                assert found[rank] <= ceil(k * len(rows) / ranks)
        for pair in stored:
            chosen_at[pair] = step


def test_the_order_interleaves_the_ranks_of_the_layers_own_stage():
    placement, _ = staged([1, 1], 8, 4)
    assert [placement.owners[1][e] for e in interleaved_order(placement.owners[1])] == [4, 5, 6, 7] * 2


def test_a_dealer_of_some_rows_counts_only_their_ranks():
    placement, (_, second) = staged([2, 2], 4, 2)
    orders = [[0, 1, 2, 3]] * 4
    dealer = Dealer(orders, list(second), group_of(placement.owners, second))
    dealer.deal(1)
    assert [len(taken) for taken in dealer.taken] == [0, 0, 1, 1]
    assert {placement.owners[row][e] for row in second for e in dealer.taken[row]} == {2, 3}
