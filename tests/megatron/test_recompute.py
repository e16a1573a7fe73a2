"""Optimizer recomputation (MoEtion, Algorithm 3) under Megatron, EP2 x DP2, each rank a node.

Peers hold full copies of experts and the gradients since. All ranks are killed, nodes are lost, and each expert comes
back as of the last step at which it, or its gradient, was sent, to the last bit. Versions are told by bytes, and tokens
counted at the experts' own input, neither by the library (``megatron_log``).
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.megatron.test_two_sets import holders_of, updated_here
from tests.support import megatron_gpt
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import Tally, digests
from tests.support.processes import run_ranks, start_ranks
from tests.support.recompute import Steady, newest, plans

WARM = "tests.support.megatron_warm"
RANKS, LAST = 4, 12
SHARDED = Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True, precision="bf16")
FP32 = Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True)
GROUPED = Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True, precision="bf16", grouped=True)


def attached(built: megatron_gpt.Built, root: str, rank: int) -> Any:
    from moe_ckpt import Memory, megatron

    node = Path(root, f"node_{rank}")
    node.mkdir(exist_ok=True)
    return megatron.attach(
        built.chunks,
        built.optimizer,
        built.scheduler,
        policy=Steady(told=f"{root}/plans_{rank}.jsonl"),
        dirpath=f"{root}/store",
        memory=Memory(directory=node, replicas=1, storage_every_n_steps=1000),
        when_busy="wait",
        timeout_secs=60.0,
    )


def first_life(rank: int, _: int, root: str, setup: Setup) -> None:
    built = megatron_gpt.build(setup, 1)
    ckpt, tally = attached(built, root, rank), Tally(built)
    ckpt.resume()
    with open(f"{root}/rank_{rank}.jsonl", "w") as log:
        for iteration in range(1, LAST + 1):
            megatron_gpt.forward_backward(built, iteration - 1)
            ckpt.before_step()
            made, _ = megatron_gpt.update(built)
            ckpt.after_step(iteration, consumed_samples=built.consumed_samples, updated=made)
            line = {"tokens": tally.take(), "digests": digests(built), "state": updated_here(built)}
            log.write(json.dumps(line) + "\n")
            ckpt.session.drain(iteration)
            while ckpt.session.tier.replicator.lag_steps:
                pass
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def second_life(rank: int, _: int, root: str, setup: Setup) -> dict[str, Any]:
    built = megatron_gpt.build(setup, 2)
    ckpt = attached(built, root, rank)
    progress = ckpt.resume()
    fault = ckpt.session.run_ledger.tokens.faults[-1]
    told = {"step": progress.iteration, "lost": fault.lost_tokens, "digests": digests(built)}
    told["updates"] = ckpt.recovery_plan.updates
    ckpt.close()
    return told


SETUPS = {"dist-opt": SHARDED, "fp32": FP32, "grouped": GROUPED}
CASES = [("dist-opt", (2,)), ("dist-opt", ()), ("fp32", (1,)), ("grouped", (0,)), ("grouped", ())]


@pytest.mark.parametrize(
    ("name", "lost"), [pytest.param(*case, marks=[pytest.mark.slow] * bool(at)) for at, case in enumerate(CASES)]
)
def test_every_expert_is_as_new_as_what_was_sent_of_it(tmp_path: Path, name: str, lost: tuple[int, ...]):
    setup = SETUPS[name]
    ended = start_ranks(first_life, RANKS, str(tmp_path), setup, timeout=240, preload=WARM)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL] * RANKS, [each.error for each in ended]
    planned = plans(tmp_path / "plans_0.jsonl")
    assert all(plans(tmp_path / f"plans_{rank}.jsonl") == planned for rank in range(RANKS))
    for node in lost:
        delete_tree(tmp_path / f"node_{node}")
    told = run_ranks(second_life, RANKS, str(tmp_path), setup, timeout=240, preload=WARM)
    [step] = {rank["step"] for rank in told}
    assert step >= LAST - 1
    assert planned[step]["gradients"], "else nothing is shown"
    assert all(rank["updates"] is not None for rank in told)
    lines = [
        [json.loads(raw) for raw in (tmp_path / f"rank_{rank}.jsonl").read_text().splitlines()] for rank in range(RANKS)
    ]
    holders = holders_of(setup, [each[-1] for each in lines])
    wanted = {
        at: newest(planned, step, f"expert/{at[0]}/{at[1]}", from_peers=bool(nodes & set(lost)))
        for at, nodes in holders.items()
    }
    assert len(set(wanted.values())) > 1
    for rank, found in enumerate(told):
        assert found["digests"]["rest"] == lines[rank][step - 1]["digests"]["rest"], rank
        for name in found["digests"].keys() - {"rest"}:
            layer, expert = map(int, name.split("/"))
            version = wanted[layer, expert]
            assert found["digests"][name] == lines[rank][version - 1]["digests"][name], (rank, name, version)
    lacking = 0
    for (layer, expert), version in wanted.items():
        for at in range(version, step):
            lacking += sum(lines[rank][at]["tokens"].get(f"{layer}/{expert}", 0) for rank in range(RANKS))
    assert {rank["lost"] for rank in told} == {lacking}
