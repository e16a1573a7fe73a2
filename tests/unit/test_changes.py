"""Whether two values of a hyperparameter are the same."""

from __future__ import annotations

import enum

import numpy as np
import pytest
import torch

from moe_ckpt.driver.changes import are_equal


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
