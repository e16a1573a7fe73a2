"""Which copy of every operator a recovery takes, decided from inventories alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.step import Tier
from moe_ckpt.errors import CoverageError
from moe_ckpt.recovery.executing import plan_text
from moe_ckpt.recovery.recovery_plan import ABSENT, Inventory, first_choice, plan_recovery

OPERATORS = ("expert/0/0", "expert/0/1", "gate/0", "non_expert/head")


def inventory(tier, place, steps, nbytes=100):
    found = np.array(steps, dtype=np.int64)
    return Inventory(tier, place, found, np.where(found == ABSENT, 0, nbytes))


MEMORY = inventory(Tier.HOST, "memory", [6, ABSENT, ABSENT, ABSENT])
STORAGE = inventory(Tier.STORAGE, "step_00000006", [3, 5, 6, 6])


def test_the_newest_copy_of_each_operator_is_taken():
    plan = plan_recovery("step_00000006", 6, OPERATORS, [MEMORY, STORAGE])
    assert plan.from_source(MEMORY) == ("expert/0/0",)
    assert plan.from_source(STORAGE) == OPERATORS[1:]
    assert (plan.first, plan.step) == (6, 6)


def test_of_equal_copies_the_nearest_is_taken():
    memory = inventory(Tier.HOST, "memory", [3, 5, 6, ABSENT])
    assert plan_recovery("s", 6, OPERATORS, [memory, STORAGE]).from_source(memory) == OPERATORS[:3]
    assert plan_recovery("s", 6, OPERATORS, [STORAGE, memory]).from_source(memory) == ()


def test_a_copy_that_is_newer_than_the_checkpoint_is_of_another_state():
    newer = inventory(Tier.HOST, "memory", [7, 7, 7, 7])
    assert plan_recovery("s", 6, OPERATORS, [newer, STORAGE]).from_source(STORAGE) == OPERATORS


def test_what_nobody_holds_is_named_with_everybody_who_was_asked():
    nothing = inventory(Tier.STORAGE, "step_00000006", [3, 5, 6, ABSENT])
    with pytest.raises(CoverageError, match=r"non_expert/head is held by none of memory, step_00000006"):
        plan_recovery("step_00000006", 6, OPERATORS, [MEMORY, nothing])
    with pytest.raises(CoverageError, match="no source"):
        plan_recovery("step_00000006", 6, OPERATORS, [])


def test_rows_tell_what_is_of_the_step_from_what_is_older():
    plan = plan_recovery("step_00000006", 6, OPERATORS, [MEMORY, STORAGE])
    rows = [(row.source.label, row.oldest, row.newest, row.operators, row.experts, row.nbytes) for row in plan.rows()]
    assert rows == [("memory", 6, 6, 1, 1, 100), ("step_00000006", 6, 6, 2, 0, 200), ("step_00000006", 5, 5, 1, 1, 100)]


def test_a_plan_of_many_sources_is_said_as_a_table():
    assert plan_text(plan_recovery("step_00000006", 6, OPERATORS, [MEMORY, STORAGE])) == (
        "recovery plan for step_00000006:\n"
        "  from                    of step  operators  experts   size\n"
        "  memory: memory                6          1        1  100 B\n"
        "  storage: step_00000006        6          2        0  200 B\n"
        "  storage: step_00000006        5          1        1  100 B"
    )


def test_a_plan_of_one_source_is_said_in_one_line():
    whole = inventory(Tier.STORAGE, "step_00000006", [6, 6, 6, 6])
    text = plan_text(plan_recovery("step_00000006", 6, OPERATORS, [whole]))
    assert text == "recovery plan: all 4 operators (400 B) as of step 6 from step_00000006"


def test_a_window_says_which_steps_are_computed_again():
    window = inventory(Tier.STORAGE, "step_00000006", [4, 5, 6, 6])
    text = plan_text(plan_recovery("step_00000006", 6, OPERATORS, [window], first=4))
    assert "storage: step_00000006   4 to 5 " in text
    assert text.endswith("\n  then steps 5 to 6 are computed again")


ANCHORS = inventory(Tier.HOST, "this node", [5, 6, 5, 4])


def test_a_log_says_which_updates_are_made_once_more():
    plan = replace(plan_recovery("step_00000006", 6, OPERATORS, [ANCHORS]), updates=(4, 6))
    made = "then the 2 updates of steps 5 to 6 are repeated, from the consumed gradients"
    assert plan_text(plan).endswith(made)


steps_of_sources = st.lists(
    st.lists(st.integers(ABSENT, 8), min_size=len(OPERATORS), max_size=len(OPERATORS)), min_size=1, max_size=4
)


@given(steps_of_sources)
def test_every_plan_takes_the_newest_of_the_nearest(steps):
    sources = [inventory(Tier.HOST, f"place {n}", row) for n, row in enumerate(steps)]
    for at in range(len(OPERATORS)):
        usable = {n: row[at] for n, row in enumerate(steps) if ABSENT < row[at] <= 6}
        if not usable:
            with pytest.raises(CoverageError):
                plan_recovery("s", 6, OPERATORS, sources)
            return
    plan = plan_recovery("s", 6, OPERATORS, sources)
    for at, operator in enumerate(OPERATORS):
        usable = {n: row[at] for n, row in enumerate(steps) if ABSENT < row[at] <= 6}
        best = min(n for n, step in usable.items() if step == max(usable.values()))
        assert operator in plan.from_source(sources[best])
    assert sum(row.operators for row in plan.rows()) == len(OPERATORS)


def test_the_newest_checkpoint_is_tried_first_and_of_equal_ones_that_of_the_nearest_source():
    of = lambda *found: first_choice(found, lambda one: one[1])  # noqa: E731
    assert of(("memory", 5), ("peers", 7), ("storage", 7)) == ("peers", 7)
    assert of(("memory", 5), ("storage", 8)) == ("storage", 8)
    assert of() is None
