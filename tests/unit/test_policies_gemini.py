"""Gemini: dense checkpoints for peers' memory, at a fixed interval or by Young's or Daly's formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import AnyOf, Dense, FaultRecord, Gemini, Measured, Policy, needs_of
from tests.support.constants import with_constants
from tests.unit.builders import catalog, context

MODEL = catalog(1, 2)
MEASURED = Measured(iteration_secs=2.0, checkpoint_cost_secs=1.5, persist_secs=8.0)
FAULT = FaultRecord(restored_step=1, lost_tokens=0, stale_experts=0)
secs = st.floats(1e-3, 1e3)


def facts(step=1, last_step=None, measured=MEASURED, faults=0):
    return context(MODEL, step=step, last_step=last_step, measured=measured, faults=(FAULT,) * faults)


def saved(policy, steps, **known):
    found = []
    for step in range(1, steps + 1):
        if policy.plan(facts(step, found[-1] if found else None, **known)):
            found.append(step)
    return found


def test_it_saves_every_operator():
    assert Gemini(1).plan(facts(3)).full == MODEL.everything


def test_a_fixed_interval_keeps_to_its_multiples():
    assert saved(Gemini(5), 21) == [5, 10, 15, 20]
    assert saved(Gemini(5), 60, faults=9) == saved(Dense(5), 60)


@pytest.mark.parametrize(
    ("policy", "step", "faults", "interval"),
    [
        (Gemini("young", mtbf_secs=1200), 1, 0, 30),  # sqrt(2 * 1.5 * 1200) = 60 s
        (Gemini("daly", mtbf_secs=1200), 1, 0, 30),  # 60 * (1 + 0.025 / 3 + 0.000625 / 9) - 1.5 = 59.004 s
        (Gemini("young", mtbf_secs=3), 1, 0, 4),  # 3 s, but one is 8 s on its way
        (Gemini("daly", mtbf_secs=0.7), 1, 0, 4),  # 1.5 s is beyond the series: 0.7 s
        (Gemini("young"), 0, 0, 90),  # one failure in three hours: sqrt(2 * 1.5 * 10800) = 180 s
        (Gemini("young"), 3600, 5, 48),  # six in 18000 s: sqrt(2 * 1.5 * 3000) = 94.9 s
        (Gemini("young", mtbf_secs=3000), 3600, 5, 48),
        (with_constants(Gemini, max_interval=7)("young"), 0, 0, 7),
    ],
)
def test_the_formulas_by_hand(policy, step, faults, interval):
    assert policy.interval(facts(step, faults=faults)) == interval


def test_a_whole_run_keeps_to_the_interval_found():
    assert saved(with_constants(Gemini, profile_steps=3)("young", mtbf_secs=75), 40) == [8, 16, 24, 32, 40]
    assert saved(with_constants(Gemini, profile_steps=3)("young", mtbf_secs=75), 10, measured=Measured(2.0)) == [
        3,
        6,
        9,
    ]


@pytest.mark.parametrize("measured", [Measured(), Measured(2.0), Measured(2.0, 1.5), Measured(0.0, 1.5, 8.0)])
def test_without_measurements_it_saves_after_the_profile(measured):
    policy = with_constants(Gemini, profile_steps=4, max_interval=9)()
    assert policy.interval(facts(measured=measured)) is None
    assert policy.next_due(facts(6, 5, measured=measured)) == 5 + (9 if measured.iteration_secs is None else 4)
    assert Gemini(3).interval(facts(measured=measured)) == 3


rules = st.sampled_from(["young", "daly"])


@given(cost=secs, persist=secs, more=st.floats(1, 50), rule=rules, step=st.integers(0, 9999))
def test_more_failures_are_saved_for_more_often_and_one_checkpoint_is_on_its_way(cost, persist, more, rule, step):
    policy = with_constants(Gemini, max_interval=10**9)(rule)
    measured = Measured(2.0, cost, persist)
    calm, rough = (policy.interval(facts(step, measured=measured, faults=faults)) for faults in (1, 9))
    assert rough <= calm
    assert rough * 2.0 >= persist
    if rule == "young":
        dearer = replace(measured, checkpoint_cost_secs=cost * more)
        assert policy.interval(facts(step, measured=dearer, faults=1)) >= calm


def test_it_needs_memory_on_a_peer():
    assert needs_of(Gemini()).replicas == needs_of(Gemini(3)).replicas == 1
    assert needs_of(AnyOf([Dense(100), Gemini(3)])).replicas == 1
    assert needs_of(AnyOf([Dense(100), Dense(3)])).replicas == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every_n_steps": 0}, r"Gemini\(every_n_steps=0\): .*whole number of at least 1, or one of 'young', 'daly'"),
        ({"every_n_steps": "often"}, r"every_n_steps='often'"),
        ({"every_n_steps": True}, "every_n_steps=True"),
        ({"every_n_steps": 1.5}, "every_n_steps=1.5"),
        ({"mtbf_secs": 0}, "mtbf_secs=0"),
        ({"mtbf_secs": float("inf")}, "mtbf_secs=inf"),
        ({"mtbf_secs": "1h"}, "mtbf_secs='1h'"),
    ],
)
def test_impossible_options_are_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        Gemini(**options)


def test_it_is_a_policy_that_says_what_it_is():
    assert isinstance(Gemini(), Policy)
    Gemini().check(catalog(0, 0))
    assert Gemini("young", 600).describe() == {"name": "gemini", "every_n_steps": "young", "mtbf_secs": 600}
