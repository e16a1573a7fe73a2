"""The cluster a model is trained on: machines, their links, and the layout of the model on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from moe_ckpt.core.placement import Placement, everywhere, expert_owner
from moe_ckpt.errors import ConfigError
from moe_ckpt.peers.replica_placement import ReplicaPlacement, place_replicas
from moe_ckpt.policies.base import ALL_SENT, Sends
from moe_ckpt_sim.checks import above_zero, at_least, not_none, portion, whole
from moe_ckpt_sim.workload.model import SimModel


@dataclass(frozen=True)
class Cluster:
    """Machines and links.

    Attributes:
        pcie_bytes_per_sec: From one GPU to host memory, as snapshots get it.
        nic_bytes_per_sec: Out of one node, all its NICs together.
        nvlink_bytes_per_sec: Of one GPU.
        storage_bytes_per_sec: Of the whole cluster.
        nic_share: Portion of the NICs' rate that training leaves to checkpoints.
        flops_per_sec: Peak of one GPU.
        mfu: Portion of it that training's arithmetic reaches.
        alpha_secs: Time to start one message of a collective.
        host_memory_bytes: Of one node, for checkpoints.
        detect_secs: From a failure to its detection.
        restart_secs: From detection to ranks that can load a checkpoint, with a spare in place of the dead node.
        in_place_secs: The same where surviving processes train again without a restart (``moe_ckpt.inprocess``) and a
            spare is available at once; None: every process is restarted.
        repair_secs: Until a dead node is a spare again; None for never.
        spare_nodes: At the start; None: there is always one, as the papers assume.
        nodes_per_domain: Neighbours that share a rack or a switch and may fail together. Above 1, copies in memory are
            in other domains than their source (``peers.replica_placement``).
    """

    name: str
    nodes: int
    gpus_per_node: int = 8
    pcie_bytes_per_sec: float = 16e9
    nic_bytes_per_sec: float = 10e9
    nvlink_bytes_per_sec: float = 300e9
    storage_bytes_per_sec: float = 5e9
    nic_share: float = 1.0
    flops_per_sec: float = 312e12
    mfu: float = 0.35
    alpha_secs: float = 2e-5
    host_memory_bytes: float = 880e9
    detect_secs: float = 0.0
    restart_secs: float = 15.0
    in_place_secs: float | None = None
    repair_secs: float | None = 3600.0
    spare_nodes: int | None = None
    nodes_per_domain: int = 1

    def __post_init__(self) -> None:
        owner = f"Cluster {self.name!r}"
        whole(owner, nodes=self.nodes, gpus_per_node=self.gpus_per_node, nodes_per_domain=self.nodes_per_domain)
        whole(owner, 0, **not_none(spare_nodes=self.spare_nodes))
        above_zero(owner, pcie_bytes_per_sec=self.pcie_bytes_per_sec, nic_bytes_per_sec=self.nic_bytes_per_sec)
        above_zero(owner, nvlink_bytes_per_sec=self.nvlink_bytes_per_sec, flops_per_sec=self.flops_per_sec)
        above_zero(owner, storage_bytes_per_sec=self.storage_bytes_per_sec, mfu=self.mfu, nic_share=self.nic_share)
        above_zero(owner, host_memory_bytes=self.host_memory_bytes)
        portion(owner, nic_share=self.nic_share, mfu=self.mfu)
        at_least(owner, 0, alpha_secs=self.alpha_secs, detect_secs=self.detect_secs, restart_secs=self.restart_secs)
        at_least(owner, 0, **not_none(repair_secs=self.repair_secs, in_place_secs=self.in_place_secs))

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Parallel:
    """``pp`` stages in each of ``dp`` pipelines whose stages are ``ep`` ranks wide: pp * dp * ep ranks (the papers'
    way to count). Ranks are numbered stage by stage, then pipeline by pipeline; experts are split over ``ep``.

    Attributes:
        vpp: Chunks of layers per stage (interleaved 1F1B).
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        whole("Parallel", pp=self.pp, dp=self.dp, ep=self.ep, vpp=self.vpp)

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.ep

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.ep


