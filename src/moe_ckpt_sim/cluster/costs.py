"""The time that links need for snapshots."""

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
    """The times that one system's snapshots take on one layout, in seconds.

    A link that several ranks of a node share is divided evenly: all of them have a snapshot to send at the same time.

    Attributes:
        sizes: Bytes of each operator, all ranks together.
        sends: The parts that go to peers; everything if no peers hold copies.
        bytes_of: Sizes of the snapshots.
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
        """Bytes per second that one rank copies into host memory."""
        return self.layout.cluster.pcie_bytes_per_sec

    @cached_property
    def move_rate(self) -> float:
        """Bytes per second that one rank moves from host memory to where a snapshot survives a failure; the copy rate
        if that is host memory itself."""
        cluster, layout = self.layout.cluster, self.layout
        if self.system.durable == "storage":
            return cluster.storage_bytes_per_sec / layout.parallel.ranks
        sent = self.system.durable == "peers" and not self.sends.nothing
        return self.nic_rate / self.system.replicas if sent else self.copy_rate

    @property
    def nic_rate(self) -> float:
        """Bytes per second that one rank sends to other nodes, besides training's own traffic."""
        return self.layout.cluster.nic_bytes_per_sec * self.layout.cluster.nic_share / self.layout.ranks_per_node

    def copy_secs(self, snapshot: SnapshotSize) -> float:
        return snapshot.rank / self.copy_rate

    @cached_property
    def log(self) -> SimulatedUpstreamLog:
        """The upstream log of the rank that logs most; empty if all ranks roll back."""
        logged = self.iteration.boundary_bytes if self.system.rollback == "localized" else 0.0
        return SimulatedUpstreamLog(logged, self.system.log_bytes)

    def move_secs(self, snapshot: SnapshotSize) -> float:
        """Time to move a snapshot to where it is durable. All ranks share storage, so there their total counts."""
        if self.system.durable == "node":
            return 0.0
        return self.storage_secs(snapshot) if self.system.durable == "storage" else snapshot.sent / self.move_rate

    def storage_secs(self, snapshot: SnapshotSize) -> float:
        """Time to write a snapshot to storage, or to read it, all ranks together."""
        return snapshot.total / self.layout.cluster.storage_bytes_per_sec

    def stall_secs(self, snapshot: SnapshotSize) -> float:
        """Time by which a snapshot delays training, with a wait if the copy takes longer than the time between two
        updates. An upstream log adds none: the copy rate is what snapshots get besides it."""
        return max(0.0, self.copy_secs(snapshot) - self.iteration.open_secs) + self.drag_secs(snapshot)

    def drag_secs(self, snapshot: SnapshotSize) -> float:
        """Time by which a snapshot slows training down without making it wait for the copy."""
        return snapshot.rank * self.iteration.drag_secs_per_byte

    @cached_property
    def measured(self) -> Measured:
        """The measurements of a trainer that saves all state before its first step, and keeps them over restarts."""
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
