"""EP2 x DP2 under Megatron, each rank a node: a node is lost, and each expert is as new as it is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.megatron_gpt import Setup
from tests.support.megatron_two_lives import RANKS, both_lives, holders_of, require_versions
from tests.support.two_sets import TwoSets, newest

LAST = 7
PLAIN = Setup(ep=2, layers=2, num_microbatches=2)
SHARDED = Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True, precision="bf16")


@pytest.mark.parametrize("setup", [PLAIN, pytest.param(SHARDED, marks=pytest.mark.slow)], ids=["plain", "dist-opt"])
@pytest.mark.parametrize("lost", [(2,), *(pytest.param(lost, marks=pytest.mark.slow) for lost in ((), (1,)))])
def test_every_expert_is_as_new_as_it_is_left(tmp_path: Path, setup: Setup, lost: tuple[int, ...]):
    told, lines = both_lives(tmp_path, setup, [TwoSets()] * RANKS, LAST, lost)
    [step] = {rank["step"] for rank in told}
    assert step >= LAST - 1
    wanted = newest(step, setup.layers, setup.experts, holders_of(setup, lines), lost)
    assert len(set(wanted.values())) > 1
    require_versions(told, lines, wanted, step)
