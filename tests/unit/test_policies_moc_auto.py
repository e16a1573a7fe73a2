"""MoC(k="auto", snapshot_k="auto"): as many experts per layer as there is time to copy, and to write."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.core.step import Tier
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import MoC, MoEtion, needs_of
from moe_ckpt.policies.base import Measured
from moe_ckpt.policies.selectors import SELECTORS
from tests.unit.builders import experts_in, memory, mixed, with_facts
from tests.unit.test_policies_moetion import MODEL, facts, heaviest, made, runs

AUTO = "auto"


def rates(copied, persisted, update=0.0):
    """With which a rank copies, and commits, so many bytes in an iteration of a second."""
    return Measured(
        recent_iteration_secs=1.0, update_secs=update, copy_bytes_per_sec=copied, persist_bytes_per_sec=persisted
    )


def levels(policy, copied=1e9, persisted=1e9, **known):
    """MODEL: 36 bytes of gates and embedding, 2 layers of 4 experts of 12 bytes."""
    return policy.levels(facts(measured=rates(float(copied), float(persisted)), **known))


def since(steps):
    """Storage is due, and got its newest checkpoint so many steps ago, or never."""
    chosen_at = np.full((2, 4), -1 if steps is None else 100 - steps)
    return {"step": 100, "last_step": 99, "index": 99, "chosen_at": chosen_at, "memory": memory()}


@pytest.mark.parametrize("due", [True, False], ids=["stored", "in memory"])
def test_host_memory_bounds_k_as_time_does(due):
    """A snapshot has half of the budget, so that the next one finds room beside it."""
    for room, k in ((36 + 24 * 4, 4), (36 + 24 * 3 - 1, 2), (36, 1)):
        known = {"snapshot_bytes": room, "memory": memory(storage_due=due)}
        assert levels(MoC(k=AUTO), **known) == (k, k)
        plan = MoEtion().plan(facts(measured=rates(1e9, 1e9), **known))
        assert heaviest(facts(), plan.full) <= max(room, 36 + 24)
        assert heaviest(facts(), plan.full) > room - 12


def test_by_hand():
    both = MoC(k=AUTO, snapshot_k=AUTO)
    assert levels(both, 36 + 2 * 12 * 3, 36 + 2 * 12) == (1, 3)
    assert levels(both, 36 + 2 * 12 * 3 - 1, 36 + 2 * 12 * 2) == (2, 2)
    assert levels(both) == (4, 4)
    assert levels(both, 36 + 24, 1e9) == (1, 1), "what is written passes through memory"
    assert levels(both, 1, 1) == (1, 1), "all must come round"


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (MoC(k=AUTO), (2, 2)),  # one level: no more is copied than written
        (MoC(k=2, snapshot_k=AUTO), (2, 3)),
        (MoC(k=4, snapshot_k=AUTO), (4, 4)),  # what the user wants to be written, whatever it costs
        (MoC(k=AUTO, snapshot_k=1), (1, 1)),
        (MoC(k=AUTO, snapshot_k=4), (2, 4)),
        (MoC(k=AUTO, snapshot_k=AUTO, every_n_steps=2), (3, 3)),  # twice the time to write, not to copy
    ],
)
def test_either_level_may_be_given(policy, found):
    assert levels(policy, 36 + 24 * 3, 36 + 24 * 2) == found


@pytest.mark.parametrize("policy", [MoC(k=AUTO), MoC(k=AUTO, snapshot_k=AUTO), MoC(k=AUTO, snapshot_k=3)])
@pytest.mark.parametrize(("steps", "k"), [(None, 1), (1, 1), (2, 2), (3, 3), (50, 3)])
def test_storage_has_the_time_since_it_got_the_last_checkpoint(policy, steps, k):
    """In one iteration 42 bytes are written of the 36 + 24 K that a checkpoint has, and K = 3 can be copied."""
    found = levels(policy, 36 + 24 * 3, 42, **since(steps))
    assert found == (k, k if policy.snapshot_k is None else 3)


@pytest.mark.parametrize(
    ("policy", "k"), [(MoC(k=AUTO), 3), (MoC(k=AUTO, snapshot_k=AUTO), 3), (MoC(k=AUTO, snapshot_k=2), 2)]
)
def test_what_stays_in_memory_is_bound_by_the_copy_alone(policy, k):
    for steps in (None, 1, 9):
        known = {**since(steps), "memory": memory(storage_due=False)}
        assert levels(policy, 36 + 24 * 3, 1, **known) == (k, k)
    assert levels(MoC(k=2, snapshot_k=AUTO), 36 + 24 * 3, 1, **known) == (2, 3), "a number is the user's"


def test_k_of_storage_grows_with_its_cadence_as_moetions_budget_does():
    for steps in range(1, 6):
        known = facts(measured=rates(1e9, 30.0), **since(steps))
        k, _ = MoC(k=AUTO).levels(known)
        limit = MoEtion().budget_bytes(known.measured, steps)
        assert heaviest(known, MoC(k=k).plan(known).full) <= max(limit, 36 + 24)
        assert k == max(1, min(4, (limit - 36) // 24))


def test_the_update_is_no_time_to_copy_in():
    policy = MoC(k=1, snapshot_k=AUTO)
    assert policy.levels(facts(measured=rates(216.0, 1.0)))[1] == 4
    assert policy.levels(facts(measured=rates(216.0, 1.0, update=0.5)))[1] == 3


@pytest.mark.parametrize("measured", [Measured(), Measured(recent_iteration_secs=9.0)])
def test_until_rates_are_known_one_expert_of_each_layer_is_saved(measured):
    assert MoC(k=AUTO, snapshot_k=AUTO).levels(facts(measured=measured)) == (1, 1)
    assert MoC(k=2, snapshot_k=AUTO).levels(facts(measured=measured)) == (2, 2)


def test_dynamic_k_starts_from_what_there_is_time_for():
    policy = MoC(k=AUTO, snapshot_k=AUTO, plt_budget=0.04)
    lost = {"lost_tokens": 30, "routed_tokens": 1000}
    assert levels(policy, 1e9, 36 + 24, **lost) == (2, 4)
    assert levels(policy, 36 + 24, 36 + 24, **lost) == (2, 2)


def test_layers_of_different_sizes_have_one_k():
    model = mixed(2, 8)
    known = facts(model=model, measured=rates(36 + 12 * (2 + 5), 1e9))
    assert MoC(k=AUTO).levels(known)[0] == 5, "the smaller layer saves all it has"
    assert MoC(k=AUTO).levels(with_facts(known, measured=rates(1e9, 1e9)))[0] == 8


def test_the_plan_has_both_levels_and_says_k():
    plan = MoC(k=AUTO, snapshot_k=AUTO).plan(facts(measured=rates(36 + 24 * 3, 36 + 24)))
    assert (plan.k, len(experts_in(plan.full)), len(experts_in(plan.memory_only))) == (1, 2, 4)


@settings(max_examples=150, deadline=None)
@given(
    run=runs,
    copied=st.integers(0, 1500),
    persisted=st.integers(0, 1500),
    selector=st.sampled_from(sorted(SELECTORS)),
)
def test_no_rank_copies_or_writes_more_than_it_has_time_for(run, copied, persisted, selector):
    known = made(run, measured=rates(float(copied), float(persisted)))
    policy = MoC(k=AUTO, snapshot_k=AUTO, selector=selector)
    k, snapshot_k = policy.levels(known)
    assert 1 <= k <= snapshot_k <= run["experts"]
    alike = with_facts(known, chosen_at=known.tokens.chosen_at[Tier.STORAGE] * 0 + 99)  # so that none is overdue
    if k > 1:
        assert heaviest(known, policy.plan(alike).full) <= persisted
    if snapshot_k > 1:  # of the second level, where it is dealt evenly: it comes after what is written
        assert heaviest(known, MoC(k=snapshot_k, selector=selector).plan(alike).full) <= copied


@given(run=runs, limit=st.integers(0, 1500))
def test_one_more_would_not_fit(run, limit):
    """Of every layer, dealt evenly to the owners."""
    known = made(run, measured=rates(float(limit), 1e12))
    k, _ = MoC(k=AUTO).levels(known)
    if k < run["experts"]:
        even = with_facts(known, chosen_at=known.tokens.chosen_at[Tier.STORAGE] * 0 + 5)
        assert heaviest(even, MoC(k=k + 1).plan(even).full) > limit


def test_it_asks_for_sizes_only_where_it_goes_by_them():
    assert needs_of(MoC(k=AUTO)).sizes
    assert needs_of(MoC(snapshot_k=AUTO)).sizes
    assert not needs_of(MoC(snapshot_k=2)).sizes
    with pytest.raises(ConfigError, match=r"sizes must have every operator.*or MoC a number of experts"):
        MoC(k=AUTO).plan(facts(sizes={}))


@pytest.mark.parametrize("name", ["k", "snapshot_k"])
@pytest.mark.parametrize("value", ["many", "AUTO", "", 0, -1, True, 1.5])
def test_other_words_and_numbers_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"MoC\({name}="):
        MoC(**{name: value})


def test_a_number_is_still_compared_with_the_model():
    MoC(k=AUTO, snapshot_k=AUTO).check(MODEL)
    with pytest.raises(ConfigError, match=r"MoC\(snapshot_k=5\): layer 'layers\.0\.moe' has only 4 experts"):
        MoC(k=AUTO, snapshot_k=5).check(MODEL)
    with pytest.raises(ConfigError, match=r"MoC\(k=5\): layer"):
        MoC(k=5, snapshot_k=AUTO).check(MODEL)


def test_it_says_what_was_asked_for():
    said = MoC(k=AUTO, snapshot_k=AUTO).describe()
    assert (said["k"], said["snapshot_k"]) == (AUTO, AUTO)
    assert MoC(k=AUTO).describe()["snapshot_k"] == AUTO
