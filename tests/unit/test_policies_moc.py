"""MoC: what a partial checkpoint holds, in which tier, within which budget; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.errors import ConfigError, UserError
from moe_ckpt.policies import MoC, Policy
from tests.unit.builders import catalog, context, experts_in, mixed

ALWAYS = {"non_expert/embed", "gate/0", "gate/1"}


def older(model, *newer, step=1):
    """``chosen_at`` in which all but ``newer`` were saved at step 0."""
    at = np.zeros((len(model.layers), model.layers[0].experts), dtype=np.int64)
    for pair in newer:
        at[pair] = step
    return at


def test_the_first_checkpoint_is_dense():
    model = catalog(2, 4)
    everything = tuple(op.id for op in model.operators)
    assert MoC(k=1).plan(context(model, missing=everything)).full == everything


def test_later_checkpoints_hold_gates_non_experts_and_k_experts_per_layer():
    model = catalog(2, 4)
    at = older(model, (0, 0), (1, 1))
    operators = MoC(k=1).plan(context(model, step=2, last_step=1, chosen_at=at)).full
    assert set(operators) >= ALWAYS
    assert experts_in(operators) == {(0, 1), (1, 2)}
    assert len(operators) == len(ALWAYS) + 2


def test_an_expert_that_no_checkpoint_holds_is_added():
    model = catalog(2, 4)
    at = older(model, (0, 0), (1, 1))
    facts = {"last_step": 1, "chosen_at": at, "missing": ("expert/0/3",)}
    operators = MoC(k=1).plan(context(model, step=2, **facts)).full
    assert experts_in(operators) == {(0, 1), (1, 2), (0, 3)}


def test_saving_all_experts_is_dense():
    model = catalog(2, 4)
    plan = MoC(k=4).plan(context(model, step=9, last_step=8, index=8))
    assert plan.full == tuple(op.id for op in model.operators)


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
    with pytest.raises(
        ConfigError, match=r"selector='loudest'.*choose from \['least_loss', 'load_aware', 'sequential'\]"
    ):
        MoC(selector="loudest")
    with pytest.raises(ConfigError, match=r"selector=\['sequential'\]"):
        MoC(selector=["sequential"])


def test_a_model_without_moe_layers_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"register_moe.*Dense") as caught:
        MoC().check(catalog(0, 0))
    assert isinstance(caught.value, UserError)


def test_it_is_a_policy_that_says_what_it_is():
    assert isinstance(MoC(), Policy)
    said = {"name": "moc", "k": 2, "every_n_steps": 1, "selector": "sequential", "snapshot_k": 2, "plt_budget": None}
    assert MoC(k=2).describe() == said
    named = MoC(k=2, snapshot_k=4, plt_budget="strict").describe()
    assert (named["snapshot_k"], named["plt_budget"]) == (4, 0.0375)


def test_the_plan_tells_k_and_keeps_no_budget_by_itself():
    plan = MoC(k=2).plan(context(catalog(1, 4)))
    assert (plan.k, plan.plt_budget, plan.memory_only) == (2, None, ())


def test_snapshot_k_experts_stay_in_host_memory_besides():
    model = catalog(2, 4)
    plan = MoC(k=1, snapshot_k=3).plan(context(model, step=2, last_step=1, chosen_at=older(model, (0, 0), (1, 1))))
    assert experts_in(plan.full) == {(0, 1), (1, 2)}
    assert experts_in(plan.memory_only) == {(0, 2), (0, 3), (1, 3), (1, 0)}


def test_what_is_stored_anyway_is_not_held_twice():
    model = catalog(1, 4)
    facts = {"chosen_at": older(model, (0, 0)), "missing": ("expert/0/2",)}
    plan = MoC(k=1, snapshot_k=3).plan(context(model, step=2, last_step=1, **facts))
    assert experts_in(plan.full) == {(0, 1), (0, 2)}
    assert experts_in(plan.memory_only) == {(0, 3)}


def test_load_aware_saves_what_has_most_unsaved_tokens():
    unsaved = np.array([[1, 5, 9, 2]])
    plan = MoC(k=2, selector="load_aware").plan(context(catalog(1, 4), step=2, last_step=1, expected_unsaved=unsaved))
    assert experts_in(plan.full) == {(0, 1), (0, 2)}


def lost(tokens, routed):
    return FaultRecord(1, tokens, 1, routed)


def test_k_doubles_with_the_faults_and_snapshot_k_with_it_where_it_must():
    model = catalog(1, 8)
    policy = MoC(k=1, snapshot_k=3, plt_budget=0.04)
    facts = {"routed_tokens": 1000, "step": 9, "last_step": 8}
    for faults, k, held in (
        ((), 1, 2),
        ((lost(20, 1000),), 1, 2),
        ((lost(21, 1000),), 2, 1),
        ((lost(21, 1000), lost(11, 1000)), 4, 0),
    ):
        plan = policy.plan(context(model, faults=faults, lost_tokens=sum(f.lost_tokens for f in faults), **facts))
        assert (plan.k, plan.plt_budget) == (k, 0.04)
        assert len(experts_in(plan.full)) == k
        assert len(experts_in(plan.memory_only)) == held


@pytest.mark.parametrize("selector", ["sequential", "load_aware", "least_loss"])
def test_k_doubles_up_to_the_experts_of_the_largest_layer_and_takes_all_of_a_smaller_one(selector):
    policy, model = MoC(k=1, selector=selector, plt_budget=0.04), mixed(2, 8)
    for lost_tokens, k in ((0, 1), (21, 2), (31, 4), (36, 8), (50, 8)):
        facts = {"routed_tokens": 1000, "lost_tokens": lost_tokens, "step": 9, "last_step": 8}
        plan = policy.plan(context(model, **facts))
        assert plan.k == k
        assert [len({e for la, e in experts_in(plan.full) if la == layer}) for layer in (0, 1)] == [min(2, k), k]


def test_a_checkpoint_that_would_break_the_budget_saves_more():
    """10 of 100 tokens may be lost, 3 are: of the 15 unsaved ones at most 7 may stay."""
    unsaved = np.array([[1, 8, 0, 6]])
    facts = {"routed_tokens": 100, "lost_tokens": 3, "unsaved": unsaved, "step": 9, "last_step": 8}
    plan = MoC(k=1, snapshot_k=2, plt_budget=0.1).plan(context(catalog(1, 4), **facts))
    assert experts_in(plan.full) == {(0, 0), (0, 1)}
    assert experts_in(plan.memory_only) == set()


@pytest.mark.parametrize("budget", [0, 1, -0.1, "lenient", True, "0.05"])
def test_a_budget_that_is_none_is_refused_with_the_choices(budget):
    with pytest.raises(ConfigError, match=r"MoC: plt_budget=.*between 0 and 1.*'default' \(5\.00%\)"):
        MoC(plt_budget=budget)


def test_two_levels_out_of_order_are_refused_naming_both():
    with pytest.raises(ConfigError, match=r"MoC\(k=3, snapshot_k=2\).*at least k"):
        MoC(k=3, snapshot_k=2)
    with pytest.raises(ConfigError, match=r"MoC\(snapshot_k=5\): layer 'layers\.0\.moe' has only 4 experts"):
        MoC(k=2, snapshot_k=5).check(catalog(2, 4))
    with pytest.raises(ConfigError, match=r"snapshot_k must be a whole number"):
        MoC(snapshot_k=1.5)
