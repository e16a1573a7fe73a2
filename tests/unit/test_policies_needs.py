"""What policies say that they need, and that nobody who wraps one drops any of it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest

from moe_ckpt import policies as package
from moe_ckpt.errors import ConfigError
from moe_ckpt.ledger.ledger import Ledger
from moe_ckpt.policies import (
    AnyOf,
    CheckFreq,
    Dense,
    Gemini,
    GradientLog,
    Guarded,
    MoC,
    MoEtion,
    MoEvement,
    Needs,
    Policy,
    Wrapper,
)
from moe_ckpt.policies import needs_of as needs
from moe_ckpt.policies.base import DECAYED, GATE_WEIGHTS, TOKENS
from moe_ckpt.run.options import Options, Settings
from moe_ckpt.run.planning import LiveState, Planner
from moe_ckpt_sim.planner.choosing import exact
from moe_ckpt_sim.run.system import System
from tests.support.constants import Unprobed
from tests.unit.builders import catalog, context

MODEL = catalog(2, 4)


def seventh(known):
    return 7


EACH = {
    "sizes": True,
    "popularity": "tokens",
    "windows": True,
    "gradients": "bf16",
    "tiers": True,
    "partial": True,
    "lost_tokens": True,
    "alone": True,
    "boost": 0.2,
    "replicas": 2,
    "bubbles": True,
    "period_steps": 7,
    "next_due": seventh,
    "warning": seventh,
}
"""Of each need, a value that is not the default."""

FIELDS = [field.name for field in fields(Needs)]


@dataclass(frozen=True)
class Own:
    """Somebody's own policy, as docs/own_policy.md describes it."""

    def plan(self, known):
        return Dense().plan(known)

    def check(self, catalog):
        """Any model."""

    def describe(self):
        return {"name": "own"}


@dataclass(frozen=True)
class Needy(Own):
    needs: Needs


class Plain(Wrapper):
    """A wrapper of somebody's own that changes nothing."""


WRAPPERS = [Guarded, Plain, Wrapper]
KINDS = [AnyOf, CheckFreq, Dense, Gemini, GradientLog, Guarded, MoC, MoEtion, MoEvement, Wrapper]


def make(kind):
    return kind([MoC()]) if kind is AnyOf else kind(MoC()) if issubclass(kind, Wrapper) else kind()


def test_every_need_is_tried_here():
    assert list(EACH) == FIELDS
    assert all(EACH[name] != getattr(Needs(), name) for name in FIELDS)


def test_every_policy_of_the_package_is_tried_here():
    found = set()
    for module in pkgutil.iter_modules(package.__path__):
        names = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
        for kind in filter(inspect.isclass, names.values()):
            is_base = kind is Policy or kind.__name__.startswith("_")
            if kind.__module__.startswith(package.__name__) and not is_base and hasattr(kind, "plan"):
                found.add(kind)
    assert found == set(KINDS)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_passes_on_every_need(wrapper, name):
    policy = Needy(Needs(**{name: EACH[name]}))
    assert getattr(needs(wrapper(policy)), name) == EACH[name]
    assert getattr(needs(wrapper(wrapper(policy))), name) == EACH[name]


@pytest.mark.parametrize("wrapper", [Plain, Wrapper])
def test_a_wrapper_adds_nothing_by_itself(wrapper):
    for policy in (Own(), Needy(Needs(**EACH)), MoEvement(order="soft_count")):
        assert needs(wrapper(policy)) == needs(policy)


def test_the_guard_adds_that_it_goes_by_lost_tokens_and_nothing_else():
    for policy in (Own(), MoEtion(), MoEvement(order="time_decayed")):
        assert needs(Guarded(policy)) == replace(needs(policy), lost_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_policy_of_the_package_says_its_needs_itself(kind):
    assert "needs" in vars(kind) or issubclass(kind, Wrapper)
    assert isinstance(make(kind).needs, Needs)


def told(policy):
    """Names of the needs that are not the default."""
    return {name for name in FIELDS if getattr(needs(policy), name) != getattr(Needs(), name)}


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (Dense(), "next_due"),
        (Dense(3), "next_due period_steps"),
        (CheckFreq(), "next_due alone"),
        (Gemini(4), "next_due period_steps replicas"),
        (Gemini(), "next_due alone lost_tokens replicas"),
        (Gemini("young", mtbf_secs=3600), "next_due alone replicas"),
        (MoC(), "next_due partial"),
        (MoC(plt_budget=0.05, every_n_steps=2), "next_due partial lost_tokens period_steps"),
        (MoC(k="auto"), "next_due partial sizes"),
        (Unprobed(), "next_due partial sizes boost bubbles tiers"),
        (MoEtion(experts=2, capacity_boost=None), "next_due partial bubbles tiers"),
        (MoEtion(), "next_due partial sizes boost bubbles tiers period_steps"),
        (
            Unprobed(recompute=True),
            "next_due partial sizes boost bubbles tiers gradients alone replicas warning",
        ),
        (MoEvement(), "next_due sizes windows alone warning popularity"),
        (MoEvement(order="round_robin"), "next_due sizes windows alone warning"),
        (GradientLog(), "next_due sizes gradients tiers alone warning popularity"),
        (Own(), ""),
    ],
)
def test_what_each_policy_needs(policy, names):
    assert told(policy) == set(names.split())


