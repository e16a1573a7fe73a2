"""Owner ranks of experts.

Under plain data parallelism every rank holds everything, so the work is dealt out: experts in contiguous
blocks (the numbering expert parallelism uses), the rest by ``core.sharding``. Where the framework shards the
state already (FSDP2, ZeRO, expert parallelism), its sharding is kept and this module is not asked.
"""

from __future__ import annotations


def expert_owner(expert: int, experts: int, ranks: int) -> int:
    """Rank that owns ``expert`` when ``experts`` are split over ``ranks`` in contiguous blocks."""
    return expert * ranks // experts


def interleaved_order(experts: int, ranks: int) -> tuple[int, ...]:
    """Experts of one layer, one of each owner rank in turn (MoC section 3.2).

    Position p belongs to rank ``p mod ranks`` when ranks divide experts, so any run of consecutive
    positions loads the ranks evenly.
    """
    blocks: list[list[int]] = [[] for _ in range(ranks)]
    for expert in range(experts):
        blocks[expert_owner(expert, experts, ranks)].append(expert)
    depth = max((len(block) for block in blocks), default=0)
    return tuple(block[i] for i in range(depth) for block in blocks if i < len(block))
