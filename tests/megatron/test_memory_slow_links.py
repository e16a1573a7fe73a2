"""Megatron on two nodes with copies of each other, one of them behind a link on which a copy takes many iterations.

Only the way of copies is slow: Megatron's own groups, made before, are not.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.integration.pauses import steps_of
from tests.megatron.exactness import LIFE_SECS, life_of
from tests.megatron.running import Running, running
from tests.megatron.test_memory_phases import LAYOUTS, POLICIES, WINDOWS, comes_back_from_memory, lose
from tests.support.networks import Network, network_or_skip
from tests.support.waiting import retry_until

pytestmark = pytest.mark.slow

SLOW_NODE, LINK_MBIT_PER_SEC = 1, 1.0
WELL, LATE, STEPS = 6, 5, 200
"""Iterations before the link gets slow, and those that a copy is behind then."""
IN_TURN = [(policy, list(LAYOUTS)[at % 2]) for at, policy in enumerate(POLICIES)]


def joins(network: Network) -> None:
    """The rank's node gets its network between Megatron's groups and the library's."""
    from moe_ckpt.megatron import checkpoint

    plain, node = checkpoint.make_communicator, int(os.environ["RANK"]) // 2

    def entering(*args: Any, **kwargs: Any) -> Any:
        comm = plain(*args, **kwargs)
        network.enter(node)
        return comm

    checkpoint.make_communicator = entering


def behind(life: Running) -> int:
    """Steps that the slow node has yet to get of a rank of the other one."""
    slow = life.node(SLOW_NODE)
    return max(life.newest(rank) - max(steps_of(slow, rank), default=0) for rank in (0, 1))


@pytest.mark.parametrize(("policy", "layout"), IN_TURN)
@pytest.mark.parametrize("lost", [1 - SLOW_NODE, SLOW_NODE], ids=["the other one lost", "the slow one lost"])
def test_under_every_exact_policy_a_slow_link_costs_no_bit(lost, policy, layout, tmp_path):
    """What is sent to the slow node is late. The copies that it sends itself are not, but for their answers."""
    case = replace(LAYOUTS[layout], policy=POLICIES[policy], steps=STEPS, reseed=False, options={"timeout_secs": 120.0})
    network = network_or_skip(2, slow=True)
    with network, running(case, tmp_path, life_of(case, tmp_path), partial(joins, network)) as life:
        life.comes_to(WELL)
        network.slow(SLOW_NODE, LINK_MBIT_PER_SEC)
        assert retry_until(lambda: behind(life) >= LATE, LIFE_SECS)
        newest = life.kill_all()
    assert not any("gets no more copies" in life.said(rank) for rank in range(4)), "slow is not dead"
    lose(tmp_path, lost)
    step = comes_back_from_memory(life)
    if lost == SLOW_NODE:
        assert newest - WINDOWS <= step
    else:
        assert WELL - WINDOWS <= step < newest, "its newest copies had yet to arrive"
