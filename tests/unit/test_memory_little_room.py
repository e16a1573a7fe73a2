"""A budget for little more than one snapshot: checkpoints are given up before others hear of it; training goes on."""

from __future__ import annotations

import pytest

from moe_ckpt.policies import Dense
from tests.unit.test_engine_host_tier import assert_state, come_back
from tests.unit.test_engine_memory_only import (
    at,
    life,
    no_memory_of_other_tests,  # noqa: F401 - a fixture
    where,  # noqa: F401 - a fixture
)


@pytest.mark.parametrize("slots", [1.2, 1.6, 2.1, 2.6])
def test_training_goes_on_whatever_is_given_up(where, slots):  # noqa: F811
    with life(where) as first:
        first.go(1, settle=True)
        nbytes = first.session.tier.nbytes
    with life(where, Dense(), every=1, host_memory_bytes=int(slots * nbytes), when_busy="wait") as second:
        come_back(second)
        for _ in range(40):
            second.go(1)
    with life(where) as third:
        restored, _ = come_back(third)
        assert_state(third, at(restored.manifest.step))
        assert restored.manifest.step > 30
