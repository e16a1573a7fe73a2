"""The runs of a sweep, one after the other or on several processes, with the same results."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from pathlib import Path
from typing import Any

from moe_ckpt.errors import ConfigError, MoECheckpointError
from moe_ckpt_sim.conf.scenarios import scenario_of
from moe_ckpt_sim.conf.sweeps import Combination, combinations, composed
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.scenario import Outcome, Scenario

Progress = Callable[[float, int], None]
"""A callback that gets the number of runs done, portions of running ones included, and the number of all runs."""
Portion = Callable[[float], None]
"""A callback that gets the portion of one run that is done."""

PARTS = ("useful", "stall", "lost", "down", "idle", "retrieve", "replay")
"""The parts of a run's time: the fields of ``run.scenario.Spent``."""


@dataclass(frozen=True)
class Timespan:
    """Mean, least and greatest value of one figure over the seeds."""

    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class Result:
    """One combination of a sweep, simulated with every seed.

    Attributes:
        mtbf_secs: Mean time between failures, None where the failures have none.
        outcomes: One per seed.
    """

    combination: Combination
    mtbf_secs: float | None
    outcomes: tuple[Outcome, ...]

    @property
    def first(self) -> Outcome:
        return self.outcomes[0]

    @property
    def advances(self) -> bool:
        """True if training advances with at least one seed."""
        return any(one.advances for one in self.outcomes)

    @property
    def name(self) -> str:
        """The system and the other settings that were varied."""
        rest = [f"{key}={value}" for key, value in self.combination.varied if key != "policy"]
        return ", ".join((self.first.system, *rest))

    def over_seeds(self, figure: Callable[[Outcome], float]) -> Timespan:
        values = [float(figure(one)) for one in self.outcomes]
        return Timespan(fsum(values) / len(values), min(values), max(values))

    def share(self, part: str) -> float:
        """Portion of all time that one of ``PARTS`` takes, on average over the seeds."""
        return self.over_seeds(lambda one: getattr(one.spent, part) / one.spent.total if one.spent.total else 0.0).mean

    def to_dict(self) -> dict[str, Any]:
        """Plain data, rounded as ``Outcome.to_dict``."""
        ettr = self.over_seeds(lambda one: one.ettr)
        spans = {"mean": ettr.mean, "min": ettr.least, "max": ettr.most}
        return {
            "varied": dict(self.combination.varied),
            "overrides": list(self.combination.overrides),
            "mtbf_secs": None if self.mtbf_secs is None else float(f"{self.mtbf_secs:.9g}"),
            "ettr": {key: float(f"{value:.9g}") for key, value in spans.items()},
            "outcomes": [one.to_dict() for one in self.outcomes],
        }


def results_of(
    overrides: Sequence[str], config_dir: Path | None, seeds: int, workers: int, progress: Progress
) -> list[Result]:
    """Simulate all combinations of ``overrides``. All configs are checked before the first is simulated.

    Args:
        seeds: Seeds for each combination, from the config's ``seed`` on.
        workers: Processes.

    Raises:
        ConfigError: as ``sweeps.combinations``, ``sweeps.composed``, ``scenarios.scenario_of``, ``run.run.simulate``.
    """
    asked = combinations(overrides, config_dir)
    simulator = Simulator()
    means, jobs = [], []
    for combination in asked:
        with _about(combination):
            scenario = simulator.scenario(combination)
            scenario.require_peers()
        means.append(scenario.failures.mean_secs)
        jobs += [_Job(combination, scenario.seed + number) for number in range(seeds)]
    outcomes = _here(simulator, jobs, progress) if workers == 1 else _spread(jobs, workers, progress)
    return [
        Result(combination, mean, tuple(outcomes[at * seeds : (at + 1) * seeds]))
        for at, (combination, mean) in enumerate(zip(asked, means, strict=True))
    ]


class Simulator:
    """Makes scenarios and simulates them. It caches the last combination's scenario for the next seed."""

    def __init__(self) -> None:
        self._last: tuple[Combination, Scenario] | None = None

    def scenario(self, combination: Combination) -> Scenario:
        if self._last is None or self._last[0] != combination:
            self._last = None  # never two large models in memory
            self._last = combination, scenario_of(composed(combination))
        return self._last[1]

    def outcome(self, job: _Job, portion: Portion) -> Outcome:
        with _about(job.combination):
            return simulate(replace(self.scenario(job.combination), seed=job.seed), portion)


@dataclass(frozen=True)
class _Job:
    combination: Combination
    seed: int


@contextmanager
def _about(combination: Combination) -> Iterator[None]:
    """Add the name of a sweep's combination to the message of a ``ConfigError``."""
    try:
        yield
    except ConfigError as error:
        if not combination.varied:
            raise
        raise ConfigError(f"with {combination.name}: {error}") from error


def _here(simulator: Simulator, jobs: Sequence[_Job], progress: Progress) -> list[Outcome]:
    outcomes = []
    for number, job in enumerate(jobs):
        outcomes.append(simulator.outcome(job, partial(_beyond, progress, number, len(jobs))))
        progress(number + 1, len(jobs))
    return outcomes


def _beyond(progress: Progress, done: int, total: int, portion: float) -> None:
    progress(done + portion, total)


# --- on several processes ---

_POLL_SECS = 0.2
_worker: tuple[Simulator, Any]
"""State of a worker process: its simulator, and the portions of all jobs, which it shares with its parent."""


def _spread(jobs: Sequence[_Job], workers: int, progress: Progress) -> list[Outcome]:
    # Spawned, not forked: torch and numpy may run threads by now.
    context = multiprocessing.get_context("spawn")
    portions = context.Array("d", len(jobs), lock=False)
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, _begin, (portions,))
    try:
        futures = [pool.submit(_work, number, job) for number, job in enumerate(jobs)]
        return _gathered(futures, lambda: progress(fsum(portions), len(jobs)))
    except BrokenProcessPool as error:
        raise ConfigError(
            f"--workers {workers}: a worker was killed, perhaps because memory ran out; use fewer workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _gathered(futures: Sequence[Future[Outcome | str]], tick: Callable[[], None]) -> list[Outcome]:
    """The outcomes in order of the jobs. The first error stops waiting and is raised."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, _POLL_SECS)
        tick()
        for one in done:
            if isinstance(message := one.result(), str):
                raise ConfigError(message)
    return [outcome for one in futures if isinstance(outcome := one.result(), Outcome)]


def _begin(portions: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all processes; the parent reports it
    _worker = Simulator(), portions


def _work(number: int, job: _Job) -> Outcome | str:
    """The outcome, or the message of an error, since not every error can be sent through a pipe."""
    simulator, portions = _worker

    def tell(portion: float) -> None:
        portions[number] = portion

    try:
        outcome = simulator.outcome(job, tell)
    except MoECheckpointError as error:
        return str(error)
    tell(1.0)
    return outcome
