"""Owner ranks of experts, and who shares the writing of the rest.

Under plain data parallelism every rank holds everything, so the work is dealt out: experts in contiguous
blocks (the numbering expert parallelism uses), the rest by ``core.sharding``. Where the framework shards the
state already (FSDP2, ZeRO, expert and pipeline parallelism), its sharding is kept, and the adapter says by a
``Placement`` who owns what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from moe_ckpt.core.operators import MoELayer, expert_id


@dataclass(frozen=True)
class Placement:
    """Ranks that hold each operator. Equal on every rank, except ``peers`` and ``expert_peers``.

    Attributes:
        owners: Per MoE layer, the rank that writes each of its experts; with several that write parts of it, the first,
            which stands for them all where capacity is counted.
        peers: The ranks that hold all replicated state that this rank holds, itself included, in ascending order.
        stages: Of parts of the model between which no rank is shared (pipeline stages), the number of ranks each.
        stage_of: Operator -> its place in ``stages``; 0 for what is not named.
        experts_apart: Peers hold different experts, and each writes those that it owns (expert parallelism).
        expert_ranks: How many ranks divide the bytes of each expert between them; None where the rest is dealt out so
            that the bytes of experts and of it together are balanced over the ranks.
        expert_peers: The ranks that hold all experts that this rank holds, itself included; empty where those are its
            ``peers``.
        experts_whole: Each expert is written by its owner alone, and the rest dealt out around that (plain data
            parallelism): no rank writes less than the experts that it owns.
    """

    owners: tuple[tuple[int, ...], ...]
    peers: tuple[int, ...]
    stages: tuple[int, ...]
    stage_of: Mapping[str, int] = field(default_factory=dict)
    experts_apart: bool = False
    expert_ranks: int | None = None
    experts_whole: bool = False
    expert_peers: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks of the run."""
        return sum(self.stages)

    @cached_property
    def owner_of(self) -> Mapping[str, int]:
        """Operator id of an expert -> its owner."""
        return {
            expert_id(layer, expert): rank for layer, row in enumerate(self.owners) for expert, rank in enumerate(row)
        }


@lru_cache(maxsize=64)
def everywhere(layers: tuple[MoELayer, ...], ranks: int) -> Placement:
    """The placement where each of ``ranks`` ranks holds everything."""
    owners = tuple(
        tuple(expert_owner(expert, layer.experts, ranks) for expert in range(layer.experts)) for layer in layers
    )
    return Placement(owners, tuple(range(ranks)), (ranks,), experts_whole=True)


def expert_owner(expert: int, experts: int, ranks: int) -> int:
    """Rank that owns ``expert`` when ``experts`` are split over ``ranks`` in contiguous blocks."""
    return expert * ranks // experts


def lends(rank: int, alike: Sequence[int]) -> int | None:
    """Returns the rank whose experts ``rank`` seals besides its own when training stops; None if no other has the same.

    Each rank's are sealed by one other, which does not know who is gone.

    Args:
        rank: The survivor.
        alike: Ranks that hold the same experts, ``rank`` included, ascending.
    """
    if rank not in alike or len(alike) < 2:
        return None
    return alike[(alike.index(rank) + 1) % len(alike)]


def interleaved_order(owners: Sequence[int]) -> tuple[int, ...]:
    """Experts of one layer, one of each owner rank in turn (MoC section 3.2).

    Args:
        owners: Rank of each expert.

    Where each of R ranks owns equally many, position p belongs to the ``p mod R``-th of them, so any run of
    consecutive positions loads the ranks evenly.
    """
    blocks: dict[int, list[int]] = {rank: [] for rank in sorted(set(owners))}
    for expert, rank in enumerate(owners):
        blocks[rank].append(expert)
    depth = max((len(block) for block in blocks.values()), default=0)
    return tuple(block[i] for i in range(depth) for block in blocks.values() if i < len(block))
