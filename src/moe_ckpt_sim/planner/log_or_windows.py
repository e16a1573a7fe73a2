"""A log of gradients beside sparse windows: which of the two costs less where, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from moe_ckpt.core.quantities import human_bytes
from moe_ckpt.policies import GradientLog
from moe_ckpt.policies.base import MemoryFacts, ModelFacts, PolicyContext, RunFacts
from moe_ckpt.policies.schedules.rolling import LogReport
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.planner.planner import Candidate
from moe_ckpt_sim.run.scenario import Scenario
from moe_ckpt_sim.run.system import System


@dataclass(frozen=True)
class Cost:
    """Of one system.

    Attributes:
        running: Portion that iterations take longer.
        failure_secs: What a failure costs beyond detection and restart.
    """

    running: float
    failure_secs: float


def cost_of(candidate: Candidate, iteration_secs: float) -> Cost | None:
    """None where it was not simulated, or nothing failed."""
    outcome = candidate.outcome
    if outcome is None or not outcome.failures:
        return None
    spent = outcome.spent
    return Cost(candidate.stall_secs / iteration_secs, (spent.lost + spent.retrieve + spent.replay) / outcome.failures)


def break_even_secs(one: Cost, other: Cost) -> float:
    """Mean time between failures at which both cost the same: ``one`` costs less where failures are further apart, or
    closer, whichever its costs of running say. ``inf``, or 0 and below: one of them costs less at any."""
    running = one.running - other.running
    return (other.failure_secs - one.failure_secs) / running if running else inf


def report_of(scenario: Scenario, system: System) -> LogReport | None:
    """The round that a log of gradients would begin with; None of any other policy."""
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
    """What to know of the log beside MoEvement's windows in the same memory; nothing where either was not tried."""
    log = next((one for one in candidates if isinstance(one.system.policy, GradientLog)), None)
    windows = next((one for one in candidates if one.system.sparse and one.system.durable != "storage"), None)
    if log is None or windows is None or log.use is None or windows.use is None:
        return []
    secs = scenario.iteration.secs
    mine, theirs = cost_of(log, secs), cost_of(windows, secs)
    report = report_of(scenario, log.system)
    found = [] if report is None or report.warning is None else [f"{log.system.name}: {report.warning}"]
    if mine is None or theirs is None or log.outcome is None or windows.outcome is None:
        return found
    sent = human_bytes(round(log.use.sent_bytes)), human_bytes(round(windows.use.sent_bytes))
    said = (
        f"{log.system.name} beside {windows.system.name}: W = {log.outcome.window} and {windows.outcome.window}, "
        f"{sent[0]} and {sent[1]} sent per iteration, iterations {mine.running:.1%} and {theirs.running:.1%} longer, "
        f"{mine.failure_secs:.3g} s and {theirs.failure_secs:.3g} s lost, loaded and replayed per failure; "
    )
    return [*found, said + _verdict(mine, theirs)]


def _verdict(log: Cost, windows: Cost) -> str:
    dearer, slower = log.running > windows.running, log.failure_secs > windows.failure_secs
    if dearer == slower or log.running == windows.running or log.failure_secs == windows.failure_secs:
        return f"{'windows cost' if dearer or slower else 'the log costs'} no more at any rate of failures"
    apart = break_even_secs(log, windows)
    where = "less" if dearer else "more"
    return f"the log costs less where failures are {where} than {apart / 60:.3g} min apart"
