"""Which checkpoints go on from memory to storage, and the formulas behind "auto"; numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.cadence import (
    LONGEST_AUTO_SECS,
    PRIOR_MTBF_SECS,
    UNMEASURED_SECS,
    StorageCadence,
    StorageFacts,
    daly_secs,
    expected_mtbf_secs,
    young_secs,
)
from moe_ckpt.errors import ConfigError

AUTO = StorageCadence("auto")
MEASURED = StorageFacts(step=0, last_step=0, flush_secs=60.0, iteration_secs=2.0)
secs = st.floats(1e-3, 1e6)


def went(cadence, steps, iteration_secs=1.0, every=1, **facts):
    """Steps of those that memory holds, every ``every``-th, that went to storage."""
    found = []
    for step in range(every, steps + 1, every):
        last = found[-1] if found else None
        since = (step - (last or 0)) * iteration_secs
        if cadence.due(StorageFacts(step, last, since, iteration_secs=iteration_secs, **facts)):
            found.append(step)
    return found


def test_every_checkpoint_unless_asked_otherwise():
    assert StorageCadence() == StorageCadence(1)
    assert went(StorageCadence(), 5) == [1, 2, 3, 4, 5]


def test_every_n_steps_keeps_to_multiples_of_n():
    assert went(StorageCadence(4), 13) == [1, 4, 8, 12]


def test_where_memory_takes_few_steps_the_first_from_each_multiple_on_goes():
    assert went(StorageCadence(10), 50, every=7) == [7, 14, 21, 35, 42]


def test_by_seconds_alone():
    assert went(StorageCadence(30.0), 20, iteration_secs=4.0) == [1, 9, 17]
    assert StorageCadence("10min").next_secs(MEASURED) == 600.0
    assert StorageCadence(30.0).next_step(MEASURED) is None


@pytest.mark.parametrize("cadence", [StorageCadence(1000), StorageCadence(1e5), AUTO])
def test_the_first_one_always_goes(cadence):
    assert cadence.due(StorageFacts(step=1))
    assert not cadence.due(StorageFacts(step=2, last_step=1, secs_since=1.0))


@pytest.mark.parametrize(
    ("flush", "iteration", "failures", "run", "steps"),
    [
        (60.0, 2.0, 0, 0.0, 570),  # sqrt(2 * 60 * 10800) = 1138.4 s
        (60.0, 2.0, 5, 7200.0, 300),  # six in 18000 s: sqrt(2 * 60 * 3000) = 600 s
        (60.0, 2.0, 59, 25200.0, 135),  # sixty in 36000 s: sqrt(2 * 60 * 600) = 268.3 s
        (1000.0, 10.0, 29, 1200.0, 100),  # sqrt(2 * 1000 * 400) = 894 s: less than writing takes
        (60.0, 2.0, 0, 30 * 86400.0, 5400),  # sqrt(2 * 60 * 2602800) = 4.9 h: three at most
        (0.0, 2.0, 0, 0.0, 1),
        (0.01, 100.0, 0, 0.0, 1),
    ],
)
def test_auto_is_youngs_interval(flush, iteration, failures, run, steps):
    facts = StorageFacts(7 + steps, 7, 0.0, flush, iteration, failures, run)
    assert AUTO.next_step(facts) == 7 + steps
    assert AUTO.due(facts)
    assert not AUTO.due(replace(facts, step=6 + steps))


@pytest.mark.parametrize("unknown", [{"flush_secs": None}, {"iteration_secs": None}])
def test_auto_without_measurements_goes_by_the_clock(unknown):
    facts = replace(MEASURED, step=9999, secs_since=UNMEASURED_SECS - 1, **unknown)
    assert not AUTO.due(facts)
    assert AUTO.due(replace(facts, secs_since=UNMEASURED_SECS))


@given(flush=secs, more=st.floats(1, 100), iteration=secs, failures=st.integers(0, 99), run=secs)
def test_what_costs_more_goes_less_often_and_what_fails_more_goes_more_often(flush, more, iteration, failures, run):
    facts = StorageFacts(0, 0, 0.0, flush, iteration, failures, run)
    steps = AUTO.next_step(facts)
    assert AUTO.next_step(replace(facts, flush_secs=flush * more)) >= steps
    assert AUTO.next_step(replace(facts, run_secs=run * more)) >= steps
    assert AUTO.next_step(replace(facts, failures=failures + 1)) <= steps
    assert steps >= 1
    assert steps * iteration >= flush  # one is written before the next begins
    assert (steps - 1) * iteration < max(flush, LONGEST_AUTO_SECS)


def test_before_a_failure_one_in_three_hours_is_assumed():
    assert expected_mtbf_secs(0, 0.0) == PRIOR_MTBF_SECS == 10_800
    assert expected_mtbf_secs(1, 3600.0) == 7200
    assert expected_mtbf_secs(999, 997 * 600.0) == pytest.approx(609, abs=0.01)  # in the end, what was seen


@given(failures=st.integers(0, 1000), run=st.floats(0, 1e7))
def test_the_mtbf_falls_with_failures_and_grows_without(failures, run):
    assert expected_mtbf_secs(failures + 1, run) < expected_mtbf_secs(failures, run)
    assert expected_mtbf_secs(failures, run + 1) > expected_mtbf_secs(failures, run)


def test_young_and_daly_by_hand():
    assert young_secs(30, 7200) == pytest.approx(657, abs=0.5)
    assert young_secs(0, 7200) == daly_secs(0, 7200) == 0
    assert daly_secs(300, 24 * 3600) == pytest.approx(117 * 60, abs=30)
    assert daly_secs(201, 100) == 100


@pytest.mark.parametrize(
    ("every", "said"),
    [
        (0, r"storage_every=0: must be a whole number of steps, at least 1; or a duration such as '10min'; or 'auto'"),
        (-3, "storage_every=-3"),
        (True, "storage_every=True"),
        ("90", "storage_every='90': must be a whole number of steps"),  # of which unit?
        (None, "storage_every=None"),
        (0.0, "storage_every=0.0: must be greater than 0"),
        (float("nan"), "storage_every=nan"),
        ("soon", "storage_every='soon'"),
        ("31d", "storage_every='31d'"),
    ],
)
def test_what_is_no_cadence_is_refused_by_name(every, said):
    with pytest.raises(ConfigError, match=said):
        StorageCadence(every)
