"""What ranks that live on seal when training stops: the rules of ``survivors``, on a simulated layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.placement import lends
from moe_ckpt.core.tokens import Counts
from moe_ckpt_sim.cluster.cluster import ClusterLayout


class Survivors:
    """Of the failures of one layout.

    Args:
        layout: Of the run.
        seal: Whether they seal anything (``System.survivors``).
    """

    def __init__(self, layout: ClusterLayout, *, seal: bool) -> None:
        self._layout, self._seal = layout, seal

    def dead(self, nodes: Iterable[int], restarted: Iterable[int]) -> set[int]:
        """Returns the ranks that a failure leaves nothing of: all of a lost node, one where only a process died.

        Args:
            nodes: Lost with their memory.
            restarted: Those that stay; the launcher ends their other processes, which seal before they go.
        """
        width, ranks = self._layout.cluster.gpus_per_node, self._layout.parallel.ranks
        gone = {rank for node in nodes for rank in range(node * width, min((node + 1) * width, ranks))}
        return gone | {node * width for node in restarted}

    def have_everything(self, dead: Collection[int]) -> bool:
        """Returns whether the newest step is in memory whole, though the memory of no process that died has it.

        So it is under plain data parallelism, where each rank lends all that the next one writes.

        Args:
            dead: Ranks whose processes died, on nodes that stay.
        """
        ranks = self._layout.parallel.ranks
        if not self._seal or not dead or ranks < 2 or not self._layout.held_alike:
            return False
        every = range(ranks)
        return all(lends(rank, every) not in dead for rank in dead)

    def experts(self, dead: Collection[int]) -> npt.NDArray[np.bool_] | None:
        """Returns ``[L, E]`` whether all ranks that hold the expert live on; None where no rank seals.

        Args:
            dead: Ranks of which nothing is left.
        """
        if not self._seal:
            return None
        found: npt.NDArray[np.bool_] = np.logical_not(np.isin(self._holders, list(dead)).any(axis=2))
        return found

    @cached_property
    def _holders(self) -> Counts:
        return expert_ranks(self._layout)


def expert_ranks(layout: ClusterLayout) -> Counts:
    """Returns ``[L, E, n]`` ranks that copy a part of the expert into their memory; padded with -1."""
    placement, parallel = layout.placement, layout.parallel
    divided = layout.sharded and parallel.ranks == parallel.dp  # over all ranks, whoever counts as the owner
    most = max((len(owners) for owners in placement.owners), default=0)
    copies = parallel.dp if divided or placement.expert_ranks is not None or parallel.pp > 1 else 1
    found = np.full((len(placement.owners), most, copies), -1, dtype=np.int64)
    for row, owners in enumerate(placement.owners):
        first = np.asarray(owners, dtype=np.int64)[:, None] * (not divided)
        found[row, : len(owners)] = first + parallel.ep * np.arange(copies)
    return found
