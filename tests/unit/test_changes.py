"""Whether two values of a hyperparameter are the same, and how those of optimizers are named."""

from __future__ import annotations

import enum

import numpy as np
import pytest
import torch

from moe_ckpt.driver.changes import are_equal, groups_of, optimizer_changes


class Mode(str, enum.Enum):
    MIN = "min"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (0.5, np.float64(0.5), True),
        (3, np.int64(3), True),
        (0.1, np.float32(0.1), False),
        ("min", Mode.MIN, True),
        ([1, 2], [1, 3], False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.zeros(2), False),
    ],
)
def test_types_do_not_matter_but_values_do(one, other, is_same: bool):
    assert are_equal(one, other) is is_same


def _groups(rate: float, *, scheduled: bool):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], rate)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return groups_of([optimizer])


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"rate": 0.1, "scheduled": True}, {"rate": 0.2, "scheduled": True}, ["optimizer lr 0.1 -> 0.2"]),
        ({"rate": 0.1, "scheduled": False}, {"rate": 0.1, "scheduled": True}, ["initial_lr (not set) -> 0.1"]),
        ({"rate": 0.1, "scheduled": True}, {"rate": 0.1, "scheduled": False}, ["initial_lr 0.1 -> (not set)"]),
    ],
)
def test_a_learning_rate_is_not_said_to_be_missing_where_a_scheduler_is(before, now, said):
    changes = list(map(str, optimizer_changes(_groups(**before), _groups(**now))))
    assert len(changes) == len(said)
    assert all(text in change for text, change in zip(said, changes, strict=True))
