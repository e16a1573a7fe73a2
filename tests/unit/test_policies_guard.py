"""Guarded: any policy, within a budget for lost tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import Dense, Guarded, MoC, Policy, TokenFacts
from tests.unit.builders import catalog, context, experts_in


class First:
    """Somebody's own policy: saves expert 0 of layer 0 and nothing else, holds two more."""

    def plan(self, context):
        return SnapshotPlan(
            context.run.step, ("non_expert/embed", "expert/0/0"), memory_only=("expert/0/1", "expert/0/2")
        )

    def check(self, catalog):
        """Any model."""

    def describe(self):
        return {"name": "first"}


def now(unsaved=(9, 5, 1, 2), lost=0, routed=100, **facts):
    facts |= {"unsaved": np.array([unsaved]), "lost_tokens": lost, "routed_tokens": routed}
    return context(catalog(1, 4), 9, last_step=8, **facts)


def test_it_is_a_policy_and_says_what_it_guards():
    assert isinstance(Guarded(MoC()), Policy)
    said = Guarded(MoC(k=2), budget="strict").describe()
    assert said == MoC(k=2).describe() | {"guard_budget": 0.0375}
    with pytest.raises(ConfigError):
        Guarded(MoC()).check(catalog(0, 0))


def test_it_saves_the_fewest_experts_more():
    plan = Guarded(First(), 0.05).plan(now())
    assert plan.full == ("non_expert/embed", "expert/0/0", "expert/0/1")
    assert plan.memory_only == ("expert/0/2",)
    assert plan.plt_budget == 0.05


def test_within_the_budget_nothing_is_added():
    plan = Guarded(First(), 0.08).plan(now())
    assert plan == replace(First().plan(now()), plt_budget=0.08)


def test_what_loses_nothing_passes_through_untouched():
    dense = Dense()
    assert Guarded(dense, 0.05).plan(now(lost=90)) == dense.plan(now(lost=90))


def test_a_partial_policy_tells_the_budget_even_when_it_saves_everything():
    missing = tuple(op.id for op in catalog(1, 4).operators)
    assert Guarded(MoC(), 0.05).plan(now(missing=missing)).plt_budget == 0.05


def test_when_to_save_stays_the_policys_decision():
    assert Guarded(Dense(every_n_steps=10)).plan(now(lost=90)) == SnapshotPlan(9)


@pytest.mark.parametrize(("own", "told"), [(None, 0.05), (0.02, 0.02), (0.3, 0.05)])
def test_the_tighter_budget_is_told(own, told):
    assert Guarded(MoC(plt_budget=own), 0.05).plan(now(unsaved=(0, 0, 0, 0))).plt_budget == told


class Plentiful(TokenFacts):
    """Tokens of a run that may lose anything as far as PLT goes."""

    routed_tokens = 10**9


def by_layer(unsaved=(9, 5, 1, 2), routed=100, lost=0):
    known = now(unsaved, lost, routed)
    return replace(known, tokens=Plentiful(**vars(known.tokens)))


def test_a_budget_of_mlt_alone_saves_what_it_needs_whatever_plt_says():
    policy = Guarded(First(), None, mlt_budget=0.05)
    plan = policy.plan(by_layer())
    assert experts_in(plan.full) == {(0, 0), (0, 1)}
    assert plan.plt_budget is None
    assert experts_in(policy.plan(by_layer(routed=200)).full) == {(0, 0)}
    assert policy.describe() == {"name": "first", "guard_budget": None, "guard_mlt_budget": 0.05}


def test_the_tighter_of_both_budgets_decides():
    both = Guarded(First(), 0.04, mlt_budget=0.5)
    assert experts_in(both.plan(now(routed=100)).full) == {(0, 0), (0, 1)}
    assert experts_in(both.plan(by_layer(routed=10)).full) == {(0, 0), (0, 1)}


def test_wrong_settings_are_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"Guarded: budget='none'.*'strict' \(3\.75%\)"):
        Guarded(MoC(), "none")
    with pytest.raises(ConfigError, match=r"Guarded: mlt_budget='strict'.*'default' \(3\.00%\)"):
        Guarded(MoC(), mlt_budget="strict")
    with pytest.raises(ConfigError, match=r"budget=None, mlt_budget=None\): give at least one"):
        Guarded(MoC(), None)
    with pytest.raises(ConfigError, match=r"Guarded\(policy='moc'\): give a policy, which has plan"):
        Guarded("moc")
    with pytest.raises(ConfigError, match=r"Guarded\(policy=<class.*such as MoC\(\)"):
        Guarded(MoC)
