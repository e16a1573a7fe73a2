"""Simulates several systems on the same failures, only until it is certain which one is best.

All are simulated for a part of the time at first. Two systems are compared span by span, from one failure to the next,
by the iterations that each gained. Failures and loads are the same for both, so chance affects both alike, and their
difference is known much sooner than either figure. Spans between failures are independent, so their number gives a
standard error (regenerative simulation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import fsum, hypot, inf, sqrt
from statistics import fmean

import numpy as np

from moe_ckpt_sim.planner.intervals import with_interval
from moe_ckpt_sim.planner.resources import Use, use_of
from moe_ckpt_sim.run.run import Run, ettr_of
from moe_ckpt_sim.run.scenario import Outcome, Sample, Scenario
from moe_ckpt_sim.run.system import System

FIRST_FAILURES = 6
"""Failures, on average, in the part that is simulated of every system. Each further part is twice as long."""
LEAST_SPANS = 5
"""Spans that a comparison needs at least."""
_Z = 2.5758293035489
"""Quantile of the normal distribution, for intervals of 99 %."""

Progress = Callable[[float], None]
"""A callback that gets the simulated portion of one run."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval.

    Attributes:
        low, high: Bounds with 99 % confidence; both are ``mean`` if the figure is exact.
    """

    mean: float
    low: float
    high: float

    @property
    def margin(self) -> float:
        return (self.high - self.low) / 2


class Runner:
    """The simulation of one system, in legs.

    legs: number of parts to simulate. leg: number of parts that are done.
    """

    def __init__(self, scenario: Scenario, system: System, seeds: int) -> None:
        """Raises ``ConfigError``: the system does not fit the scenario."""
        self.scenario = with_interval(replace(scenario, system=system), ettr_of)
        self.scenario.require_peers()
        self.system = self.scenario.system
        self._first = _portions(scenario)
        self.legs = len(self._first) + seeds - 1
        self.leg = 0
        self._runs: list[Run] = []
        self._use: tuple[float, Use] | None = None

    @property
    def done(self) -> bool:
        """True if all legs are simulated."""
        return self.leg == self.legs

    @property
    def simulated_secs(self) -> float:
        return fsum(run.now_secs for run in self._runs)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of each seed so far."""
        return [run.outcome() for run in self._runs]

    @property
    def use(self) -> Use:
        """The use of each resource by the first seed's run."""
        now = self._runs[0].now_secs
        if self._use is None or self._use[0] != now:
            self._use = now, use_of(self.scenario, self._runs[0].outcome())
        return self._use[1]

    def secs_of(self, leg: int) -> float | None:
        """Simulated time at the end of a leg; None: the end of a run."""
        portion = self._first[leg - 1] if leg <= len(self._first) else 1.0
        return portion * self.scenario.duration_secs if portion < 1 else None

    @property
    def ettr(self) -> float:
        """Mean ETTR over the seeds so far."""
        return fmean(one.ettr for one in self.outcomes)

    def advance(self, leg: int, progress: Progress | None = None) -> None:
        """Simulate to the end of that leg; legs are numbered from 1."""
        first = self._first
        while self.leg < leg:
            seed = max(0, self.leg + 1 - len(first))
            if seed == len(self._runs):
                self._runs.append(Run(replace(self.scenario, seed=self.scenario.seed + seed)))
            self.leg += 1
            until_secs = self.secs_of(self.leg)
            self._runs[seed].advance(inf if until_secs is None else until_secs, progress)
            if self._runs[seed].done:  # no failure came after that leg, or the run was given up
                self.leg = max(self.leg, len(first) + seed)

    def changed_after(self, secs: float) -> bool:
        """Returns whether the first seed's run has changed since then: K differs, or it advances far more slowly."""
        history = self._runs[0].outcome().history
        before, later = ([one for one in history if (one.at_secs <= secs) is then] for then in (True, False))
        if not before or not later:
            return False
        pace = ratio(_spans(before, (), self.scenario.iteration.secs))
        now = later[-1].useful_steps * self.scenario.iteration.secs / later[-1].at_secs
        return now < pace.low or any(one.k != before[-1].k for one in later)

    def ahead_of(self, other: Runner) -> Interval:
        """The ETTR of this system less that of the other, over the time for which both were simulated."""
        if self.done and other.done:
            mean = self.ettr - other.ettr
            return Interval(mean, mean, mean)
        mine, theirs = ([one.history for one in runner.outcomes] for runner in (self, other))
        secs = self.scenario.iteration.secs
        if self.changed_after(other.simulated_secs):  # its gains before say little, so the two are rated separately
            one, two = (
                ratio([x for history in histories for x in _spans(history, (), secs)]) for histories in (mine, theirs)
            )
            mean, margin = one.mean - two.mean, hypot(one.margin, two.margin)
            return Interval(mean, mean - margin, mean + margin)
        return ratio([span for pair in zip(mine, theirs, strict=False) for span in _spans(*pair, secs)])

    @property
    def lost(self) -> Interval:
        """The portion of tokens that were lost."""
        per_step = self.scenario.tokens_per_step * self.scenario.layout.model.top_k
        per_step *= len(self.scenario.layout.model.catalog.layers)
        spans = []
        for outcome in self.outcomes:
            steps, lost = (
                [0, *(getattr(one, name) for one in outcome.history)] for name in ("useful_steps", "lost_tokens")
            )
            spans += list(zip((np.diff(steps) * per_step).tolist(), np.diff(lost).tolist(), strict=True))
        return ratio(spans)


def _portions(scenario: Scenario) -> tuple[float, ...]:
    """The portions of the first seed's run at which legs end. Later seeds are one leg each, and so are all runs with a
    trace of failures, a part of which need not be like the rest."""
    mean = scenario.failures.mean_secs
    portions = [] if mean is None else [FIRST_FAILURES * mean / scenario.duration_secs]
    while portions and portions[-1] < 0.5:
        portions.append(2 * portions[-1])
    return *(one for one in portions if one < 1), 1.0


def _spans(mine: Sequence[Sample], theirs: Sequence[Sample], secs: float) -> list[tuple[float, float]]:
    """The spans between samples of ``mine``: (seconds, useful seconds gained less those of ``theirs``).

    secs: time of an iteration. theirs: if empty, nothing is subtracted.
    """
    end = min(samples[-1].at_secs for samples in (mine, theirs) if samples) if mine else 0.0
    bounds = np.array([0.0, *(one.at_secs for one in mine if one.at_secs < end), end])
    at = [
        np.interp(bounds, [0.0, *(x.at_secs for x in samples)], [0.0, *(x.useful_steps * secs for x in samples)])
        for samples in (mine, theirs)
    ]
    return list(zip(np.diff(bounds).tolist(), np.diff(at[0] - at[1]).tolist(), strict=True))


def ratio(spans: Sequence[tuple[float, float]]) -> Interval:
    """The ratio of the sum of the second figures to that of the first, for independent spans."""
    count, total = len(spans), fsum(size for size, _ in spans)
    if count < LEAST_SPANS or min(size for size, _ in spans) <= 0:
        return Interval(0.0, -inf, inf)
    mean = fsum(figure for _, figure in spans) / total
    squares = fsum((figure - mean * size) ** 2 for size, figure in spans)
    margin = _student(count - 1) * sqrt(squares * count / (count - 1)) / total
    return Interval(mean, mean - margin, mean + margin)


def _student(freedom: int) -> float:
    """The 99 % quantile of Student's distribution (Abramowitz and Stegun, 26.7.5); within 2 % from 4 degrees on."""
    z, n = _Z, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3
