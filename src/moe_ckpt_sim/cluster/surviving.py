"""The state that surviving ranks seal when training stops: the rules of ``survivors`` on a simulated layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.placement import lends
from moe_ckpt.core.tokens import Counts
from moe_ckpt_sim.cluster.cluster import ClusterLayout


class Survivors:
    """The ranks that survive a failure, and the state that they seal.

    Args:
        layout: The run's layout.
        seal: Survivors seal the newest step (``System.survivors``).
    """

    def __init__(self, layout: ClusterLayout, *, seal: bool) -> None:
        self._layout, self._seal = layout, seal

    def dead(self, nodes: Iterable[int], restarted: Iterable[int]) -> set[int]:
        """Returns the ranks that seal nothing: all of a lost node, and one of a node where only a process died.

        Args:
            nodes: Nodes that are lost with their memory.
            restarted: Nodes that stay; the launcher ends their other processes, which seal first.
        """
        width, ranks = self._layout.cluster.gpus_per_node, self._layout.parallel.ranks
        gone = {rank for node in nodes for rank in range(node * width, min((node + 1) * width, ranks))}
        return gone | {node * width for node in restarted}

    def have_everything(self, dead: Collection[int]) -> bool:
        """Returns whether survivors alone have the whole newest step in memory.

        They do under plain data parallelism, where each rank lends all that the next one writes.

        Args:
            dead: Ranks whose processes died, on nodes that stay.
        """
        ranks = self._layout.parallel.ranks
        if not self._seal or not dead or ranks < 2 or not self._layout.held_alike:
            return False
        every = range(ranks)
        return all(lends(rank, every) not in dead for rank in dead)

    def experts(self, dead: Collection[int]) -> npt.NDArray[np.bool_] | None:
        """Returns ``[L, E]``: true if all ranks that hold the expert survive; None if no rank seals.

        Args:
            dead: Ranks that seal nothing.
        """
        if not self._seal:
            return None
        complete: npt.NDArray[np.bool_] = np.logical_not(np.isin(self._holders, list(dead)).any(axis=2))
        return complete

    @cached_property
    def _holders(self) -> Counts:
        return expert_ranks(self._layout)


def expert_ranks(layout: ClusterLayout) -> Counts:
    """Returns ``[L, E, n]`` ranks that copy a part of the expert into their memory; padded with -1."""
    placement, parallel = layout.placement, layout.parallel
    divided = layout.sharded and parallel.ranks == parallel.dp  # over all ranks, whoever counts as the owner
    most = max((len(owners) for owners in placement.owners), default=0)
    copies = parallel.dp if divided or placement.expert_ranks is not None or parallel.pp > 1 else 1
    ranks = np.full((len(placement.owners), most, copies), -1, dtype=np.int64)
    for row, owners in enumerate(placement.owners):
        first = np.asarray(owners, dtype=np.int64)[:, None] * (not divided)
        ranks[row, : len(owners)] = first + parallel.ep * np.arange(copies)
    return ranks
