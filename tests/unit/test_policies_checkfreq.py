"""CheckFreq finds the interval at run time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import CheckFreq, Measured, Policy
from tests.support.constants import with_constants
from tests.unit.builders import catalog, context

MODEL = catalog(1, 2)
secs = st.floats(1e-4, 1e3)


@given(iteration=secs, cost=secs, persist=secs, budget=st.floats(0.001, 0.5))
def test_interval_keeps_overhead_within_the_budget_and_one_checkpoint_on_its_way(iteration, cost, persist, budget):
    policy = with_constants(CheckFreq, max_interval=10**12)(budget)
    n = policy.interval(Measured(iteration, cost, persist))
    assert n >= 1
    assert cost / (n * iteration) <= budget * (1 + 1e-9)
    assert persist <= n * iteration * (1 + 1e-9)
    if n > 1:  # and it is the smallest that does
        shorter = (n - 1) * iteration
        assert cost / shorter > budget * (1 - 1e-9) or persist > shorter * (1 - 1e-9)


def test_interval_by_hand():
    assert CheckFreq().interval(Measured(1.0, 0.3, 2.0)) == 10
    assert CheckFreq(max_overhead=0.5).interval(Measured(1.0, 0.3, 7.5)) == 8
    assert CheckFreq().interval(Measured(1.0, 0.0, 0.0)) == 1
    assert with_constants(CheckFreq, max_interval=50)().interval(Measured(1.0, 1000.0, 1.0)) == 50


@pytest.mark.parametrize(
    "measured", [Measured(), Measured(iteration_secs=1.0), Measured(1.0, 0.1), Measured(0.0, 0.1, 0.1)]
)
def test_no_interval_before_there_are_measurements(measured):
    assert CheckFreq().interval(measured) is None


def run(policy, steps, measured_after_first):
    """Steps at which a run saves; costs are known three steps after the first checkpoint."""
    saved = []
    for step in range(1, steps + 1):
        known = saved and step >= saved[0] + 3
        measured = measured_after_first if known else Measured(iteration_secs=1.0)
        facts = context(MODEL, step=step, last_step=saved[-1] if saved else None, measured=measured)
        if policy.plan(facts):
            saved.append(step)
    return saved


def test_profile_then_one_checkpoint_then_the_interval_found():
    assert run(CheckFreq(), 60, Measured(1.0, 0.44, 1.0)) == [10, 25, 40, 55]


def test_measured_overhead_of_a_whole_run_stays_within_the_budget():
    cost = 0.2
    saved = run(CheckFreq(max_overhead=0.03), 2000, Measured(1.0, cost, 2.0))
    assert len(saved) > 200
    assert len(saved) * cost / 2000 <= 0.03


def test_without_any_measurement_saving_is_not_switched_off():
    policy = with_constants(CheckFreq, max_interval=7)()
    due = [step for step in range(1, 15) if policy.plan(context(MODEL, step=step))]
    assert due == list(range(7, 15))


def test_a_restart_that_forgot_the_measurements_saves_after_the_profile():
    policy = with_constants(CheckFreq, profile_steps=4)()
    facts = {"last_step": 100, "measured": Measured(iteration_secs=1.0)}
    assert not policy.plan(context(MODEL, step=103, **facts))
    assert policy.plan(context(MODEL, step=104, **facts)).full == tuple(op.id for op in MODEL.operators)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_overhead": 0}, "max_overhead=0"),
        ({"max_overhead": 1.0}, r"max_overhead=1\.0.*above 0 and below 1,"),
        ({"max_overhead": float("nan")}, "max_overhead=nan"),
        ({"max_overhead": "3%"}, "max_overhead='3%'"),
    ],
)
def test_impossible_options_are_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        CheckFreq(**options)


def test_it_is_a_policy_that_says_what_it_is():
    assert isinstance(CheckFreq(), Policy)
    CheckFreq().check(catalog(0, 0))
    assert CheckFreq(0.05).describe() == {"name": "checkfreq", "max_overhead": 0.05}
