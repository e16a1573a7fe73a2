"""AnyOf: a checkpoint whenever any of several policies wants one, of all that any of them wants."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import lcm

import numpy as np
import pytest

from moe_ckpt.cli.main import main
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.window import Window
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import AnyOf, CheckFreq, Dense, Guarded, MoC, MoEtion, MoEvement, Needs, Policy, needs_of
from moe_ckpt.storage import LocalStorage
from tests.unit.builders import catalog, context, experts_in
from tests.unit.engine_parts import Life, ThreadRanks, manifests, run_threads

MODEL = catalog(1, 4)
ALL = MODEL.everything


@dataclass(frozen=True)
class Says:
    """A policy that says what it was made with."""

    answer: SnapshotPlan
    needs: Needs = field(default_factory=Needs)

    def plan(self, known):
        return self.answer

    def check(self, catalog):
        """Any model."""

    def describe(self):
        return {"name": "says"}


def plan_of(*plans, step=9):
    return AnyOf([Says(plan) for plan in plans]).plan(context(MODEL, step))


def at(step, last_step):
    return context(MODEL, step, last_step=last_step)


# --- the plan ---


def test_it_is_a_policy_that_says_what_it_is_made_of():
    policy = AnyOf([MoC(k=2), Dense(every_n_steps=100)])
    assert isinstance(policy, Policy)
    assert policy == AnyOf((MoC(k=2), Dense(100))) == AnyOf({"often": MoC(k=2), "rarely": Dense(100)})
    parts = [MoC(k=2).describe(), Dense(100).describe()]
    assert policy.describe() == {"name": "any_of", "policies": parts}
    with pytest.raises(ConfigError):
        policy.check(catalog(0, 0))


def test_nobody_wants_a_checkpoint():
    assert plan_of(SnapshotPlan(9), SnapshotPlan(9)) == SnapshotPlan(9)


def test_the_only_one_who_wants_a_checkpoint_gets_what_it_wants():
    wanted = SnapshotPlan(9, ALL[:2], memory_only=ALL[3:], wait=True, k=3, plt_budget=0.1)
    assert plan_of(SnapshotPlan(9), wanted) is wanted


def test_what_several_want_is_put_together_by_tier_in_the_order_of_the_catalog():
    first = SnapshotPlan(9, (ALL[4], ALL[0]), memory_only=(ALL[2], ALL[5]))
    second = SnapshotPlan(9, (ALL[1], ALL[2]), memory_only=(ALL[3],))
    plan = plan_of(first, second, SnapshotPlan(9))
    assert plan.full == (ALL[0], ALL[1], ALL[2], ALL[4])
    assert plan.memory_only == (ALL[3], ALL[5]), "not what goes to storage through host memory"
    assert plan == plan_of(second, first)
    assert plan.step == 9


def test_an_operator_that_does_not_exist_is_left_for_the_engine_to_refuse():
    assert plan_of(SnapshotPlan(9, ("expert/7/7", ALL[1])), SnapshotPlan(9, ALL[:1])).full == (*ALL[:2], "expert/7/7")


def test_training_waits_if_any_of_them_asks_for_it():
    assert plan_of(SnapshotPlan(9, ALL, wait=True), SnapshotPlan(9, ALL[:1])).wait
    assert not plan_of(SnapshotPlan(9, ALL), SnapshotPlan(9, ALL[:1])).wait


def test_most_experts_and_the_tightest_budget_are_told():
    plan = plan_of(
        SnapshotPlan(9, ALL, k=1, plt_budget=0.1), SnapshotPlan(9, ALL, k=3), SnapshotPlan(9, ALL, plt_budget=0.02)
    )
    assert (plan.k, plan.plt_budget) == (3, 0.02)


def test_everybody_is_due_when_they_would_be_alone():
    """Whatever the others begin in between, and though a checkpoint is left out."""
    parts = (Dense(4), Dense(10), MoC(k=1, every_n_steps=3))
    policy, last = AnyOf(parts), None
    for step in range(1, 200):
        if step % 7:  # busy at the others
            plan = policy.plan(at(step, last))
            since = range((last or 0) + 1, step + 1)
            assert bool(plan) == any(n % every == 0 for n in since for every in (3, 4, 10))
            if plan:
                dense = any(n % every == 0 for n in since for every in (4, 10))
                assert len(experts_in(plan.full)) == (4 if dense else 1)
                last = step


def test_the_first_step_that_is_due_is_anybodys():
    needs = needs_of(AnyOf([Dense(10), MoC(every_n_steps=4)]))
    assert [needs.due(at(step, step - 1)) for step in (1, 4, 5, 9, 13)] == [4, 4, 8, 10, 16]
    assert needs_of(AnyOf([Dense(10), Says(SnapshotPlan(3))])).due(at(3, 2)) == 3, "who does not say is always asked"


# --- needs ---


COMBINED = {
    "boost": (None, 0.2, 0.2),
    "popularity": (None, "tokens", "tokens"),
    "replicas": (0, 2, 2),
    "bubbles": (False, True, True),
    "period_steps": (4, 6, lcm(4, 6)),
    **dict.fromkeys(("sizes", "lost_tokens", "partial", "tiers"), (True, False, True)),
}
"""Need -> what two policies say, and both together."""
OTHERWISE = ("windows", "gradients", "alone", "next_due", "warning")
"""Refused, or tested above or below."""


def test_every_need_is_tried_here():
    assert sorted([*COMBINED, *OTHERWISE]) == sorted(each.name for each in fields(Needs))


@pytest.mark.parametrize("name", COMBINED)
def test_what_any_of_them_needs_is_needed(name):
    one, other, both = COMBINED[name]
    for values in ((one, other), (other, one)):
        policy = AnyOf([Says(SnapshotPlan(1), Needs(**{name: value})) for value in values])
        assert getattr(needs_of(policy), name) == both
        assert getattr(needs_of(Guarded(policy)), name) == (True if name == "lost_tokens" else both)


def test_popularity_is_counted_in_one_way():
    kinds = [Says(SnapshotPlan(1), Needs(popularity=kind)) for kind in ("tokens", "decayed")]
    with pytest.raises(ConfigError, match=r"Says \('tokens'\) and Says \('decayed'\) count popularity in different"):
        AnyOf(kinds)
    assert needs_of(AnyOf([kinds[0], Dense(), kinds[0]])).popularity == "tokens"


def test_the_first_warning_of_any_of_them_is_given():
    here = context(MODEL, 3)
    silent, first, other = (Says(SnapshotPlan(1), Needs(warning=lambda _, text=t: text)) for t in (None, "one", "two"))
    assert needs_of(AnyOf([Dense(), silent, first, other])).warning(here) == "one"
    assert needs_of(AnyOf([silent, Dense()])).warning(here) is None
    assert needs_of(AnyOf([Dense()])).warning is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([Dense(), MoEvement()], r"AnyOf\(policies\[1\]=MoEvement\(.*several steps.*; use it alone, or Dense, MoC"),
        ([Guarded(MoEvement())], r"AnyOf\(policies\[0\]=Guarded\(.*several steps, and no other"),
        ([CheckFreq(), MoC()], r"AnyOf\(policies\[0\]=CheckFreq\(.*would wait for ever after those of others"),
        ([AnyOf([Dense()]), Says(SnapshotPlan(1), Needs(alone=True))], r"policies\[1\]=Says.*would wait for ever"),
        ([Dense(), Says(SnapshotPlan(1), Needs(gradients="bf16"))], r"policies\[1\]=Says.*its log has a gap"),
        ([], r"AnyOf\(policies=\[\]\): give at least one policy"),
        (MoC(), r"AnyOf\(policies=MoC\(.*give several policies"),
        ("moc", r"AnyOf\(policies='moc'\): give several policies"),
        ([MoC], r"AnyOf\(policies\[0\]=<class.*give a policy, which has plan"),
        (["moc"], r"AnyOf\(policies\[0\]='moc'\): give a policy, which has plan"),
    ],
)
def test_what_cannot_be_put_together_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        AnyOf(given)


def test_a_window_that_was_not_announced_is_refused():
    slot = SnapshotPlan(9, ALL[:1], compute=ALL[1:], window=Window(9, (ALL[:1], ALL[1:])), slot=0)
    with pytest.raises(ConfigError, match=r"without Needs\(windows=True\) plans a slot .* at step 9"):
        plan_of(slot, SnapshotPlan(9, ALL))


def test_within_a_guard_the_budget_holds_for_every_checkpoint():
    policy = Guarded(AnyOf([MoC(k=1, every_n_steps=2), Dense(every_n_steps=5)]), 0.05)
    facts = {"unsaved": np.array([[9, 5, 1, 2]]), "routed_tokens": 100}
    plan = policy.plan(context(MODEL, 8, last_step=7, **facts))
    assert len(experts_in(plan.full)) > 1
    assert plan.plt_budget == 0.05


# --- in a run ---


def test_two_ranks_save_the_same_and_a_dense_checkpoint_comes_in_between(tmp_path, capsys):
    policy = AnyOf([MoC(k=1, every_n_steps=2), MoEtion(every_n_steps=2, experts=1), Dense(every_n_steps=5)])

    def body(comm):
        with Life(LocalStorage(tmp_path), policy=policy, comm=comm) as life:
            life.go(7, settle=True)
        return [record.experts_saved for record in life.records]

    first, second = run_threads(ThreadRanks(2), body)
    assert first == second
    found = manifests(tmp_path)
    saved = {m.step: {op for op, record in m.operators.items() if record.step == m.step} for m in found}
    dense = {step for step, ops in saved.items() if len(experts_in(tuple(ops))) == 8}
    assert (dense, set(saved)) == ({2, 5}, {2, 4, 5, 6})
    assert {m.policy["name"] for m in found} == {"any_of"}
    assert [dict(part) for part in found[0].policy["policies"]] == policy.describe()["policies"]
    assert main(["inspect", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "policy any_of on 2 ranks: policies=[moc(k=1, every_n_steps=2, selector=sequential," in said
    assert "dense(every_n_steps=5)]" in said


@pytest.mark.parametrize("sends", [True, False])
def test_what_a_policy_keeps_from_peers_stays_from_them(sends):
    """``sends_memory_only=False``: MoEtion's bandwidth has room for no more."""
    experts = MODEL.experts
    local = SnapshotPlan(9, (experts[0].id,), memory_only=(experts[1].id,), sends_memory_only=sends)
    other = SnapshotPlan(9, (experts[2].id,), sends_memory_only=not sends)
    plan = plan_of(local, other)
    assert plan.memory_only == (experts[1].id,)
    assert plan.sends_memory_only == sends
