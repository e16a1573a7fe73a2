"""Optimizer recomputation (MoEtion, Algorithm 3) under Megatron, EP2 x DP2, each rank a node.

Peers hold full copies of experts and the gradients since. All ranks are killed, nodes are lost, and each expert comes
back as of the last step at which it, or its gradient, was sent, to the last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.megatron_gpt import Setup
from tests.support.megatron_two_lives import RANKS, both_lives, holders_of, require_versions
from tests.support.recompute import Steady, newest, plans

LAST = 12
SETUPS = {
    "dist-opt": Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True, precision="bf16"),
    "fp32": Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True),
    "grouped": Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True, precision="bf16", grouped=True),
}
CASES = [("dist-opt", (2,)), ("dist-opt", ()), ("fp32", (1,)), ("grouped", (0,)), ("grouped", ())]


@pytest.mark.parametrize(
    ("name", "lost"), [pytest.param(*case, marks=[pytest.mark.slow] * bool(at)) for at, case in enumerate(CASES)]
)
def test_every_expert_is_as_new_as_what_was_sent_of_it(tmp_path: Path, name: str, lost: tuple[int, ...]):
    written = [tmp_path / f"plans_{rank}.jsonl" for rank in range(RANKS)]
    told, lines = both_lives(tmp_path, SETUPS[name], [Steady(told=str(each)) for each in written], LAST, lost)
    planned = plans(written[0])
    assert all(plans(each) == planned for each in written)
    [step] = {rank["step"] for rank in told}
    assert step >= LAST - 1
    assert planned[step]["gradients"], "else nothing is shown"
    assert all(rank["updates"] is not None for rank in told)
    wanted = {
        at: newest(planned, step, f"expert/{at[0]}/{at[1]}", from_peers=bool(nodes & set(lost)))
        for at, nodes in holders_of(SETUPS[name], lines).items()
    }
    assert len(set(wanted.values())) > 1
    require_versions(told, lines, wanted, step)
