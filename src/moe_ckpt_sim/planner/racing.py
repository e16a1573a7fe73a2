"""Simulates several systems on the same failures, no longer than is needed to tell which one is ahead.

All are simulated for a part of the time at first. Two of them are compared span by span, from one failure to the next,
in the iterations that each gained: failures and loads are the same for both, so what luck gave or took it did from
either, and their difference is known much sooner than any of the two. (Spans between failures are independent of one
another, so their number gives a standard error; that of regenerative simulation.)
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
"""On average, in what is simulated of every system. Systems still in the race get twice as long each time."""
LEAST_SPANS = 5
"""With fewer, nothing is said of a difference."""
_Z = 2.5758293035489
"""Quantile of the normal distribution, for intervals of 99 %."""

Progress = Callable[[float], None]
"""Told what portion of one run is simulated."""


@dataclass(frozen=True)
class Interval:
    """Of a figure.

    Attributes:
        low, high: Of 99 % confidence; both are ``mean`` where nothing is left to chance.
    """

    mean: float
    low: float
    high: float

    @property
    def margin(self) -> float:
        return (self.high - self.low) / 2


class Runner:
    """One system, and how far it was simulated.

    legs: how many parts there are to simulate. leg: how many of them are done.
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
        """There is nothing left to simulate."""
        return self.leg == self.legs

    @property
    def simulated_secs(self) -> float:
        return fsum(run.now_secs for run in self._runs)

    @property
    def outcomes(self) -> list[Outcome]:
        """Of each seed so far."""
        return [run.outcome() for run in self._runs]

    @property
    def use(self) -> Use:
        """What the first seed's run asks of each resource."""
        now = self._runs[0].now_secs
        if self._use is None or self._use[0] != now:
            self._use = now, use_of(self.scenario, self._runs[0].outcome())
        return self._use[1]

    def secs_of(self, leg: int) -> float | None:
        """Up to where a leg goes; None: to the end of a run."""
        portion = self._first[leg - 1] if leg <= len(self._first) else 1.0
        return portion * self.scenario.duration_secs if portion < 1 else None

    @property
    def ettr(self) -> float:
        """Mean over the seeds so far."""
        return fmean(one.ettr for one in self.outcomes)

    def advance(self, leg: int, progress: Progress | None = None) -> None:
        """Simulate up to the end of that leg, the first of which is 1."""
        first = self._first
        while self.leg < leg:
            seed = max(0, self.leg + 1 - len(first))
            if seed == len(self._runs):
                self._runs.append(Run(replace(self.scenario, seed=self.scenario.seed + seed)))
            self.leg += 1
            until_secs = self.secs_of(self.leg)
            self._runs[seed].advance(inf if until_secs is None else until_secs, progress)
            if self._runs[seed].done:  # no failure came after that part, or it was given up
                self.leg = max(self.leg, len(first) + seed)

    def changed_after(self, secs: float) -> bool:
        """Whether the first seed's run is another one since then: K is not the same, or it gets on far worse."""
        history = self._runs[0].outcome().history
        before, later = ([one for one in history if (one.at_secs <= secs) is then] for then in (True, False))
        if not before or not later:
            return False
        pace = ratio(_spans(before, (), self.scenario.iteration.secs))
        now = later[-1].useful_steps * self.scenario.iteration.secs / later[-1].at_secs
        return now < pace.low or any(one.k != before[-1].k for one in later)

    def ahead_of(self, other: Runner) -> Interval:
        """The difference of their ETTRs, over the time for which both were simulated."""
        if self.done and other.done:
            mean = self.ettr - other.ettr
            return Interval(mean, mean, mean)
        mine, theirs = ([one.history for one in each.outcomes] for each in (self, other))
        secs = self.scenario.iteration.secs
        if self.changed_after(other.simulated_secs):  # what it gained before tells little, so each is taken by itself
            one, two = (ratio([x for history in each for x in _spans(history, (), secs)]) for each in (mine, theirs))
            mean, margin = one.mean - two.mean, hypot(one.margin, two.margin)
            return Interval(mean, mean - margin, mean + margin)
        return ratio([span for pair in zip(mine, theirs, strict=False) for span in _spans(*pair, secs)])

    @property
    def lost(self) -> Interval:
        """The portion of lost tokens."""
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
    """Of the first seed's run, at each of which it is looked at who may stop. Later seeds are run whole, and so is
    everything where failures are those of a trace: a part of it need not be like the rest."""
    mean = scenario.failures.mean_secs
    portions = [] if mean is None else [FIRST_FAILURES * mean / scenario.duration_secs]
    while portions and portions[-1] < 0.5:
        portions.append(2 * portions[-1])
    return *(one for one in portions if one < 1), 1.0


def _spans(mine: Sequence[Sample], theirs: Sequence[Sample], secs: float) -> list[tuple[float, float]]:
    """(seconds, useful seconds that one gained more than the other), from each sample of the one to its next.

    secs: of an iteration. theirs: without samples, nothing is taken off.
    """
    end = min(each[-1].at_secs for each in (mine, theirs) if each) if mine else 0.0
    bounds = np.array([0.0, *(one.at_secs for one in mine if one.at_secs < end), end])
    at = [
        np.interp(bounds, [0.0, *(x.at_secs for x in each)], [0.0, *(x.useful_steps * secs for x in each)])
        for each in (mine, theirs)
    ]
    return list(zip(np.diff(bounds).tolist(), np.diff(at[0] - at[1]).tolist(), strict=True))


def ratio(spans: Sequence[tuple[float, float]]) -> Interval:
    """Of the sum of the second figures to that of the first, from spans that do not depend on one another."""
    count, total = len(spans), fsum(size for size, _ in spans)
    if count < LEAST_SPANS or min(size for size, _ in spans) <= 0:
        return Interval(0.0, -inf, inf)
    mean = fsum(figure for _, figure in spans) / total
    squares = fsum((figure - mean * size) ** 2 for size, figure in spans)
    margin = _student(count - 1) * sqrt(squares * count / (count - 1)) / total
    return Interval(mean, mean - margin, mean + margin)


def _student(freedom: int) -> float:
    """The same quantile of Student's distribution (Abramowitz and Stegun, 26.7.5); within 2 % from 4 degrees on."""
    z, n = _Z, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3
