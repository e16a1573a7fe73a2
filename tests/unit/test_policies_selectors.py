"""Which experts a partial checkpoint holds: how often each is, how even the ranks are, who goes first."""

from __future__ import annotations

from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.core.placement import expert_owner
from moe_ckpt.policies.selectors import SELECTORS, STALE_ROUNDS, Request, interval_steps, sequential, sorted_rows
from tests.unit.builders import catalog, context, mixed

load_aware = SELECTORS["load_aware"]
least_loss = SELECTORS["least_loss"]
every = pytest.mark.parametrize("selector", SELECTORS.values(), ids=list(SELECTORS))
by_load = pytest.mark.parametrize("selector", [load_aware, least_loss], ids=["load_aware", "least_loss"])


class Rounds:
    """Checkpoints one after another from a dense one on, each at the next step."""

    def __init__(self, selector, model, ranks, **facts):
        self.selector, self.model, self.ranks, self.facts = selector, model, ranks, facts
        self.chosen_at = np.zeros((len(model.layers), max(x.experts for x in model.layers)), dtype=np.int64)
        self.step = 0

    def take(self, k, snapshot_k=None, forget=False):
        """One checkpoint; ``forget``: it is not committed."""
        self.step += 1
        facts = {"index": self.step, "ranks": self.ranks, "chosen_at": self.chosen_at.copy(), **self.facts}
        chosen = self.selector(context(self.model, self.step, **facts), Request(k, snapshot_k or k))
        if not forget:
            for pair in chosen.stored:
                self.chosen_at[pair] = self.step
        return chosen


def load(pairs, model, ranks):
    sizes = {layer.index: layer.experts for layer in model.layers}
    return Counter(expert_owner(expert, sizes[layer], ranks) for layer, expert in pairs)


@st.composite
def shapes(draw):
    """(L, E, K, ranks) with ranks dividing E."""
    ranks = draw(st.integers(1, 8))
    experts = ranks * draw(st.integers(1, 6))
    return draw(st.integers(1, 6)), experts, draw(st.integers(1, experts)), ranks


@every
@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5), ranks=st.integers(1, 9), d=st.data())
def test_every_layer_gives_k_different_experts_and_holds_others(selector, sizes, ranks, d):
    model = mixed(*sizes)
    k = d.draw(st.integers(1, 12))
    snapshot_k = d.draw(st.integers(k, 14))
    loads = np.array(d.draw(st.lists(st.integers(0, 9), min_size=60, max_size=60)), dtype=np.int64)
    unsaved = loads.reshape(5, 12)[: len(sizes), : max(sizes)]
    rounds = Rounds(selector, model, ranks, expected_unsaved=unsaved)
    for _ in range(3):
        chosen = rounds.take(k, snapshot_k)
        everything = chosen.stored + chosen.host_only
        assert len(set(everything)) == len(everything)
        assert all(expert < sizes[layer] for layer, expert in everything)
        assert Counter(layer for layer, _ in chosen.stored) == {i: min(k, n) for i, n in enumerate(sizes)}
        assert Counter(layer for layer, _ in everything) == {i: min(snapshot_k, n) for i, n in enumerate(sizes)}


@given(experts=st.integers(1, 24), ranks=st.integers(1, 8), d=st.data())
def test_sequential_takes_every_expert_within_e_over_the_smallest_k_checkpoints(experts, ranks, d):
    """From any state: K changes, checkpoints fail, more experts than K were saved before."""
    rounds = Rounds(sequential, catalog(2, experts), ranks)
    for _ in range(d.draw(st.integers(0, 9))):
        rounds.take(d.draw(st.integers(1, experts)), forget=d.draw(st.booleans()))
    extra = d.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, experts - 1))))
    for pair in extra:
        rounds.chosen_at[pair] = rounds.step
    ks = d.draw(st.lists(st.integers(1, experts), min_size=experts, max_size=experts))
    window = next(n for n in range(1, experts + 1) if n >= ceil(experts / min(ks[:n])))
    taken = {pair for k in ks[:window] for pair in rounds.take(k).stored}
    assert taken == {(layer, expert) for layer in range(2) for expert in range(experts)}


