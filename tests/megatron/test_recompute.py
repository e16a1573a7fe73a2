"""Optimizer recomputation (MoEtion, Algorithm 3) under Megatron, EP2 x DP2, each rank a node.

Peers hold full copies of experts and the gradients since. All ranks are killed, nodes are lost, and each expert comes
back as of the last step at which it, or its gradient, was sent, to the last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.megatron_gpt import Setup
from tests.support.megatron_two_lives import RANKS, both_lives, holders_of, require_versions
from tests.support.recompute import Steady, factor_of, newest, plans, steady

LAST = 12
SETUPS = {
    "dist-opt": Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True, precision="bf16"),
    "fp32": Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True),
    "grouped": Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True, precision="bf16", grouped=True),
}
CASES = [
    *(("dist-opt", (2,), LAST), ("dist-opt", (), LAST), ("fp32", (1,), LAST), ("grouped", (0,), LAST)),
    *(("grouped", (), LAST), ("dist-opt", (2,), 200)),
]


@pytest.mark.parametrize(
    ("name", "lost", "last"),
    [pytest.param(*case, marks=[pytest.mark.slow] * bool(at)) for at, case in enumerate(CASES)],
)
def test_every_expert_is_as_new_as_what_was_sent_of_it(tmp_path: Path, name: str, lost: tuple[int, ...], last: int):
    written = [tmp_path / f"plans_{rank}.jsonl" for rank in range(RANKS)]
    told, lines = both_lives(tmp_path, SETUPS[name], [Steady(told=str(each)) for each in written], last, lost)
    planned = plans(written[0])
    assert all(plans(each) == planned for each in written)
    [step] = {rank["step"] for rank in told}
    assert step >= last - 1
    assert planned[step]["gradients"], "else nothing is shown"
    full_bytes = 14 if SETUPS[name].precision == "bf16" else 12
    for at, plan in planned.items():
        for said in (each[at - 1] for each in lines):
            expected = factor_of(plan, *said["elements"], full_bytes)
            assert said["factor"] == (expected if expected is None else pytest.approx(expected, rel=1e-3)), at
    assert all(rank["updates"] is not None for rank in told)
    wanted = {
        at: newest(planned, step, f"expert/{at[0]}/{at[1]}", from_peers=bool(nodes & set(lost)))
        for at, nodes in holders_of(SETUPS[name], lines).items()
    }
    assert len(set(wanted.values())) > 1
    require_versions(told, lines, wanted, step)


def test_a_replica_that_missed_a_gradient_gets_full_state(tmp_path: Path):
    """Rank 1's copy of step 4 is not taken. Its experts were anchored at step 1, and would be at 10 again."""
    setup, missed, last, source, holder = SETUPS["dist-opt"], 4, 8, 1, 3
    written = [tmp_path / f"plans_{rank}.jsonl" for rank in range(RANKS)]
    policies = [Steady(told=str(each), every=1000) for each in written]
    told, lines = both_lives(tmp_path, setup, policies, last, (source,), refused=(missed, holder))
    planned = plans(written[0])
    chosen = {f"expert/{layer}/{expert}" for layer, expert in steady(1, setup.layers, setup.experts, 1000)}
    sent_in_full = [step for step, plan in planned.items() if chosen <= set(plan["full"])]
    assert sent_in_full[0] == 1
    assert len(sent_in_full) == 2
    assert missed < sent_in_full[1] <= missed + 3, "as soon as all ranks know"
    assert all(set(plan["gradients"]) == chosen for step, plan in planned.items() if step not in sent_in_full)
    said = "".join((tmp_path / f"said_{rank}").read_text() for rank in range(RANKS))
    assert f"rank {holder} has no room for the copy of step {missed} of rank {source}" in said
    assert "a peer lacks the copy of a step" in said
    [step] = {rank["step"] for rank in told}
    assert step >= last - 1
    wanted = {
        at: newest(planned, step, f"expert/{at[0]}/{at[1]}", from_peers=source in nodes)
        for at, nodes in holders_of(setup, lines).items()
    }
    assert {wanted[at] for at in steady(1, setup.layers, setup.experts, 1000)} == {step}
    require_versions(told, lines, wanted, step)
