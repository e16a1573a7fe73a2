"""Compares a log of gradients with sparse windows: at which rate of failures each costs less, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from moe_ckpt.core.user_text import human_bytes
from moe_ckpt.policies import GradientLog
from moe_ckpt.policies.base import MemoryFacts, ModelFacts, PolicyContext, RunFacts
from moe_ckpt.policies.gradient_log import LogReport
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.planner.planner import Candidate
from moe_ckpt_sim.run.scenario import Scenario
from moe_ckpt_sim.run.system import System


@dataclass(frozen=True)
class Cost:
    """The cost of one system.

    Attributes:
        running: Portion by which iterations take longer.
        failure_secs: Cost of a failure beyond detection and restart.
    """

    running: float
    failure_secs: float


def cost_of(candidate: Candidate, iteration_secs: float) -> Cost | None:
    """The cost of a candidate; None if it was not simulated or nothing failed."""
    outcome = candidate.outcome
    if outcome is None or not outcome.failures:
        return None
    spent = outcome.spent
    return Cost(candidate.stall_secs / iteration_secs, (spent.lost + spent.retrieve + spent.replay) / outcome.failures)


def break_even_secs(one: Cost, other: Cost) -> float:
    """Mean time between failures at which both cost the same. If failures are rarer, the system with the lower cost of
    running costs less. ``inf``, or 0 and below: one system costs less at any rate of failures."""
    running = one.running - other.running
    return (other.failure_secs - one.failure_secs) / running if running else inf


def report_of(scenario: Scenario, system: System) -> LogReport | None:
    """The first round of a log of gradients; None for any other policy."""
    if not isinstance(system.policy, GradientLog):
        return None
    layout = scenario.layout
    costs = Costs(layout, scenario.precision, scenario.iteration, system)
    context = PolicyContext(
        ModelFacts(layout.model.catalog, layout.placement, costs.sizes),
        RunFacts(1),
        costs.measured,
        memory=MemoryFacts(tiers=system.memory_tiers, sends=costs.sends),
    )
    return system.policy.explain(context)


def sentences(scenario: Scenario, candidates: Sequence[Candidate]) -> list[str]:
    """Sentences that compare the log with MoEvement's windows in the same memory; empty if either was not tried."""
    log = next((one for one in candidates if isinstance(one.system.policy, GradientLog)), None)
    windows = next((one for one in candidates if one.system.sparse and one.system.durable != "storage"), None)
    if log is None or windows is None or log.use is None or windows.use is None:
        return []
    secs = scenario.iteration.secs
    mine, theirs = cost_of(log, secs), cost_of(windows, secs)
    report = report_of(scenario, log.system)
    notes = [] if report is None or report.warning is None else [f"{log.system.name}: {report.warning}"]
    if mine is None or theirs is None or log.outcome is None or windows.outcome is None:
        return notes
    sent = human_bytes(round(log.use.sent_bytes)), human_bytes(round(windows.use.sent_bytes))
    comparison = (
        f"{log.system.name} beside {windows.system.name}: W = {log.outcome.window} and {windows.outcome.window}, "
        f"{sent[0]} and {sent[1]} sent per iteration, iterations {mine.running:.1%} and {theirs.running:.1%} longer, "
        f"{mine.failure_secs:.3g} s and {theirs.failure_secs:.3g} s lost, loaded and replayed per failure; "
    )
    return [*notes, comparison + _verdict(mine, theirs)]


def _verdict(log: Cost, windows: Cost) -> str:
    dearer, slower = log.running > windows.running, log.failure_secs > windows.failure_secs
    if dearer == slower or log.running == windows.running or log.failure_secs == windows.failure_secs:
        return f"{'windows cost' if dearer or slower else 'the log costs'} no more at any rate of failures"
    apart = break_even_secs(log, windows)
    where = "less" if dearer else "more"
    return f"the log costs less where failures are {where} than {apart / 60:.3g} min apart"
