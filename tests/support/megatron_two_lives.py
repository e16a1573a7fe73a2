"""A Megatron job whose ranks are nodes of their own: trained, all killed, and brought back; bodies of ``start_ranks``.

Versions are told by bytes and tokens counted at the experts' own input, neither by the library (``megatron_log``).
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support import megatron_gpt
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import Tally, _memory, _shares, digests, moe_layers
from tests.support.processes import run_ranks, start_ranks
from tests.support.recompute import refuse

WARM = "tests.support.megatron_warm"
RANKS = 4
RARELY = 1000
Expert = tuple[int, int]
Lines = list[dict[str, Any]]
"""Of one rank, one of each iteration."""


def attached(
    built: megatron_gpt.Built, root: str, rank: int, policy: Any, replicas: int = 1, to_storage: int = RARELY
) -> Any:
    from moe_ckpt import Memory, megatron

    node = Path(root, f"node_{rank}")
    node.mkdir(exist_ok=True)
    return megatron.attach(
        built.chunks,
        built.optimizer,
        built.scheduler,
        policy=policy,
        dirpath=f"{root}/store",
        memory=Memory(directory=node, replicas=replicas, storage_every=to_storage),
        when_busy="wait",
        timeout_secs=60.0,
    )


def first_life(
    rank: int,
    _: int,
    root: str,
    setup: Setup,
    policies: Sequence[Any],
    last: int,
    replicas: int = 1,
    refused: tuple[int, int] | None = None,
    to_storage: int = RARELY,
) -> None:
    """refused: a step, and the rank that has no room for copies of it."""
    if refused is not None:
        logging.getLogger("moe_ckpt").addHandler(logging.FileHandler(f"{root}/said_{rank}"))
        logging.getLogger("moe_ckpt").setLevel(logging.INFO)
        if rank == refused[1]:
            refuse(refused[0])
    built = megatron_gpt.build(setup, 1)
    ckpt, tally = attached(built, root, rank, policies[rank], replicas, to_storage), Tally(built)
    ckpt.resume()
    with open(f"{root}/rank_{rank}.jsonl", "w") as log:
        for iteration in range(1, last + 1):
            megatron_gpt.forward_backward(built, iteration - 1)
            ckpt.before_step()
            made, _ = megatron_gpt.update(built)
            record = ckpt.after_step(iteration, consumed_samples=built.consumed_samples, updated=made)
            line = {"tokens": tally.take(), "digests": digests(built), "state": updated_here(built)}
            line |= {"factor": record.gradient_factor, "elements": elements_of(built)}
            log.write(json.dumps(line) + "\n")
            ckpt.session.drain(iteration)
            while (refused is None or iteration != refused[0]) and ckpt.session.tier.replicator.lag_steps:
                pass
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def second_life(
    rank: int, _: int, root: str, setup: Setup, policies: Sequence[Any], replicas: int = 1
) -> dict[str, Any]:
    built, said = megatron_gpt.build(setup, 2), list[str]()
    ckpt = attached(built, root, rank, policies[rank], replicas)
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(heard)
    progress = ckpt.resume()
    fault, plan = ckpt.session.run_ledger.tokens.faults[-1], ckpt.recovery_plan
    told = {"step": progress.iteration, "lost": fault.lost_tokens, "digests": digests(built), "said": said}
    told["updates"] = None if plan is None else plan.updates
    ckpt.close()
    return told


def elements_of(built: megatron_gpt.Built) -> tuple[int, int]:
    """Parameters of all gates and non-experts, and of one expert."""
    mine = [(list(moe.experts.parameters()), len(experts)) for _, moe, experts in moe_layers(built)]
    of_experts = sum(each.numel() for found, _ in mine for each in found)
    everything = sum(each.numel() for chunk in built.chunks for each in chunk.parameters())
    return everything - of_experts, of_experts // sum(count for _, count in mine)


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


def both_lives(
    root: Path,
    setup: Setup,
    policies: Sequence[Any],
    last: int,
    lost: Collection[int],
    replicas: int = 1,
    refused: tuple[int, int] | None = None,
    to_storage: int = RARELY,
) -> tuple[list[dict[str, Any]], list[Lines]]:
    """What each rank tells of its second life, and what it wrote down in the first, after which nodes were ``lost``."""
    order, secs = (str(root), setup, policies, last, replicas, refused, to_storage), max(240, 3 * last)
    ended = start_ranks(first_life, RANKS, *order, timeout=secs, preload=WARM)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL] * RANKS, [each.error for each in ended]
    for node in lost:
        delete_tree(root / f"node_{node}")
    told = run_ranks(second_life, RANKS, str(root), setup, policies, replicas, timeout=240, preload=WARM)
    written = [(root / f"rank_{rank}.jsonl").read_text().splitlines() for rank in range(RANKS)]
    return told, [[json.loads(raw) for raw in each] for each in written]


def holders_of(setup: Setup, lines: list[Lines]) -> dict[Expert, set[int]]:
    """Ranks 0 and 2 have the first half of the experts, 1 and 3 the second, and share the saving of it.

    By halves; or, where a distributed optimizer divides their parameters in one row, as that does. lines: of each rank.
    """
    found = {}
    for layer in range(setup.layers):
        for expert in range(setup.experts):
            half, at = divmod(expert, setup.experts // 2)
            divided = {rank for rank, each in enumerate(lines) if f"{layer}/{expert}" in each[-1]["state"]}
            found[layer, expert] = divided if setup.dist_opt else {half + 2 * (2 * at // (setup.experts // 2))}
    assert all(found.values())
    return found


def require_versions(told: list[dict[str, Any]], lines: list[Lines], wanted: Mapping[Expert, int], step: int) -> None:
    """All is as of ``step``, but each expert as of the step ``wanted``, and what it lacks since is booked as lost."""
    for rank, found in enumerate(told):
        assert found["digests"]["rest"] == lines[rank][step - 1]["digests"]["rest"], rank
        for name in found["digests"].keys() - {"rest"}:
            layer, expert = map(int, name.split("/"))
            version = wanted[layer, expert]
            assert found["digests"][name] == lines[rank][version - 1]["digests"][name], (rank, name, version)
    lacking = 0
    for (layer, expert), version in wanted.items():
        for at in range(version, step):
            lacking += sum(each[at]["tokens"].get(f"{layer}/{expert}", 0) for each in lines)
    assert {rank["lost"] for rank in told} == {lacking}
