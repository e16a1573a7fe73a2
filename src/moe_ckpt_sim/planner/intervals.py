"""Intervals of systems that do not choose their own: by Young's or Daly's formula, or by trying many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.failures.formulas import daly_interval_secs, young_interval_secs
from moe_ckpt_sim.run.moving_ledger import MovingRunLedger
from moe_ckpt_sim.run.scenario import Scenario

ORACLE_STEPS = 16
"""Intervals that the oracle tries over the whole range, and again between the neighbours of the best."""


Score = Callable[[Scenario, float], float]
"""``run.ettr_of``."""


def with_interval(scenario: Scenario, score: Score) -> Scenario:
    """The scenario with the interval that its system's rule chooses, as an ordinary policy.

    Args:
        score: Rates an interval for the oracle.

    Raises:
        ConfigError: the rule needs a mean time between failures, and the failures have none.
    """
    rule = scenario.system.interval
    if rule == "policy":
        return scenario
    interval = oracle(scenario, score) if rule == "oracle" else by_formula(scenario, rule)
    return _with(scenario, interval)


def _with(scenario: Scenario, interval: int) -> Scenario:
    policy: Any = scenario.system.policy  # System has made sure that it has every_n_steps
    return replace(
        scenario, system=replace(scenario.system, interval="policy", policy=replace(policy, every_n_steps=interval))
    )


@dataclass(frozen=True)
class Usual:
    """The times of a policy's usual checkpoint, one after the first.

    Attributes:
        cost_secs: Time by which it delays training.
        copy_secs: Time to copy it into host memory.
        move_secs: Time to move it on to where it is durable.
    """

    cost_secs: float
    copy_secs: float
    move_secs: float

    @property
    def persist_secs(self) -> float:
        return self.copy_secs + self.move_secs


def usual(scenario: Scenario) -> Usual:
    """The usual checkpoint of a system whose policy has ``every_n_steps``, without a budget of lost tokens."""
    costs = Costs(scenario.layout, scenario.precision, scenario.iteration, scenario.system)
    run_ledger = MovingRunLedger(scenario.layout.model.catalog)
    context = run_ledger.context(1, scenario.layout.placement, costs.measured)
    context = replace(context, model=replace(context.model, sizes=costs.sizes), run=replace(context.run, missing=()))
    policy: Any = scenario.system.policy
    budget = {"plt_budget": None} if hasattr(policy, "plt_budget") else {}
    plan = replace(policy, every_n_steps=1, **budget).plan(context)
    copied, stored = costs.bytes_of.plan(plan), costs.bytes_of.stored(plan)
    copy, move = costs.copy_secs(copied), costs.move_secs(stored)
    cost = copy + move + costs.drag_secs(copied) if plan.wait else costs.stall_secs(copied)
    return Usual(cost, copy, move)


def least_interval(scenario: Scenario) -> int:
    """The smallest interval at which a checkpoint is durable before the next one, and within ``max_overhead``."""
    return _least(scenario, usual(scenario))


def _least(scenario: Scenario, one: Usual) -> int:
    share = scenario.system.max_overhead
    allowed = one.cost_secs / (share * scenario.iteration.secs) if share else 0.0
    return max(1, ceil(one.persist_secs / scenario.iteration.secs), ceil(allowed))


def by_formula(scenario: Scenario, rule: str) -> int:
    """Iterations between checkpoints by "young" or "daly", not below ``least_interval``."""
    mean = scenario.failures.mean_secs
    if mean is None:
        raise ConfigError(
            f"System {scenario.system.name!r}(interval={rule!r}) needs a mean time between failures, and "
            f"{type(scenario.failures).__name__} has none; use interval: oracle or policy"
        )
    one = usual(scenario)
    formula: Callable[..., float] = young_interval_secs if rule == "young" else daly_interval_secs
    secs = formula(checkpoint_secs=one.cost_secs, mtbf_secs=mean) if one.cost_secs > 0 else 0.0
    return max(_least(scenario, one), ceil(secs / scenario.iteration.secs))


def oracle(scenario: Scenario, score: Score) -> int:
    """The interval with the best ETTR on these very failures: hindsight that no real system has.

    A run is stopped as soon as it is certain to stay below the best one so far, which most are long before their end.
    """
    least = 1
    most = max(2, int(scenario.duration_secs / scenario.iteration.secs))
    tried: dict[int, float] = {}

    def best(candidates: list[int]) -> int:
        for interval in candidates:
            if interval not in tried:
                tried[interval] = score(_with(scenario, interval), max(tried.values(), default=0.0))
        return max(tried, key=lambda n: (tried[n], n))

    interval = best(_between(least, most, ORACLE_STEPS))
    intervals = sorted(tried)
    at = intervals.index(interval)
    low, high = intervals[max(at - 1, 0)], intervals[min(at + 1, len(intervals) - 1)]
    return best(_between(low, high, ORACLE_STEPS))


def _between(low: int, high: int, count: int) -> list[int]:
    """``count`` whole numbers from ``low`` to ``high``, in equal ratios."""
    ratio = (high / low) ** (1 / (count - 1)) if high > low else 1.0
    return sorted({min(high, max(low, round(low * ratio**at))) for at in range(count)})
