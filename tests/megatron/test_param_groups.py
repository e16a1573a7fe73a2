"""Hyperparameters find their param group on every layout, and what a loop has set there comes back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ckpt.megatron import optimizers
from tests.support.megatron_acts import goes_on
from tests.support.megatron_gpt import Built, Setup
from tests.support.processes import run_ranks


def group(wd_mult: float = 1.0, expert: bool = False, **values: Any) -> dict[str, Any]:
    """As megatron.core.optimizer._get_param_groups makes them."""
    flags = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": expert}
    return {"params": [], "lr": 0.0, "max_lr": 1.0, **flags, **values}


def optimizer(monkeypatch: pytest.MonkeyPatch, *leaves: list[dict[str, Any]]) -> Any:
    """Stands for ``leaves``: of a chained optimizer, those of each Megatron optimizer in it."""
    found = [SimpleNamespace(optimizer=_Inner(groups), grad_scaler=None) for groups in leaves]
    monkeypatch.setattr(optimizers, "leaves", lambda optimizer: optimizer)
    return found


class _Inner(torch.optim.AdamW):
    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([torch.zeros(1)])
        self.param_groups = [dict(entry) for entry in groups]


def moved(monkeypatch: pytest.MonkeyPatch, there: list[list[dict[str, Any]]], here: list[list[dict[str, Any]]]):
    stored = optimizers.read_plain(optimizer(monkeypatch, *there))
    live = optimizer(monkeypatch, *here)
    optimizers.write_plain(live, stored)
    return [list(leaf.optimizer.param_groups) for leaf in live]


ONE = [[group(lr=0.1), group(lr=0.2, max_lr=9.0), group(0.0, lr=0.3)]]
"""No expert parallelism; the second is decoupled_lr's, which nothing but its rates tells apart."""
TWO = [
    [group(lr=0.1), group(lr=0.2, max_lr=9.0), group(0.0, lr=0.3)],
    [group(lr=0.4, expert=True), group(0.0, lr=0.5, expert=True)],
]


def test_groups_of_experts_come_from_the_dense_ones_that_they_were_in(monkeypatch: pytest.MonkeyPatch):
    new = [[group(), group(max_lr=9.0), group(0.0)], [group(expert=True), group(0.0, expert=True)]]
    dense, experts = moved(monkeypatch, ONE, new)
    assert [(entry["lr"], entry["max_lr"]) for entry in dense] == [(0.1, 1.0), (0.2, 9.0), (0.3, 1.0)]
    assert [(entry["lr"], entry["max_lr"]) for entry in experts] == [(0.1, 1.0), (0.3, 1.0)]
    assert all(entry["is_expert_parallel"] for entry in experts)


def test_dense_groups_take_nothing_from_groups_of_experts(monkeypatch: pytest.MonkeyPatch):
    [dense] = moved(monkeypatch, TWO, [[group(), group(max_lr=9.0), group(0.0)]])
    assert [(entry["lr"], entry["max_lr"]) for entry in dense] == [(0.1, 1.0), (0.2, 9.0), (0.3, 1.0)]


def test_a_group_of_no_known_kind_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    [[found]] = moved(monkeypatch, ONE, [[group(0.5, lr=7.0)]])
    assert found["lr"] == 7.0


def cool(built: Built, iteration: int, updated: bool) -> None:
    """A loop's own values, on top of what the schedule has written."""
    if updated:
        built.optimizer.param_groups[-1]["lr"] *= 0.5
        built.optimizer.param_groups[0]["weight_decay"] = 0.3 / iteration


@pytest.mark.parametrize(
    "policy", [("Dense", {"every_n_steps": 2}), ("MoEvement", {"window": 2})], ids=["dense", "window"]
)
def test_what_the_loop_has_set_after_the_schedule_comes_back(tmp_path: Path, policy):
    setup = Setup(dropout=0.0, hidden=16, ffn=16, vocab=32, seq=8, layers=2, num_microbatches=2, ep=2)
    run_ranks(goes_on, 2, str(tmp_path), setup, policy, cool, (5,), preload="tests.support.megatron_warm")


def test_another_schedule_sets_its_own_rates():
    from moe_ckpt.megatron.host import is_same_schedule

    scheduler = SimpleNamespace(state_dict=lambda: {"max_lr": 0.1, "num_steps": 4, "betas": (0.9, 0.99)})
    assert is_same_schedule(scheduler, {"max_lr": 0.1, "num_steps": 4, "betas": [0.9, 0.99]})
    assert not is_same_schedule(scheduler, {"max_lr": 0.2, "num_steps": 4, "betas": [0.9, 0.99]})
    assert not is_same_schedule(None, {"max_lr": 0.1})
    assert not is_same_schedule(scheduler, None)