@dataclass(frozen=True)
class ClusterLayout:
    """A model on a cluster.

    Attributes:
        sharded: Under plain data parallelism, each rank holds only a part of the state (FSDP2, a distributed
            optimizer), so no other rank can restore it. Ignored under other layouts.

    Raises:
        ConfigError: more ranks than GPUs, more stages than layers (embedding and head may have a stage each), experts
            that do not divide over ``ep``.
    """

    model: SimModel
    cluster: Cluster
    parallel: Parallel
    sharded: bool = False

    def __post_init__(self) -> None:
        ranks, gpus = self.parallel.ranks, self.cluster.gpus
        if ranks > gpus:
            raise ConfigError(
                f"Parallel(pp={self.parallel.pp}, dp={self.parallel.dp}, ep={self.parallel.ep}) needs {ranks} ranks, "
                f"but Cluster {self.cluster.name!r} has {gpus} GPUs ({self.cluster.nodes} nodes)"
            )
        if self.parallel.pp * self.parallel.vpp > self.model.network_layers + 2:
            raise ConfigError(
                f"Parallel(pp={self.parallel.pp}, vpp={self.parallel.vpp}): model {self.model.name!r} has only "
                f"{self.model.network_layers} layers, which with embedding and head are not enough for "
                f"{self.parallel.pp * self.parallel.vpp} stages"
            )

        for layer in self.model.catalog.layers:
            most, least = max(layer.experts, self.parallel.ep), min(layer.experts, self.parallel.ep)
            if most % least:
                raise ConfigError(
                    f"Parallel(ep={self.parallel.ep}): {layer.name} of model {self.model.name!r} has {layer.experts} "
                    "experts, which do not divide over so many ranks: one must be a multiple of the other"
                )

    @property
    def held_alike(self) -> bool:
        """True if each rank holds all training state."""
        return self.parallel.ranks == self.parallel.dp and not self.sharded

    @property
    def nodes(self) -> int:
        """Nodes that ranks run on."""
        return -(-self.parallel.ranks // self.cluster.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        return min(self.cluster.gpus_per_node, self.parallel.ranks)

    def node_of(self, rank: int) -> int:
        return rank // self.cluster.gpus_per_node

    @cached_property
    def domains(self) -> tuple[tuple[str, ...], ...]:
        """The node of each rank and, where several nodes share one, its failure domain."""
        shared = self.cluster.nodes_per_domain
        nodes = [self.node_of(rank) for rank in range(self.parallel.ranks)]
        return tuple((f"node {node}", *([f"domain {node // shared}"] if shared > 1 else [])) for node in nodes)

    @cached_property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The data-parallel groups, those of experts first: the ranks in each rank's group, as adapters report them."""
        width, ep, ranks = self.parallel.stage_ranks, self.parallel.ep, range(self.parallel.ranks)
        stages = [tuple(range(first, first + width)) for first in range(0, self.parallel.ranks, width)]
        apart = {(stage[0], at): stage[at::ep] for stage in stages for at in range(ep)}
        experts = tuple(apart[rank // width * width, rank % ep] for rank in ranks)
        return experts, tuple(stages[rank // width] for rank in ranks)

    def placed(self, replicas: int) -> ReplicaPlacement:
        """The placement of each rank's copies. Raises ``ConfigError`` if there are too few nodes."""
        return place_replicas(self.domains, replicas, self.groups)

    def served(self, replicas: int) -> int:
        """The most ranks whose copies one node holds. Raises as ``placed`` does."""
        ranks, held = self.ranks_per_node, [len(sources) for sources in self.placed(replicas).sources_of]
        return max(sum(held[first : first + ranks]) for first in range(0, len(held), ranks))

    def sends(self, replicas: int) -> Sends:
        """The parts of a rank's share that peers need sent, because their own training state lacks them.

        Under plain data parallelism peers have all of it. Elsewhere a distributed optimizer divides the state, and
        data-parallel ranks hold the same weights. Raises ``ConfigError`` if there are too few nodes for ``replicas``.
        """
        if self.held_alike:
            return Sends(False, False, False, False)
        if self.parallel.ranks == self.parallel.dp:
            return ALL_SENT
        placed = self.placed(replicas).peers_of
        expert, shared = (
            any(not set(peers) <= set(group) for peers, group in zip(placed, kind, strict=True)) for kind in self.groups
        )
        return Sends(True, True, shared, expert)

    def stages_of(self, node: int) -> range:
        """Pipeline stages that have a rank on ``node``."""
        first = node * self.cluster.gpus_per_node
        last = min(first + self.cluster.gpus_per_node, self.parallel.ranks) - 1
        return range(first // self.parallel.stage_ranks, last // self.parallel.stage_ranks + 1)

    def stage_at(self, layer: int) -> int:
        """The pipeline stage of a layer of the network; chunks of interleaved stages go round.

        Layers are dealt evenly; embedding and head go with the first and the last, unless there are more stages.
        """
        chunks, layers = self.parallel.pp * self.parallel.vpp, self.model.network_layers
        if chunks > layers:
            layer, layers = layer + 1, layers + 2
        at = min(max(layer, 0), layers - 1)
        return (at * chunks // layers) % self.parallel.pp

    @cached_property
    def stage_of(self) -> Mapping[str, int]:
        return {op: self.stage_at(layer) for op, layer in self.model.stage_layer.items()}

    @cached_property
    def placement(self) -> Placement:
        """The ranks that own each operator, as the Megatron adapter reports it: the ranks with a copy share its state.

        Under plain data parallelism it is as Lightning's adapter reports it: every rank holds everything, or a part.
        """
        ep, width, dp = self.parallel.ep, self.parallel.stage_ranks, self.parallel.dp
        if self.parallel.ranks == dp:
            return replace(everywhere(self.model.catalog.layers, dp), experts_whole=self.held_alike)
        owners = []
        for layer in self.model.catalog.layers:
            # A layer's experts are all on one stage; the first pipeline's rank stands for all that share an expert.
            stage = self.stage_of[f"expert/{layer.index}/0"]
            spread = min(ep, layer.experts)
            owners.append(tuple(stage * width + expert_owner(e, layer.experts, spread) for e in range(layer.experts)))
        apart = ep > 1
        return Placement(
            owners=tuple(owners),
            peers=tuple(range(width)),
            stages=(width,) * self.parallel.pp,
            stage_of=self.stage_of,
            experts_apart=apart,
            expert_ranks=dp if apart else None,
        )
