"""What stays on a node and what goes to peers are two sets: after ``kill -9`` of all, each expert as new as it is left.

Four ranks, each a node. What must come back is counted here from what each step was to save, and from nothing else.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.placement import expert_owner
from tests.dist.test_host_tier import EXPERTS, LAYERS, Life, counts_of, expected
from tests.dist.test_memory import lose, train_and_die
from tests.support import two_sets
from tests.support.processes import run_ranks, start_ranks
from tests.support.two_sets import TwoSets

RANKS, LAST = 4, 9
MEMORY = {"replicas": 1, "storage_every": 1000}
ALL = {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}


def newest(step: int, lost: tuple[int, ...], fsdp: bool) -> dict[str, int]:
    """Expert -> the step that it must come back as of: by hand."""
    rows = -(-EXPERTS // RANKS)  # of each stack, on a rank of FSDP2
    holders = {at: {at[1] // rows if fsdp else expert_owner(at[1], EXPERTS, RANKS)} for at in ALL}
    found = two_sets.newest(step, LAYERS, EXPERTS, holders, lost)
    return {expert_id(*at): version for at, version in found.items()}


def lost_tokens(step: int, versions: dict[str, int]) -> int:
    per_step = sum(counts_of(rank) for rank in range(RANKS))
    return sum(int(per_step[at]) * (step - versions[expert_id(*at)]) for at in ALL)


def first_life(rank: int, _: int, root: str, fsdp: bool) -> None:
    life = Life(root, fsdp, seed=0, memory=MEMORY, policy=TwoSets())
    train_and_die(life, root, rank, {}, LAST, each_is_copied=True)


def second_life(rank: int, _: int, root: str, fsdp: bool, lost: tuple[int, ...]) -> dict:
    life = Life(root, fsdp, seed=1 + rank, memory=MEMORY, policy=TwoSets())
    restored, fault = life.resume()
    step = restored.manifest.step
    versions = {op: record.step for op, record in restored.manifest.operators.items()}
    history = torch.load(f"{root}/history.pt", weights_only=True)
    wanted = expected(history, step, versions)
    differ = [key for key, value in life.whole().items() if not torch.equal(value, wanted[key])]
    told = {"step": step, "versions": versions, "lost": fault.lost_tokens, "differ": differ}
    life.session.close()
    return told


def short_life(rank: int, _: int, root: str, fsdp: bool) -> None:
    """Comes back, saves twice, and dies: what only slots of the first life had must be in its own by then."""
    life = Life(root, fsdp, seed=1 + rank, memory=MEMORY, policy=TwoSets())
    life.resume()
    history = torch.load(f"{root}/history.pt", weights_only=True)
    train_and_die(life, root, rank, history, 2, each_is_copied=True)


SHARDED = [pytest.param(False, id="plain"), pytest.param(True, id="fsdp2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("fsdp", SHARDED)
@pytest.mark.parametrize("lost", [(2,), pytest.param((0,), marks=pytest.mark.slow), ()])
def test_a_lost_node_costs_its_experts_what_peers_did_not_get(tmp_path: Path, fsdp: bool, lost: tuple[int, ...]):
    ended = start_ranks(first_life, RANKS, str(tmp_path), fsdp)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL] * RANKS, [each.error for each in ended]
    lose(tmp_path, *lost)
    one, *others = run_ranks(second_life, RANKS, str(tmp_path), fsdp, lost)
    assert others == [one] * (RANKS - 1)
    step = one["step"]
    assert step >= LAST - 1, "the newest that all ranks have agreed on"
    wanted = newest(step, lost, fsdp)
    assert {op: one["versions"][op] for op in wanted} == wanted
    assert min(wanted.values()) < max(wanted.values()) == step
    assert all(version == step for op, version in one["versions"].items() if op not in wanted)
    assert one["lost"] == lost_tokens(step, wanted)
    assert one["differ"] == []


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(), (3,)], ids=["processes", "a node"])
def test_the_next_life_takes_over_what_only_slots_of_the_one_before_had(tmp_path: Path, lost: tuple[int, ...]):
    killed = [-signal.SIGKILL] * RANKS
    assert [each.exitcode for each in start_ranks(first_life, RANKS, str(tmp_path), False)] == killed
    ended = start_ranks(short_life, RANKS, str(tmp_path), False)
    assert [each.exitcode for each in ended] == killed, [each.error for each in ended]
    lose(tmp_path, *lost)
    one, *_ = run_ranks(second_life, RANKS, str(tmp_path), False, lost)
    experts = {op: version for op, version in one["versions"].items() if op.startswith("expert/")}
    assert one["step"] >= LAST + 1
    assert min(experts.values()) >= LAST, "all were in the first snapshot of the second life"
    assert one["lost"] <= lost_tokens(one["step"], dict.fromkeys(experts, LAST))
