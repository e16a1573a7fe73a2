"""How long the links need for snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.policies.base import ALL_SENT, Measured
from moe_ckpt_sim.cluster.clock import down_to_clock, on_clock
from moe_ckpt_sim.cluster.cluster import ClusterLayout
from moe_ckpt_sim.cluster.snapshot_bytes import SnapshotBytes, SnapshotSize
from moe_ckpt_sim.cluster.upstream_log import SimulatedUpstreamLog
from moe_ckpt_sim.run.system import System
from moe_ckpt_sim.workload.model import Precision
from moe_ckpt_sim.workload.training import Iteration


class Costs:
    """Seconds of one system on one layout.

    A link that several ranks of a node share is divided evenly: all of them have a snapshot to send at the same time.

    Attributes:
        sizes: What each operator weighs, all ranks together.
        sends: What goes to peers; everything where none hold copies.
        bytes_of: What its snapshots weigh.
    """

    def __init__(self, layout: ClusterLayout, precision: Precision, iteration: Iteration, system: System) -> None:
        self.layout, self.system = layout, system
        self.iteration = replace(
            iteration,
            secs=down_to_clock(iteration.secs),
            update_secs=down_to_clock(iteration.update_secs),
            stage_secs=None if iteration.stage_secs is None else on_clock(iteration.stage_secs),
        )
        self.sizes: Mapping[str, OperatorBytes] = layout.model.sizes(precision)
        self.sends = layout.sends(system.replicas) if system.durable == "peers" else ALL_SENT
        self.bytes_of = SnapshotBytes(layout, self.sizes, self.sends)

    @property
    def copy_rate(self) -> float:
        """Bytes per second of one rank into host memory."""
        return self.layout.cluster.pcie_bytes_per_sec

    @cached_property
    def move_rate(self) -> float:
        """Bytes per second of one rank from host memory to where a snapshot outlives a failure; where that is host
        memory itself, as fast as it gets there."""
        cluster, layout = self.layout.cluster, self.layout
        if self.system.durable == "storage":
            return cluster.storage_bytes_per_sec / layout.parallel.ranks
        sent = self.system.durable == "peers" and not self.sends.nothing
        return self.nic_rate / self.system.replicas if sent else self.copy_rate

    @property
    def nic_rate(self) -> float:
        """Bytes per second of one rank to other nodes, beside training's own traffic."""
        return self.layout.cluster.nic_bytes_per_sec * self.layout.cluster.nic_share / self.layout.ranks_per_node

    def copy_secs(self, snapshot: SnapshotSize) -> float:
        return snapshot.rank / self.copy_rate

    @cached_property
    def log(self) -> SimulatedUpstreamLog:
        """What the rank with most of it logs; nothing where all ranks go back."""
        logged = self.iteration.boundary_bytes if self.system.rollback == "localized" else 0.0
        return SimulatedUpstreamLog(logged, self.system.log_bytes)

    def move_secs(self, snapshot: SnapshotSize) -> float:
        """Storage is shared by all, so it is their bytes together that count there; a peer's link is not."""
        if self.system.durable == "node":
            return 0.0
        return self.storage_secs(snapshot) if self.system.durable == "storage" else snapshot.sent / self.move_rate

    def storage_secs(self, snapshot: SnapshotSize) -> float:
        """To write it to storage, or to read it from there, all ranks together."""
        return snapshot.total / self.layout.cluster.storage_bytes_per_sec

    def stall_secs(self, snapshot: SnapshotSize) -> float:
        """What training takes longer: also a wait, if the copy is longer than the time between two updates. An upstream
        log adds none: the rate is what snapshots get beside it."""
        return max(0.0, self.copy_secs(snapshot) - self.iteration.open_secs) + self.drag_secs(snapshot)

    def drag_secs(self, snapshot: SnapshotSize) -> float:
        """What training takes longer though it does not wait for the copy."""
        return snapshot.rank * self.iteration.drag_secs_per_byte

    @cached_property
    def measured(self) -> Measured:
        """What a trainer has measured, which saves all state before its first step, and remembers after a restart."""
        copied, moved = self.copy_secs(self.bytes_of.dense), self.move_secs(self.bytes_of.dense)
        return Measured(
            iteration_secs=self.iteration.secs,
            checkpoint_cost_secs=self.stall_secs(self.bytes_of.dense),
            persist_secs=copied + moved,
            copy_bytes_per_sec=self.copy_rate,
            persist_bytes_per_sec=self.move_rate,
            recent_iteration_secs=self.iteration.secs,
            update_secs=self.iteration.update_secs,
            send_bytes_per_sec=self.nic_rate / self.system.replicas if self.system.durable == "peers" else None,
        )
