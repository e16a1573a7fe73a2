"""Dense, and the rhythm that all policies share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import Dense, Policy
from moe_ckpt.policies.base import next_multiple
from moe_ckpt_sim.run.sync import SyncDense
from tests.unit.builders import catalog, context

MODEL = catalog(2, 3)


def is_due(step: int, last_step: int | None, every_n_steps: int) -> bool:
    return step >= next_multiple(last_step, every_n_steps)


def test_dense_saves_every_operator_at_full_fidelity_to_storage():
    plan = Dense().plan(context(MODEL, step=4, last_step=3))
    assert plan.step == 4
    assert plan.full == tuple(op.id for op in MODEL.operators)
    assert plan.memory_only + plan.compute + plan.gradients == ()
    assert plan
    assert not plan.wait


def test_sync_waits():
    assert SyncDense().plan(context(MODEL)).wait


def test_every_n_steps():
    saved, last = [], None
    for step in range(1, 21):
        if Dense(every_n_steps=5).plan(context(MODEL, step=step, last_step=last)):
            saved.append(step)
            last = step
    assert saved == [5, 10, 15, 20]


def test_a_skipped_checkpoint_is_made_up_for_and_the_rhythm_kept():
    assert is_due(12, last_step=9, every_n_steps=5)
    assert not is_due(14, last_step=12, every_n_steps=5)
    assert is_due(15, last_step=12, every_n_steps=5)


@given(st.integers(1, 20), st.lists(st.integers(1, 7), max_size=60))
def test_never_further_apart_than_n_when_asked_every_step(every, busy):
    """Steps in ``busy`` (offsets) cannot save: the next one that can makes up for them."""
    blocked = {sum(busy[: i + 1]) for i in range(len(busy))}
    last, due_since = None, None
    for step in range(1, 80):
        due = is_due(step, last, every)
        if step % every == 0:
            due_since = due_since or step
        assert due == (due_since is not None)
        if due and step not in blocked:
            last, due_since = step, None


@pytest.mark.parametrize("n", [0, -3, 1.5, "5", True, None])
def test_impossible_intervals_are_refused_by_name(n):
    with pytest.raises(ConfigError, match=r"Dense\(every_n_steps=.*whole number of at least 1"):
        Dense(every_n_steps=n)


def test_dense_serves_models_without_moe_layers():
    Dense().check(catalog(0, 0))


def test_it_is_a_policy_that_says_what_it_is():
    assert isinstance(Dense(), Policy)
    assert Dense(3).describe() == {"name": "dense", "every_n_steps": 3}
