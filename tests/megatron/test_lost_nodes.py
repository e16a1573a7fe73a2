"""EP2 x DP2 under Megatron, each rank a node with two copies: two nodes are lost, and one more."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ckpt.policies import Dense
from tests.support.megatron_gpt import Setup
from tests.support.megatron_two_lives import RANKS, both_lives, require_versions

LAST = 5
SETUPS = {
    "plain": Setup(ep=2, layers=2, num_microbatches=2),
    "dist-opt": Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True, precision="bf16"),
}


def every(setup: Setup, step: int) -> dict[tuple[int, int], int]:
    return {(layer, expert): step for layer in range(setup.layers) for expert in range(setup.experts)}


@pytest.mark.parametrize("name", ["plain", pytest.param("dist-opt", marks=pytest.mark.slow)])
def test_as_many_nodes_as_copies_may_be_lost(tmp_path: Path, name: str):
    """Two of four nodes: every bit of every rank is that of the last step, of which storage has nothing."""
    told, lines = both_lives(tmp_path, SETUPS[name], [Dense()] * RANKS, LAST, (0, 2), replicas=2)
    assert {rank["step"] for rank in told} == {LAST}
    require_versions(told, lines, every(SETUPS[name], LAST), LAST)


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), "dist-opt"])
def test_one_more_goes_back_to_storage_and_names_the_steps_that_are_lost(tmp_path: Path, name: str):
    told, lines = both_lives(tmp_path, SETUPS[name], [Dense()] * RANKS, LAST, (0, 1, 2), replicas=2)
    assert {rank["step"] for rank in told} == {1}
    require_versions(told, lines, every(SETUPS[name], 1), 1)
    [said] = [text for text in told[0]["said"] if "lost, and must be computed again" in text]
    assert f"iterations 2 to {LAST} are lost, and must be computed again: memory holds only a part of iteration" in said
    assert not any("computed again" in text for rank in told[1:] for text in rank["said"]), "rank 0 says it for all"