@settings(max_examples=100)
@given(shapes(), st.integers(1, 30))
def test_sequential_loads_no_rank_over_its_share(shape, count):
    layers, experts, k, ranks = shape
    model = catalog(layers, experts)
    rounds = Rounds(sequential, model, ranks)
    for _ in range(count):
        assert max(load(rounds.take(k).stored, model, ranks).values()) <= ceil(layers * k / ranks)


@settings(max_examples=60)
@given(shapes(), st.integers(0, 40))
def test_sequential_is_the_papers_round_robin(shape, index):
    """Positions (c*K + l*K + i) mod E of the rank-interleaved order, i < K, at checkpoint c after a dense one."""
    layers, experts, k, ranks = shape
    rounds = Rounds(sequential, catalog(layers, experts), ranks)
    for _ in range(index):
        rounds.take(k)
    depth = experts // ranks
    positions = [((index + layer) * k + i) % experts for layer in range(layers) for i in range(k)]
    by_hand = {(n // k, (p % ranks) * depth + p // ranks) for n, p in enumerate(positions)}
    assert set(rounds.take(k).stored) == by_hand


def test_sequential_by_hand():
    """8 experts on 4 ranks: the order is 0 2 4 6 1 3 5 7; layer l is K positions ahead of layer l - 1."""
    rounds = Rounds(sequential, catalog(2, 8), 4)
    first = rounds.take(2, 4)
    assert first.stored == ((0, 0), (0, 2), (1, 4), (1, 6))
    assert first.host_only == ((0, 4), (0, 6), (1, 1), (1, 3))
    assert rounds.take(2).stored == first.host_only
    rounds.take(2, forget=True)
    assert rounds.take(2).stored == ((0, 1), (0, 3), (1, 5), (1, 7))
    assert rounds.take(2).stored == ((0, 5), (0, 7), (1, 0), (1, 2))
    assert rounds.take(2).stored == first.stored


def test_sequential_goes_by_age_before_position():
    """Expert 1 was to be saved by a checkpoint that failed, while a later one was committed."""
    now = context(catalog(1, 4), 5, chosen_at=np.array([[3, 0, 4, 2]]))
    chosen = sequential(now, Request(1, 4))
    assert chosen.stored + chosen.host_only == ((0, 1), (0, 3), (0, 0), (0, 2))


def test_sequential_takes_the_oldest_of_many_by_their_age():
    chosen_at = np.stack([np.random.default_rng(seed).permutation(3000) for seed in (0, 1)])
    chosen = sequential(context(mixed(3000, 3000), 4000, chosen_at=chosen_at), Request(5, 1500))
    oldest = [[(layer, int(expert)) for expert in np.argsort(steps)[:1500]] for layer, steps in enumerate(chosen_at)]
    assert list(chosen.stored) == [pair for pairs in oldest for pair in pairs[:5]]
    assert list(chosen.host_only) == [pair for pairs in oldest for pair in pairs[5:]]


@every
def test_a_context_that_knows_nothing_will_do(selector):
    assert len(selector(context(catalog(2, 4)), Request(1, 2)).stored) == 2
    assert selector(context(catalog(0, 0)), Request(1, 2)).stored == ()


# load-aware


def unsaved(*rows):
    return np.array(rows, dtype=np.int64)


def ask(model, tokens, k=1, snapshot_k=None, **facts):
    return load_aware(context(model, expected_unsaved=tokens, **facts), Request(k, snapshot_k or k))


def test_most_unsaved_tokens_go_first():
    chosen = ask(catalog(2, 4), unsaved([1, 9, 3, 7], [5, 0, 6, 2]), k=2, snapshot_k=3)
    assert chosen.stored == ((0, 1), (0, 3), (1, 2), (1, 0))
    assert chosen.host_only == ((0, 2), (1, 3))


def test_equal_loads_go_by_age_and_then_by_index():
    model = catalog(1, 4)
    assert ask(model, unsaved([7, 7, 7, 7]), k=2, chosen_at=unsaved([5, 3, 4, 3]), step=6).stored == ((0, 1), (0, 3))
    assert ask(model, unsaved([7, 7, 7, 7]), k=2).stored == ((0, 0), (0, 1))


@by_load
def test_priorities_are_whole_numbers_which_are_alike_on_every_rank(selector):
    """As floats, these two are equal, and a sum of such depends on its order, which differs between processors."""
    facts = {"expected_unsaved": unsaved([2**60, 2**60 + 1]), "chosen_at": unsaved([8, 8])}
    assert selector(context(catalog(1, 2), 9, **facts), Request(1, 1)).stored == ((0, 1),)


def test_a_full_rank_gives_no_more_and_the_layer_with_most_at_stake_chooses_first():
    """2 ranks of 2 experts each, 2 layers, K=1: each rank may save one. Among equals the last layer comes first."""
    assert ask(catalog(2, 4), unsaved([7, 8, 2, 1], [9, 1, 1, 1]), ranks=2).stored == ((0, 2), (1, 0))
    assert ask(catalog(2, 4), unsaved([9, 8, 2, 1], [7, 1, 1, 1]), ranks=2).stored == ((0, 0), (1, 2))
    assert ask(catalog(2, 4), unsaved([7, 6, 2, 1], [7, 1, 3, 1]), ranks=2).stored == ((0, 2), (1, 0))


@by_load
def test_what_stays_in_memory_is_spread_over_the_ranks_too(selector):
    """All tokens on the experts of rank 0 of 2. 2 layers, 2 of 4 experts each: two of every rank, not three."""
    facts = {"expected_unsaved": unsaved([9, 8, 2, 1], [7, 6, 2, 1]), "ranks": 2}
    chosen = selector(context(catalog(2, 4), 1, **facts), Request(1, 2))
    assert chosen.stored == ((0, 0), (1, 2))
    assert sorted(load(chosen.stored + chosen.host_only, catalog(2, 4), 2).items()) == [(0, 2), (1, 2)]
    assert Counter(layer for layer, _ in chosen.host_only) == {0: 1, 1: 1}


def test_ranks_that_own_nothing_leave_more_capacity_to_the_others():
    """2 of 4 ranks own an expert, 4 layers, K=1: capacity 2, for those with most at stake."""
    chosen = ask(catalog(4, 2), unsaved([9, 1], [8, 1], [3, 2], [3, 2]), ranks=4)
    assert chosen.stored == ((0, 0), (1, 0), (2, 1), (3, 1))


@pytest.mark.parametrize("wishes", [[8, 4], [4, 8]])
def test_what_is_short_comes_from_the_rank_with_the_least_to_save(wishes):
    """7, 2, 3 and 2 experts on 4 ranks, capacity 1: the last layer finds rank 2 full, and 0 kept for the second."""
    model, rest = mixed(7, 2, 3, 2), [0] * 5
    tokens = unsaved([9, 9, 9, 0, 7, 3, 4], [6, 4, *rest], [8, 4, 9, 0, 0, 0, 0], [*wishes, *rest])
    chosen = ask(model, tokens, ranks=4)
    assert chosen.stored == ((0, 2), (1, 0), (2, 2), (3, 0))


def test_least_loss_weighs_unsaved_tokens_by_age():
    """8 tokens for 2 steps, 3 for 6, 7 for 2: 16, 18, 14."""
    facts = {"expected_unsaved": unsaved([8, 3, 7]), "chosen_at": unsaved([8, 4, 8])}
    assert least_loss(context(catalog(1, 3), 10, **facts), Request(1, 3)).stored == ((0, 1),)
    assert load_aware(context(catalog(1, 3), 10, **facts), Request(1, 3)).stored == ((0, 0),)


def test_a_layer_is_not_left_with_ranks_that_own_too_few():
    """4 ranks of one expert each, K=3: capacity 3 each. As printed in the paper, the first layer would find one."""
    same = [9, 8, 7, 1]
    chosen = ask(catalog(4, 4), unsaved(same, same, same, same), k=3, ranks=4)
    assert Counter(layer for layer, _ in chosen.stored) == dict.fromkeys(range(4), 3)
    assert max(load(chosen.stored, catalog(4, 4), 4).values()) == 3


@settings(max_examples=200)
@given(shapes(), st.data())
def test_load_aware_loads_no_rank_over_its_share(shape, d):
    layers, experts, k, ranks = shape
    cells = layers * experts
    counts = d.draw(st.lists(st.integers(0, 5), min_size=cells, max_size=cells))
    model = catalog(layers, experts)
    chosen = ask(model, unsaved(counts).reshape(layers, experts), k=k, ranks=ranks)
    assert Counter(layer for layer, _ in chosen.stored) == dict.fromkeys(range(layers), k)
    assert max(load(chosen.stored, model, ranks).values()) <= ceil(layers * k / ranks)


@given(experts=st.integers(1, 9), ranks=st.integers(1, 20), layers=st.integers(1, 5), d=st.data())
def test_load_aware_is_as_even_as_owners_allow(experts, ranks, layers, d):
    """Ranks that own nothing, or one expert more than others: the smallest peak with which K fit at all."""
    k = d.draw(st.integers(1, experts))
    counts = d.draw(st.lists(st.integers(0, 5), min_size=layers * experts, max_size=layers * experts))
    model = catalog(layers, experts)
    chosen = ask(model, unsaved(counts).reshape(layers, experts), k=k, ranks=ranks)
    owned = Counter(expert_owner(e, experts, ranks) for e in range(experts))
    fits = next(c for c in range(1, 99) if sum(min(c, layers * n) for n in owned.values()) >= layers * k)
    assert max(load(chosen.stored, model, ranks).values()) <= fits


@by_load
@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 4), depth=st.integers(1, 3), layers=st.integers(1, 3), k=st.integers(1, 3), skew=st.integers()
)
def test_no_expert_waits_for_ever(selector, ranks, depth, layers, k, skew):
    """Experts without tokens are saved all the same: within STALE_ROUNDS + 2 rounds and the checkpoint after."""
    experts, k = ranks * depth, min(k, ranks * depth)
    tokens = np.random.default_rng(abs(skew)).integers(0, 2, (layers, experts)) * 1000
    rounds = Rounds(selector, catalog(layers, experts), ranks, expected_unsaved=tokens)
    longest = (STALE_ROUNDS + 2) * ceil(experts / k) + 1
    for _ in range(4 * longest):
        rounds.take(k)
        assert rounds.step - rounds.chosen_at.min() <= longest


