"""Hyperparameters find their param group on every layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ckpt.megatron import hyperparameters


def group(wd_mult: float = 1.0, expert: bool = False, **values: Any) -> dict[str, Any]:
    """As megatron.core.optimizer._get_param_groups makes them."""
    flags = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": expert}
    return {"params": [], "lr": 0.0, "max_lr": 1.0, **flags, **values}


def optimizer(monkeypatch: pytest.MonkeyPatch, *leaves: list[dict[str, Any]]) -> Any:
    """Stands for ``leaves``: of a chained optimizer, those of each Megatron optimizer in it."""
    found = [SimpleNamespace(optimizer=_Inner(groups), grad_scaler=None) for groups in leaves]
    for module in ("hyperparameters", "optimizers"):
        monkeypatch.setattr(f"moe_ckpt.megatron.{module}.leaves", lambda optimizer: optimizer)
    return found


class _Inner(torch.optim.AdamW):
    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([torch.zeros(1)])
        self.param_groups = [dict(entry) for entry in groups]


def moved(monkeypatch: pytest.MonkeyPatch, there: list[list[dict[str, Any]]], here: list[list[dict[str, Any]]]):
    stored = hyperparameters.read(optimizer(monkeypatch, *there))
    live = optimizer(monkeypatch, *here)
    hyperparameters.write(live, stored)
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
