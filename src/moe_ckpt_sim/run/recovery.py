"""The times that recoveries take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import Window
from moe_ckpt_sim.cluster.cluster import ClusterLayout
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.cluster.surviving import expert_ranks


@dataclass(frozen=True)
class Repair:
    """The times of one recovery, in seconds, from ranks that can load on.

    Attributes:
        retrieve: Time to load.
        replay: Time to compute again.
    """

    retrieve: float
    replay: float


class Recoveries:
    """Times of recoveries of one system on one layout.

    Args:
        micro_batches: M of one pipeline.
    """

    def __init__(self, costs: Costs, micro_batches: int) -> None:
        self._costs, self._micro_batches = costs, micro_batches
        self._model = costs.layout.model

    def whole(self, window: Window | None, counts: Counts, tier: Tier) -> Repair:
        """Recovery of all ranks, which load and compute a window again. Later iterations are trained as usual.

        Args:
            tier: The farthest tier that a rank loads from.
        """
        replay = self._replay_secs(window, counts, self._costs.iteration.secs) if window else 0.0
        return Repair(self._load_secs(window, tier), replay)

    def logged(self, steps: Counts, tier: Tier) -> Repair:
        """Recovery of all ranks to the newest step of a log of gradients.

        They load anchors and gradients, and repeat the updates since the oldest anchor. Each takes as long as in
        training, since whole parameters are updated.

        Args:
            steps: ``[operators]`` steps from each anchor to that step.
        """
        held, replayed = self._costs.bytes_of.log(steps), int(steps.max(initial=0))
        from_peers = held.rank / self._costs.nic_rate if tier is Tier.PEER else 0.0
        return Repair(from_peers + self._costs.copy_secs(held), replayed * self._costs.iteration.update_secs)

    def local(self, window: Window, counts: Counts, steps: int, stages: int, tier: Tier) -> Repair:
        """Recovery of some neighbouring stages alone, which first receive the other stages' logs and replay from them.

        Args:
            steps: Iterations since the window's end.
            stages: Number of stages; they form a short pipeline.
            tier: The memory that they load from, own or peers'.
        """
        alone = self.alone_secs(stages)
        brought = self.logged_steps(window, steps) * self._costs.log.step_bytes / self._costs.nic_rate
        replay = self._replay_secs(window, counts, alone) + steps * alone
        return Repair(self._memory_secs(window, tier) + brought, replay)

    @staticmethod
    def logged_steps(window: Window, steps: int) -> int:
        """Returns the number of iterations that a stage computes alone.

        Args:
            window: The window that it loads.
            steps: Iterations since the window's end.
        """
        return window.size - 1 + steps

    def alone_secs(self, stages: int) -> float:
        """Time of an iteration of n stages alone: (M + n - 1) / M times that of one, at most a whole iteration."""
        iteration, many = self._costs.iteration, self._micro_batches
        one = iteration.alone_secs - iteration.update_secs
        return min(iteration.secs, one * (many + stages - 1) / many + iteration.update_secs)

    def _replay_secs(self, window: Window, counts: Counts, iteration_secs: float) -> float:
        """Time of W - 1 iterations without weight gradients of operators not anchored yet (MoEvement, section 3.3)."""
        saving = self._costs.iteration.frozen_saving if self._costs.system.freeze else 0.0
        return sum(iteration_secs * (1.0 - saving * frozen) for frozen in self._frozen_work(window, counts))

    def _frozen_work(self, window: Window, counts: Counts) -> list[float]:
        """For each replayed iteration, the portion of arithmetic in operators that are anchored later."""
        index = self._model.catalog.index_of
        work = self._work(counts)
        slots = [float(work[[index[op] for op in slot]].sum()) for slot in window.slots]
        total = sum(slots)
        return [sum(slots[at + 1 :]) / total for at in range(len(slots) - 1)] if total else []

    def _work(self, counts: Counts) -> npt.NDArray[np.float64]:
        """Work of each operator, in the order of the catalog: parameters times the share of tokens that use them."""
        catalog = self._model.catalog
        work = self._elements.copy()
        tokens = counts.sum(axis=1) / max(self._model.top_k, 1)
        for op, (layer, expert) in catalog.expert_at.items():
            work[catalog.index_of[op]] *= counts[layer, expert] / tokens[layer] if tokens[layer] else 0.0
        return work

    @cached_property
    def _elements(self) -> npt.NDArray[np.float64]:
        """Parameters of each operator; 0 for embeddings, which are looked up and not multiplied."""
        model = self._model
        first = {op: layer < 0 for op, layer in model.stage_layer.items()}
        return np.array([0.0 if first[op] else float(model.elements[op]) for op in model.catalog.everything])

    def _load_secs(self, window: Window | None, tier: Tier) -> float:
        """Time to load a checkpoint, from storage or from memory, the dead node's from its peers."""
        costs, held = self._costs, self._costs.bytes_of.held(window)
        if tier is Tier.STORAGE:
            return costs.copy_secs(held) + costs.storage_secs(held)
        return self._memory_secs(window, tier)

    def _memory_secs(self, window: Window | None, tier: Tier) -> float:
        """Time to load the checkpoint of one node's ranks from its own memory, into which peers may first send it."""
        costs, held = self._costs, self._costs.bytes_of.held(window)
        from_peers = held.rank / costs.nic_rate if tier is Tier.PEER else 0.0
        return from_peers + costs.copy_secs(held)


class Copies:
    """The nodes that hold copies of each rank, by the placement that a trainer uses (``peers.replica_placement``)."""

    def __init__(self, layout: ClusterLayout, replicas: int) -> None:
        """Place the copies. replicas: copies of each rank on peers.

        Raises:
            ConfigError: there are too few nodes or domains.
        """
        self._holders = defaultdict[int, set[frozenset[int]]](set)
        for rank, peers in enumerate(layout.placed(replicas).peers_of):
            self._holders[layout.node_of(rank)].add(frozenset(map(layout.node_of, peers)))

    def lost(self, nodes: Collection[int]) -> bool:
        """Returns whether some rank has no copy left once the memory of all these nodes is gone."""
        gone = set(nodes)
        return any(holders <= gone for node in gone for holders in self._holders[node])


def host_nodes(layout: ClusterLayout) -> Counts:
    """Returns ``[L, E, n]`` nodes whose ranks copy a part of the expert into their memory, padded with -1."""
    ranks = expert_ranks(layout)
    return np.where(ranks < 0, -1, ranks // layout.cluster.gpus_per_node)
