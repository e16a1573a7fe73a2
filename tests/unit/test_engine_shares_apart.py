"""Dealing out dense state where peers hold different experts (expert parallelism without a distributed optimizer)."""

from __future__ import annotations

import pytest
import torch

from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.placement import GRAIN_BYTES, Placement
from moe_ckpt.ports import StateTensor
from moe_ckpt.slices.assignment import Sharder, WriteAssignment
from tests.unit.builders import catalog

EXPERT_BYTES = 48
ROWS = 400
"""Of the embedding, which is heavier than all experts together, and too light to be split."""
EMBEDDING_BYTES, GATE_BYTES = ROWS * 16, 4 * 16
assert 8 * EXPERT_BYTES < EMBEDDING_BYTES < GRAIN_BYTES


def model(experts: int):
    found = catalog(1, experts, stacked=False)
    return type(found)(found.operators, found.layers, {**found.parameters, "embed.weight": (ROWS, 4)})


def tensors_of(found, rank: int, ranks: int, expert_parallel: int) -> list[StateTensor]:
    """What a rank of EP x DP holds: all dense state, and its block of experts, written by the ranks that share it."""
    experts = found.layers[0].experts
    owners = owners_of(experts, ranks, expert_parallel)
    tensors = []
    for name, shape in found.parameters.items():
        parts = name.split(".")
        expert = int(parts[4]) if "experts" in parts else None
        if expert is not None and expert * expert_parallel // experts != rank % expert_parallel:
            continue
        away = expert is not None and owners[expert] != rank
        local = torch.zeros(shape)
        tensors.append(
            StateTensor(f"model/{name}", name, local, (0,) * len(shape), shape, expert is None, duplicate=away)
        )
    return tensors


def owners_of(experts: int, ranks: int, expert_parallel: int) -> tuple[int, ...]:
    count = experts // expert_parallel
    sharers = ranks // expert_parallel
    return tuple(e // count + expert_parallel * (e % count * sharers // count) for e in range(experts))


def deal(ranks: int, expert_parallel: int, experts: int, saved: list[int]) -> list[WriteAssignment]:
    found = model(experts)
    owners = (owners_of(experts, ranks, expert_parallel),)
    placement = Placement(owners, tuple(range(ranks)), (ranks,), experts_apart=True)
    operators = [op.id for op in found.always_saved] + [expert_id(0, e) for e in saved]
    return [
        Sharder(found, placement, tensors_of(found, rank, ranks, expert_parallel)).assign(operators)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("ranks", "expert_parallel", "experts"), [(4, 2, 8), (4, 4, 4), (4, 2, 2), (8, 2, 4), (6, 2, 4)]
)
def test_all_peers_deal_alike(ranks, expert_parallel, experts):
    """Also those that write no expert at all, since there are fewer than copies."""
    dealt = deal(ranks, expert_parallel, experts, [0, experts - 1])
    assert all(each.shares == dealt[0].shares for each in dealt)


@pytest.mark.parametrize(("saved", "free"), [([0, 1], 1), ([2, 3], 0)])
def test_adaptive_counts_the_experts_that_each_peer_was_just_given(saved, free):
    """Rank 0 owns experts 0 and 1. The embedding goes to the rank that has none to write."""
    loads = deal(2, 2, 4, saved)[0].shares.loads
    assert loads[free] == EMBEDDING_BYTES
    assert loads[1 - free] == 2 * EXPERT_BYTES + GATE_BYTES


def test_experts_of_an_owner_among_the_peers_only():
    """With tensor parallelism an expert's owner may be no peer of this rank: its bytes are not the peers' matter."""
    found = model(4)
    placement = Placement(((0, 0, 1, 1),), (1, 3), (4,), experts_apart=True)
    operators = [op.id for op in found.always_saved] + [expert_id(0, e) for e in (0, 1, 2)]
    loads = Sharder(found, placement, tensors_of(found, 1, 2, 2)).assign(operators).shares.loads
    assert loads == (EXPERT_BYTES + GATE_BYTES, EMBEDDING_BYTES)
