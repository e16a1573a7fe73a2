"""Which settings of a Megatron run differ from those that it began with, and whose are in force."""

from __future__ import annotations

from typing import Any

import pytest

from moe_ckpt.driver.host import loading_state
from moe_ckpt.errors import StoreError
from moe_ckpt.megatron.optimizers import changes, plain_settings

DENSE = {"wd_mult": 1.0, "is_expert_parallel": False}
EXPERT = {"wd_mult": 1.0, "is_expert_parallel": True}


def of(groups: list[dict[str, Any]], **scheduler: Any) -> dict[str, Any]:
    return plain_settings(groups, scheduler)


def told(*states: dict[str, Any]) -> list[tuple[str, bool]]:
    return [(str(change), change.from_checkpoint) for change in changes(*states)]


def test_what_a_scheduler_computes_and_where_it_is_are_no_settings():
    found = of([{**DENSE, "lr": 0.5, "weight_decay": 0.1, "eps": 1e-8, "step": 3}], max_lr=0.5, num_steps=7)
    assert found == {"groups": [{**DENSE, "eps": 1e-8}], "scheduler": {"max_lr": 0.5}}
    assert of([{**DENSE, "lr": 0.5}])["groups"][0]["lr"] == 0.5, "without a scheduler it is one"


def test_each_change_is_told_once_with_whose_value_is_in_force():
    before = of([{**DENSE, "max_lr": 1.0}, {**EXPERT, "max_lr": 1.0}], max_lr=1.0, lr_decay_steps=10)
    now = of([{**EXPERT, "max_lr": 2.0}, {**DENSE, "max_lr": 2.0}], max_lr=2.0, lr_decay_steps=20)
    used = of([{**EXPERT, "max_lr": 1.0}, {**DENSE, "max_lr": 1.0}], max_lr=2.0, lr_decay_steps=20)
    assert told(before, now, used) == [
        ("optimizer max_lr 1.0 -> 2.0", True),
        ("scheduler lr_decay_steps 10 -> 20", False),
    ]
    assert told(before, before, before) == []


def test_another_layout_has_other_groups_of_the_same_settings():
    before = of([{**DENSE, "max_lr": 1.0}, {**EXPERT, "max_lr": 1.0}], max_lr=1.0)
    now = of([{**DENSE, "max_lr": 1.0}], max_lr=1.0)
    assert told(before, now, now) == []
    assert told(now, before, before) == [], "experts that had no groups of their own"


def test_settings_that_no_run_writes_raise_the_typed_error():
    now = of([{**DENSE, "max_lr": 1.0}], max_lr=1.0)
    edited = {"groups": ["wd_mult"], "scheduler": {}}
    with (
        pytest.raises(StoreError, match=r"rank_00000.*settings of optimizer and scheduler"),
        loading_state("the settings of optimizer and scheduler", "rank_00000.json"),
    ):
        changes(edited, now, now)
