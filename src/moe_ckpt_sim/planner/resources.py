"""How much a system uses each resource, and which resource limits training."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from moe_ckpt.pace.cadence import StorageCadence, StorageFacts
from moe_ckpt.policies.moetion import MOST_GRADIENTS
from moe_ckpt.policies.schedules.rolling import held_bytes_per_parameter
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.run.scenario import Outcome, Scenario

RESOURCES = ("compute", "pcie", "nic", "storage", "host_memory")
DRAGGED = 0.05
"""Portion of an iteration."""


@dataclass(frozen=True)
class Use:
    """Resources that one system uses while nothing fails.

    Attributes:
        utilisation: Of each resource, the portion of its time (or bytes) that is used; ``compute`` is 1 where nothing
            makes training wait. Above 1: more is asked of it than it can do in an iteration.
        copied_bytes: Into host memory, of the rank that has most, per iteration.
        sent_bytes: To peers, likewise.
        stored_bytes: To storage, of all ranks, per iteration.
        host_bytes: Of one node.
        log_bytes: Of one rank, of an upstream log that reaches back as far as a recovery may; 0 where none is kept.
        drag: Portion that iterations take longer though they wait for no link, since snapshots are begun on the
            training thread and copied and written beside it; from a profile only.
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
        """The resource that bounds the iteration: compute, unless another is overloaded or
        ``drag`` takes more than ``DRAGGED`` of it."""
        busiest = max((name for name in RESOURCES if name != "compute"), key=lambda name: self.utilisation[name])
        if self.utilisation[busiest] > 1:
            return busiest
        return "drag" if self.drag > DRAGGED else "compute"


def use_of(scenario: Scenario, outcome: Outcome) -> Use:
    """What ``outcome`` made of the resources of its scenario."""
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
    """From one flush to storage to the next, each of ``held`` bytes, as it is by the end of the run."""
    layout, iteration_secs = scenario.layout, scenario.iteration.secs
    flush_secs = held / layout.cluster.storage_bytes_per_sec
    facts = StorageFacts(0, 0, 0.0, flush_secs, iteration_secs, outcome.failures, outcome.spent.total)
    step, secs = cadence.next_step(facts), cadence.next_secs(facts)
    least = max(flush_secs, iteration_secs * (outcome.window or outcome.interval or 1))
    return max(least, min(inf if secs is None else secs, inf if step is None else step * iteration_secs))


def host_bytes(costs: Costs, outcome: Outcome) -> float:
    """Of one node: snapshots under way and the newest that is done, and what the node keeps for its peers.

    A peer keeps a whole checkpoint and the one that is coming in: of a window, all its slots. Of a log of gradients it
    keeps the anchors, the gradients since (a log for peers: all steps of a round), and the step that is coming in, and
    so does the node itself.
    """
    system, ranks = costs.system, costs.layout.ranks_per_node
    served = costs.layout.served(system.replicas) if system.durable == "peers" else 0
    own: float = (system.max_in_flight + 1) * outcome.heaviest_bytes
    if system.sparse and system.durable != "storage":  # two windows stay, as in ``commit.room``
        slots = system.max_in_flight + 1 + 2 * ((outcome.window or 1) - 1)
        own = max(own, slots * outcome.rank_bytes_per_step)
    if system.needs.gradients:
        if system.needs.partial:
            held = (MOST_GRADIENTS + 2) * outcome.rank_bytes_per_step
        else:
            window, full = outcome.window or 1, costs.bytes_of.dense.rank
            gradient = (window * outcome.rank_bytes_per_step - full) / max(1, window - 1)
            held = held_bytes_per_parameter(window, gradient, full) + outcome.rank_bytes_per_step
        return ranks * own + (ranks + served) * held
    whole = outcome.rank_bytes_per_step * (outcome.window or 1) if system.sparse else costs.bytes_of.dense.rank
    return ranks * own + served * 2.0 * whole
