"""The use of each resource by a system, and the resource that limits training."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from moe_ckpt.core.cadence import StorageCadence, StorageFacts
from moe_ckpt.policies.gradient_log import held_bytes_per_parameter
from moe_ckpt.policies.moetion import MOST_GRADIENTS
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.run.scenario import Outcome, Scenario

RESOURCES = ("compute", "pcie", "nic", "storage", "host_memory")
DRAGGED = 0.05
"""Portion of an iteration."""


@dataclass(frozen=True)
class Use:
    """Resources that one system uses while nothing fails.

    Attributes:
        utilisation: Used portion of each resource's time (or bytes); ``compute`` is 1 if training never waits. Above 1,
            an iteration needs more than the resource can do.
        copied_bytes: Bytes per iteration into host memory, by the rank that copies most.
        sent_bytes: Bytes per iteration to peers, by the rank that sends most.
        stored_bytes: Bytes per iteration to storage, by all ranks.
        host_bytes: Host memory of one node.
        log_bytes: Host memory of one rank's upstream log that reaches back as far as a recovery may; 0 without a log.
        drag: Portion by which iterations take longer without waiting for a link, since snapshots are begun on the
            training thread and copied and written next to it; from a profile only.
    """

    utilisation: dict[str, float]
    copied_bytes: float
    sent_bytes: float
    stored_bytes: float
    host_bytes: float
    drag: float = 0.0
    log_bytes: float = 0.0

    @property
    def roof(self) -> str:
        """The resource that bounds the iteration: compute, unless another is overloaded or ``drag`` exceeds
        ``DRAGGED``."""
        busiest = max((name for name in RESOURCES if name != "compute"), key=lambda name: self.utilisation[name])
        if self.utilisation[busiest] > 1:
            return busiest
        return "drag" if self.drag > DRAGGED else "compute"


def use_of(scenario: Scenario, outcome: Outcome) -> Use:
    """The use of the scenario's resources by the run with this outcome."""
    layout, system = scenario.layout, scenario.system
    costs = Costs(layout, scenario.precision, scenario.iteration, system)
    peers = system.durable == "peers"
    copied, total = outcome.rank_bytes_per_step, outcome.total_bytes_per_step
    logged, log_bytes = outcome.logged_bytes_per_step, outcome.log_bytes
    sent = outcome.sent_bytes_per_step * system.replicas if peers else 0.0
    stored = total if system.durable == "storage" else 0.0
    if system.cadence is not None:
        held = total * (outcome.window or 1) if system.sparse else costs.bytes_of.dense.total
        stored = held * scenario.iteration.secs / _flushes_apart_secs(scenario, outcome, system.cadence, held)
    host = host_bytes(costs, outcome) + layout.ranks_per_node * log_bytes
    secs = scenario.iteration.secs
    utilisation = {
        "compute": secs / (secs + outcome.mean_stall_secs),
        "pcie": (copied + logged) / costs.copy_rate / scenario.iteration.open_secs,
        "nic": sent / costs.nic_rate / secs,
        "storage": stored / layout.cluster.storage_bytes_per_sec / secs,
        "host_memory": host / layout.cluster.host_memory_bytes,
    }
    drag = copied * scenario.iteration.drag_secs_per_byte / secs
    return Use(utilisation, copied, sent, stored, host, drag, log_bytes)


def _flushes_apart_secs(scenario: Scenario, outcome: Outcome, cadence: StorageCadence, held: float) -> float:
    """Time between flushes of ``held`` bytes to storage, as at the end of the run."""
    layout, iteration_secs = scenario.layout, scenario.iteration.secs
    flush_secs = held / layout.cluster.storage_bytes_per_sec
    facts = StorageFacts(0, 0, 0.0, flush_secs, iteration_secs, outcome.failures, outcome.spent.total)
    step, secs = cadence.next_step(facts), cadence.next_secs(facts)
    least = max(flush_secs, iteration_secs * (outcome.window or outcome.interval or 1))
    return max(least, min(inf if secs is None else secs, inf if step is None else step * iteration_secs))


def host_bytes(costs: Costs, outcome: Outcome) -> float:
    """Host memory of one node: its snapshots under way, its newest complete one, and what it keeps for peers.

    A peer keeps a whole checkpoint (of a window, all slots) and the one that is coming in. For a log of gradients, both
    the peer and the node itself keep the anchors, the gradients since (in a log for peers, all steps of a round) and
    the step that is coming in.
    """
    system, ranks = costs.system, costs.layout.ranks_per_node
    served = costs.layout.served(system.replicas) if system.durable == "peers" else 0
    own_bytes: float = (system.max_in_flight + 1) * outcome.heaviest_bytes
    if system.sparse and system.durable != "storage":  # two windows stay, as in ``commit.room``
        slots = system.max_in_flight + 1 + 2 * ((outcome.window or 1) - 1)
        own_bytes = max(own_bytes, slots * outcome.rank_bytes_per_step)
    if system.needs.gradients:
        if system.needs.partial:
            held = (MOST_GRADIENTS + 2) * outcome.rank_bytes_per_step
        else:
            window, full = outcome.window or 1, costs.bytes_of.dense.rank
            gradient = (window * outcome.rank_bytes_per_step - full) / max(1, window - 1)
            held = held_bytes_per_parameter(window, gradient, full) + outcome.rank_bytes_per_step
        return ranks * own_bytes + (ranks + served) * held
    whole = outcome.rank_bytes_per_step * (outcome.window or 1) if system.sparse else costs.bytes_of.dense.rank
    return ranks * own_bytes + served * 2.0 * whole
