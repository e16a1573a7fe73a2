"""MoC: which experts a partial checkpoint holds, how even the ranks are, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import expert_owner
from moe_ckpt.errors import ConfigError, NoMoELayerError, UserError
from moe_ckpt.policies import MoC, Policy
from moe_ckpt.policies.selectors import sequential
from tests.unit.builders import catalog, context, experts_in

ALWAYS = {"non_expert/embed", "gate/0", "gate/1"}


@st.composite
def shapes(draw):
    """(L, E, K, ranks) with ranks dividing E."""
    ranks = draw(st.integers(1, 8))
    experts = ranks * draw(st.integers(1, 6))
    return draw(st.integers(1, 6)), experts, draw(st.integers(1, experts)), ranks


def chosen(model, k, index, ranks):
    return sequential(context(model, index=index, ranks=ranks), k)


@settings(max_examples=200)
@given(shapes(), st.integers(0, 1000))
def test_no_rank_saves_more_than_its_share(shape, index):
    layers, experts, k, ranks = shape
    pairs = chosen(catalog(layers, experts), k, index, ranks)
    load = Counter(expert_owner(expert, experts, ranks) for _, expert in pairs)
    assert max(load.values()) <= -(-layers * k // ranks)


@given(experts=st.integers(1, 24), ranks=st.integers(1, 8), index=st.integers(0, 99), d=st.data())
def test_every_layer_saves_k_different_experts(experts, ranks, index, d):
    layers = 3
    k = d.draw(st.integers(1, experts))
    pairs = chosen(catalog(layers, experts), k, index, ranks)
    assert len(set(pairs)) == layers * k
    assert Counter(layer for layer, _ in pairs) == dict.fromkeys(range(layers), k)


@given(experts=st.integers(1, 24), ranks=st.integers(1, 8), start=st.integers(0, 99), d=st.data())
def test_every_expert_is_saved_within_e_over_k_checkpoints(experts, ranks, start, d):
    k = d.draw(st.integers(1, experts))
    model = catalog(2, experts)
    window = range(start, start + -(-experts // k))
    saved = {pair for index in window for pair in chosen(model, k, index, ranks)}
    assert saved == {(layer, expert) for layer in range(2) for expert in range(experts)}


def test_selection_by_hand():
    """8 experts on 4 ranks: the order is 0 2 4 6 1 3 5 7; layer l is K positions ahead of layer l - 1."""
    model = catalog(2, 8)
    assert chosen(model, 2, 0, 4) == ((0, 0), (0, 2), (1, 4), (1, 6))
    assert chosen(model, 2, 1, 4) == ((0, 4), (0, 6), (1, 1), (1, 3))
    assert chosen(model, 2, 3, 4) == ((0, 5), (0, 7), (1, 0), (1, 2))
    assert chosen(model, 2, 4, 4) == chosen(model, 2, 0, 4)


def test_layers_may_differ_in_size():
    small, large = catalog(1, 2), catalog(1, 4, first_index=1)
    model = Catalog(
        (*small.operators, *(op for op in large.operators if op.layer == 1)),
        small.layers + large.layers,
        {**small.parameters, **large.parameters},
    )
    pairs = [chosen(model, 2, index, 2) for index in range(2)]
    experts_of = {layer: {e for p in pairs for at, e in p if at == layer} for layer in (0, 1)}
    assert experts_of == {0: {0, 1}, 1: {0, 1, 2, 3}}


def test_the_first_checkpoint_is_dense():
    model = catalog(2, 4)
    everything = tuple(op.id for op in model.operators)
    assert MoC(k=1).plan(context(model, missing=everything)).operators() == everything


def test_later_checkpoints_hold_gates_non_experts_and_k_experts_per_layer():
    model = catalog(2, 4)
    operators = MoC(k=1).plan(context(model, step=2, last_step=1, index=1)).operators()
    assert set(operators) >= ALWAYS
    assert experts_in(operators) == {(0, 1), (1, 2)}
    assert len(operators) == len(ALWAYS) + 2


def test_an_expert_that_no_checkpoint_holds_is_added():
    model = catalog(2, 4)
    operators = MoC(k=1).plan(context(model, step=2, last_step=1, index=1, missing=("expert/0/3",))).operators()
    assert experts_in(operators) == {(0, 1), (1, 2), (0, 3)}


def test_saving_all_experts_is_dense():
    model = catalog(2, 4)
    plan = MoC(k=4).plan(context(model, step=9, last_step=8, index=8))
    assert plan.operators() == tuple(op.id for op in model.operators)


def test_between_intervals_nothing_is_saved():
    model = catalog(1, 2)
    assert not MoC(every_n_steps=3).plan(context(model, step=4, last_step=3))
    assert MoC(every_n_steps=3).plan(context(model, step=6, last_step=3))


@given(st.integers(0, 50), st.integers(1, 4))
def test_same_context_same_plan(index, ranks):
    model = catalog(2, 4)
    first, second = (MoC(k=2).plan(context(model, step=index + 1, index=index, ranks=ranks)) for _ in range(2))
    assert first == second


def test_more_experts_than_there_are_is_refused_naming_both():
    with pytest.raises(ConfigError, match=r"MoC\(k=5\): layer 'layers\.0\.moe' has only 4 experts"):
        MoC(k=5).check(catalog(2, 4))
    MoC(k=4).check(catalog(2, 4))


@pytest.mark.parametrize("k", [0, -1, 1.0, True, "all"])
def test_fewer_than_one_is_refused_by_name(k):
    with pytest.raises(ConfigError, match=r"MoC\(k=.*\): k must be a whole number of at least 1"):
        MoC(k=k)


def test_an_unknown_selector_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"selector='loudest'.*choose from \['sequential'\]"):
        MoC(selector="loudest")


def test_a_model_without_moe_layers_is_refused_with_what_to_do():
    with pytest.raises(NoMoELayerError, match=r"register_moe.*Dense") as caught:
        MoC().check(catalog(0, 0))
    assert isinstance(caught.value, UserError)


def test_it_is_a_policy_that_says_what_it_is():
    assert isinstance(MoC(), Policy)
    assert MoC(k=2).describe() == {"name": "moc", "k": 2, "every_n_steps": 1, "selector": "sequential"}