def test_an_overdue_expert_goes_first_and_not_a_step_before():
    model, tokens, k = catalog(1, 4), unsaved([9, 9, 9, 0]), 1
    limit = STALE_ROUNDS * 4 * 2
    for age, first in ((limit, 0), (limit + 1, 3)):
        step = 1000 + age
        facts = {"expected_unsaved": tokens, "chosen_at": unsaved([step, step, step, 1000]), "index": step // 2}
        assert load_aware(context(model, step, **facts), Request(k, k, 2)).stored == ((0, first),)


def test_storage_that_skips_checkpoints_makes_nobody_overdue():
    """One checkpoint in ten was made: 200 steps are 20 checkpoints, of 16 that an expert may wait in 160."""
    tokens, chosen_at = unsaved([9, 9, 9, 0]), unsaved([990, 990, 990, 850])
    slow = {"expected_unsaved": tokens, "chosen_at": chosen_at, "index": 99}
    for index, first in ((99, 0), (999, 3)):
        known = context(catalog(1, 4), 1000, **slow | {"index": index})
        assert load_aware(known, Request(1, 1, interval_steps(known, 1))).stored == ((0, first),)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from((1, 1 << 40, 1 << 59)),  # the last one is too large for one number that says it all
    st.data(),
)
def test_experts_go_by_priority_then_age_then_index_whatever_stands_behind_a_layers_last(sizes, times, d):
    shape = len(sizes), max(sizes)
    numbers = st.lists(st.integers(-1, 4), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    priority, chosen_at = (np.array(d.draw(numbers)).reshape(shape) for _ in range(2))
    for row, found in enumerate(sorted_rows(chosen_at, priority * times, sizes)):
        wanted = sorted(range(sizes[row]), key=lambda one, r=row: (-priority[r, one], chosen_at[r, one], one))
        assert found.tolist() == wanted
