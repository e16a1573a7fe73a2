"""Guarded: any policy, within a budget for lost tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import Dense, Guarded, MoC, Policy, TokenFacts
from tests.unit.builders import catalog, context, experts_in

EVERYTHING = {(0, expert) for expert in range(4)}


@dataclass(frozen=True)
class First:
    """Somebody's own policy: saves expert 0 of layer 0 and nothing else, holds two more."""

    halt: str | None = None

    def plan(self, context):
        plan = SnapshotPlan(
            context.run.step, ("non_expert/embed", "expert/0/0"), memory_only=("expert/0/1", "expert/0/2")
        )
        return replace(plan, halt=self.halt)

    def check(self, catalog):
        """Any model."""

    def describe(self):
        return {"name": "first"}


def now(unsaved=(9, 5, 1, 2), lost=0, routed=100, **facts):
    facts |= {"unsaved": np.array([unsaved]), "lost_tokens": lost, "routed_tokens": routed}
    return context(catalog(1, 4), 9, last_step=8, **facts)


def test_it_is_a_policy_and_says_what_it_guards():
    assert isinstance(Guarded(MoC()), Policy)
    said = Guarded(MoC(k=2), budget="strict", action="stop").describe()
    assert said == MoC(k=2).describe() | {"guard_budget": 0.0375, "guard_action": "stop"}
    with pytest.raises(ConfigError):
        Guarded(MoC()).check(catalog(0, 0))


def test_escalate_saves_the_fewest_experts_more():
    plan = Guarded(First(), 0.05).plan(now())
    assert plan.full == ("non_expert/embed", "expert/0/0", "expert/0/1")
    assert plan.memory_only == ("expert/0/2",)
    assert (plan.plt_budget, plan.halt) == (0.05, None)


@pytest.mark.parametrize("action", ["escalate", "dense", "stop"])
def test_within_the_budget_nothing_is_added(action):
    plan = Guarded(First(), 0.08, action).plan(now())
    assert plan == replace(First().plan(now()), plt_budget=0.08)


def test_dense_saves_every_expert_in_that_checkpoint():
    plan = Guarded(First(), 0.05, "dense").plan(now())
    assert experts_in(plan.full) == EVERYTHING
    assert plan.memory_only == ()
    assert plan.halt is None


def test_stop_saves_everything_and_says_why_and_what_to_change():
    plan = Guarded(First(), 0.05, "stop").plan(now(lost=3, routed=200))
    assert experts_in(plan.full) == EVERYTHING
    for words in ("1.50% of all tokens are lost", "would make it 5.50%", "budget of 5.00%", "raise k", "'escalate'"):
        assert words in plan.halt


def test_stop_says_when_the_budget_is_broken_already():
    assert "6.00% of all tokens are lost, over the budget" in Guarded(First(), 0.05, "stop").plan(now(lost=6)).halt


def test_a_young_run_that_lost_nothing_is_not_stopped():
    plan = Guarded(First(), 0.05, "stop").plan(now(lost=0))
    assert plan.halt is None
    assert experts_in(plan.full) == {(0, 0), (0, 1)}


def test_the_policys_own_reason_to_end_comes_first():
    assert Guarded(First("enough"), 0.05, "stop").plan(now(lost=3)).halt == "enough"


def test_what_loses_nothing_passes_through_untouched():
    dense = Dense()
    assert Guarded(dense, 0.05, "stop").plan(now(lost=90)) == dense.plan(now(lost=90))


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
    assert policy.describe() == {"name": "first", "guard_budget": None, "guard_action": "escalate",
                                 "guard_mlt_budget": 0.05}  # fmt: skip


def test_the_tighter_of_both_budgets_decides():
    both = Guarded(First(), 0.04, mlt_budget=0.5)
    assert experts_in(both.plan(now(routed=100)).full) == {(0, 0), (0, 1)}
    assert experts_in(both.plan(by_layer(routed=10)).full) == {(0, 0), (0, 1)}


def test_stop_says_what_a_single_failure_would_lose():
    policy = Guarded(First(), 0.05, "stop", mlt_budget="default")
    assert policy.plan(by_layer(lost=0)).halt is None
    plan = policy.plan(by_layer(lost=1))
    assert experts_in(plan.full) == EVERYTHING
    for words in ("8.00% of each layer's tokens", "(MLT)", "budget of 3.00%", "mlt_budget ('default')"):
        assert words in plan.halt


def test_wrong_settings_are_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"Guarded: budget='none'.*'strict' \(3\.75%\)"):
        Guarded(MoC(), "none")
    with pytest.raises(ConfigError, match=r"Guarded: mlt_budget='strict'.*'default' \(3\.00%\)"):
        Guarded(MoC(), mlt_budget="strict")
    with pytest.raises(ConfigError, match=r"budget=None, mlt_budget=None\): give at least one"):
        Guarded(MoC(), None)
    with pytest.raises(ConfigError, match=r"Guarded\(action='shrug'\).*\['escalate', 'dense', 'stop'\]"):
        Guarded(MoC(), action="shrug")
    with pytest.raises(ConfigError, match=r"Guarded\(policy='moc'\): give a policy, which has plan"):
        Guarded("moc")
    with pytest.raises(ConfigError, match=r"Guarded\(policy=<class.*such as MoC\(\)"):
        Guarded(MoC)
