"""EP2 x DP2 under Megatron, each rank a node: all are killed, a node is lost, and each expert is as new as it is left.

Versions are told by bytes and tokens counted at the experts' own input, neither by the library (``megatron_log``).
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import megatron_gpt
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import Tally, _memory, _shares, digests, moe_layers
from tests.support.processes import run_ranks, start_ranks
from tests.support.two_sets import Expert, TwoSets, newest

WARM = "tests.support.megatron_warm"
RANKS, LAST = 4, 7
PLAIN = Setup(ep=2, layers=2, num_microbatches=2)
SHARDED = Setup(ep=2, layers=2, num_microbatches=2, dist_opt=True, precision="bf16")


def attached(built: megatron_gpt.Built, root: str, rank: int) -> Any:
    from moe_ckpt import Memory, megatron

    node = Path(root, f"node_{rank}")
    node.mkdir(exist_ok=True)
    return megatron.attach(
        built.chunks,
        built.optimizer,
        built.scheduler,
        policy=TwoSets(),
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
    ckpt.close()
    return told


def updated_here(built: megatron_gpt.Built) -> list[str]:
    """Experts that this rank's optimizer has a part of, by Megatron's own ranges."""
    found = set()
    for number, moe, experts in moe_layers(built):
        for name, parameter in moe.experts.named_parameters():
            for expert, low, high in _shares(name, parameter, experts):
                ranges = ((first, first + flat.numel()) for what, flat, first in _memory(built, parameter))
                _, *states = ranges  # the first are the weights, of which every rank has all
                if any(max(low, begin) < min(high, end) for begin, end in states):
                    found.add(f"{number}/{expert}")
    return sorted(found)


def holders_of(setup: Setup, lines: list[dict[str, Any]]) -> dict[Expert, set[int]]:
    """Ranks 0 and 2 have the first half of the experts, 1 and 3 the second, and share the saving of it.

    By halves; or, where a distributed optimizer divides their parameters in one row, as that does. lines: of each rank.
    """
    found = {}
    for layer in range(setup.layers):
        for expert in range(setup.experts):
            half, at = divmod(expert, setup.experts // 2)
            divided = {rank for rank, line in enumerate(lines) if f"{layer}/{expert}" in line["state"]}
            found[layer, expert] = divided if setup.dist_opt else {half + 2 * (2 * at // (setup.experts // 2))}
    return found


@pytest.mark.parametrize("setup", [PLAIN, pytest.param(SHARDED, marks=pytest.mark.slow)], ids=["plain", "dist-opt"])
@pytest.mark.parametrize("lost", [(2,), *(pytest.param(lost, marks=pytest.mark.slow) for lost in ((), (1,)))])
def test_every_expert_is_as_new_as_it_is_left(tmp_path: Path, setup: Setup, lost: tuple[int, ...]):
    ended = start_ranks(first_life, RANKS, str(tmp_path), setup, timeout=240, preload=WARM)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL] * RANKS, [each.error for each in ended]
    for node in lost:
        delete_tree(tmp_path / f"node_{node}")
    told = run_ranks(second_life, RANKS, str(tmp_path), setup, timeout=240, preload=WARM)
    [step] = {rank["step"] for rank in told}
    assert step >= LAST - 1
    lines = [
        [json.loads(raw) for raw in (tmp_path / f"rank_{rank}.jsonl").read_text().splitlines()] for rank in range(RANKS)
    ]
    holders = holders_of(setup, [each[-1] for each in lines])
    assert all(holders.values())
    wanted = newest(step, setup.layers, setup.experts, holders, lost)
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