@pytest.mark.parametrize(
    ("order", "counted"),
    [("hard_count", TOKENS), ("soft_count", GATE_WEIGHTS), ("time_decayed", DECAYED), ("capacity_normalised", TOKENS)],
)
def test_an_order_says_what_it_counts(order, counted):
    assert needs(MoEvement(order=order)).popularity == counted


def test_the_first_step_that_is_due():
    here = context(MODEL, 9, last_step=8)
    assert Needs().due(here) == 9, "asked at each step"
    assert Needs(next_due=seventh).due(here) == 9, "not in the past"
    assert needs(Dense(4)).due(here) == needs(Guarded(Dense(4))).due(here) == 12


def test_a_wrapper_passes_on_plans_checks_and_descriptions():
    here = context(MODEL, 4, last_step=3)
    assert Wrapper(Dense(4)).plan(here) == Dense(4).plan(here)
    assert Wrapper(Dense(4)).describe() == Dense(4).describe()
    with pytest.raises(ConfigError, match="only 4 experts"):
        Wrapper(MoC(k=5)).check(MODEL)


@pytest.mark.parametrize("kind", [Dense, "dense", None])
def test_only_policies_are_wrapped(kind):
    with pytest.raises(ConfigError, match=r"Plain\(policy=.*give a policy, which has plan, check and describe"):
        Plain(kind)


# --- policies of one's own ---


def takers(tmp_path):
    """Everything that is given a policy."""
    return {
        "Options": lambda policy: Options(policy=policy, dirpath=str(tmp_path)),
        "System": lambda policy: System("own", policy),
        "Guarded": Guarded,
        "Wrapper": Wrapper,
        "AnyOf": lambda policy: AnyOf([Dense(), policy]),
        "Planner": lambda policy: Planner(policy, LiveState(Ledger(MODEL), None, None), 0, Settings()),  # type: ignore[arg-type]
    }


TAKERS = list(takers(""))


@pytest.mark.parametrize("taker", TAKERS)
def test_three_methods_are_a_policy(tmp_path, taker):
    assert isinstance(Own(), Policy)
    takers(tmp_path)[taker](Own())
    assert needs(Own()) == Needs()


@pytest.mark.parametrize("given", [True, {"sizes": True}, Needs, lambda self: Needs()])
def test_needs_that_are_none_are_refused(tmp_path, given):
    kind = type("Odd", (Own,), {"needs": given})
    with pytest.raises(ConfigError, match=r"Odd\.needs is .*: make it a property, or a ClassVar"):
        Options(policy=kind(), dirpath=str(tmp_path))


def test_an_error_within_needs_is_not_taken_for_none():
    class Broken(Own):
        @property
        def needs(self):
            return self.no_such_thing

    with pytest.raises(AttributeError, match="no_such_thing"):
        needs(Broken())


def test_needs_of_the_class_are_enough():
    @dataclass(frozen=True)
    class Sized(Own):
        needs: ClassVar[Needs] = Needs(sizes=True)

    assert told(Sized()) == {"sizes"}


def test_what_nothing_provides_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Needy logs the gradients .* give memory=moe_ckpt.Memory"):
        takers(tmp_path)["Options"](Needy(Needs(gradients="as_consumed")))


def test_a_log_of_gradients_is_simulated_in_memory_alone():
    policy = Needy(Needs(gradients="as_consumed"))
    with pytest.raises(ConfigError, match=r"durable='storage'\): Needy keeps its log in memory .* use durable: peers"):
        System("own", policy)
    assert System("own", policy, durable="node").in_trainer


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": True}, r"Needs\(size=\.\.\.\): no such option; did you mean sizes\?"),
        ({"sizes": 1}, r"Needs\(sizes=1\): choose True or False"),
        ({"boost": 0}, r"Needs\(boost=0\): the portion .* above 0 and at most 1.*None switches it off"),
        ({"next_due": 5}, r"Needs\(next_due=5\): give a function that takes a PolicyContext, or None"),
        ({"warning": "never"}, r"Needs\(warning='never'\): give a function that takes a PolicyContext, or None"),
        ({"popularity": "soft"}, r"Needs\(popularity='soft'\): choose 'tokens', 'gate_weights', 'decayed', or None"),
        ({"gradients": True}, r"Needs\(gradients=True\): choose 'as_consumed', 'bf16', or None"),
        ({"period_steps": 0}, r"Needs\(period_steps=0\): period_steps must be a whole number of at least 1"),
    ],
)
def test_wrong_needs_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        Needs(**given)


# --- who goes by them ---


def test_options_and_systems_tell_the_needs_of_the_guarded_policy(tmp_path):
    given = Options(policy=Guarded(MoEvement(order="soft_count")), dirpath=str(tmp_path))
    assert given.needs.windows
    assert given.needs.popularity == GATE_WEIGHTS
    policy = Guarded(MoEvement())
    assert System("guarded", policy).sparse
    assert System("guarded", policy).needs == needs(policy)


def test_a_guard_around_a_partial_policy_does_not_make_it_exact():
    assert [exact(policy) for policy in (Dense(), CheckFreq(), MoEvement(), Own())] == [True] * 4
    assert [exact(policy) for policy in (MoC(), MoEtion(), Guarded(MoC()), AnyOf([Dense(), MoC()]))] == [False] * 4
