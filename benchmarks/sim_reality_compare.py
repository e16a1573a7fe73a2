"""One real run beside simulations of it: where the time of both went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

import numpy as np

from benchmarks.sim_reality_runs import NODE_EVERY, Contestant, RealRun
from moe_ckpt.recovery.reader import open_step
from moe_ckpt.sim.failures import Event, Failures, Poisson
from moe_ckpt.sim.profile import RunProfile, read_profile, scenario_from
from moe_ckpt.sim.run import simulate
from moe_ckpt.sim.scenario import Outcome
from moe_ckpt.sim.system import System
from moe_ckpt.sim.traces import Trace

NEARBY_SECS = 2.0
SEEDS = 40
"""Of the simulations with other failures."""


@dataclass(frozen=True)
class Told:
    """One side. Seconds of the whole run. steps: part of the state at the end.

    lost: iterations that failures undid, and parts of iterations.
    down: from a kill to an iteration of usual length; loading and computing again are in it.
    slowed: what remains: iterations waited for checkpoints, or took longer than one without.
    """

    steps: int
    ettr: float
    lost: float
    down: float
    slowed: float
    snapshot_bytes: float
    plt: float


@dataclass(frozen=True)
class Comparison:
    """iteration_secs: as simulated. stall_secs: measured waits, part of ``slowed``. restarts: seconds of each.
    nearby: ETTR of simulations in which each kill comes up to ``NEARBY_SECS`` sooner or later, in order: where between
        two checkpoints a kill falls is luck, and this is how much of it there is.
    spread: ETTR of simulations with other failures of the same mean, in order; none where a restart takes longer than
        that on this machine, for such a run would never advance.
    """

    name: str
    title: str
    secs: float
    kills: tuple[float, ...]
    restarts: tuple[float, ...]
    iteration_secs: float
    stall_secs: float
    real: Told
    simulated: Told
    nearby: tuple[float, ...]
    spread: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Of the simulated ETTR, relative to the measured one."""
        return self.simulated.ettr / self.real.ettr - 1

    @property
    def parts(self) -> dict[str, float]:
        """What ``difference`` is made of, without a rest: time that the simulation has less of is time to train."""
        useful = self.real.ettr * self.secs
        return {
            name: (getattr(self.real, name) - getattr(self.simulated, name)) / useful
            for name in ("down", "lost", "slowed")
        }


def compare(contestant: Contestant, real: RealRun, clean_secs: float, mtbf_secs: float) -> Comparison:
    """clean_secs: length of an iteration without checkpoints and failures, for the ETTR of both sides."""
    profile = read_profile(real.profile_path)
    same = simulated(contestant, profile, real, _trace(real))
    moved = [simulated(contestant, profile, real, _trace(real, seed)) for seed in range(1, SEEDS + 1)]
    seeds = range(1, SEEDS + 1) if mtbf_secs > (profile.restarts.set_up_secs or 0.0) + _handover_secs(real) else ()
    share = (1 - 1 / NODE_EVERY if contestant.loses_nodes else 1.0) if contestant.memory else 0.0
    drawn = Poisson(mtbf_secs, process_share=share)
    others = [simulated(contestant, profile, real, drawn, seed) for seed in seeds]
    return Comparison(
        name=contestant.name,
        title=contestant.title,
        secs=real.secs,
        kills=real.kills,
        restarts=tuple(_downs(real, 0.0)),
        iteration_secs=same.iteration_secs,
        stall_secs=real.stall_secs,
        real=measured(real, clean_secs),
        simulated=_of(same, real.secs, clean_secs),
        nearby=_ettrs(moved, real.secs, clean_secs),
        spread=_ettrs(others, real.secs, clean_secs),
    )


def simulated(contestant: Contestant, profile: RunProfile, real: RealRun, failures: Failures, seed: int = 0) -> Outcome:
    """The run as the library's policy and the run's own profile have it.

    A profile does not know when a process was killed. That the parent needs some milliseconds to start the next one
    is measured here.
    """
    cluster = profile.cluster(detect_secs=_handover_secs(real))
    system = System(contestant.title, contestant.policy, when_busy="skip", **contestant.memory)
    return simulate(scenario_from(profile, failures, system, real.secs, seed, cluster=cluster))


def _ettrs(outcomes: Iterable[Outcome], secs: float, clean_secs: float) -> tuple[float, ...]:
    return tuple(sorted(one.steps * clean_secs / secs for one in outcomes))


def _trace(real: RealRun, seed: int | None = None) -> Trace:
    """The only node dies, and is there again, or only its process does. seed: moves each kill by ``NEARBY_SECS``."""
    kills = real.kills
    if seed is not None:
        rng = np.random.Generator(np.random.PCG64(seed))
        kills = tuple(sorted(max(0.0, at + NEARBY_SECS * (2 * rng.random() - 1)) for at in kills))
    found: list[Event] = []
    for at, node in zip(kills, real.took_node, strict=True):
        found += [Event(at, 0), Event(at, 0, joins=True)] if node else [Event(at, 0, process=True)]
    return Trace(given=tuple(found))


def _handover_secs(real: RealRun) -> float:
    return mean(later.spawned - earlier.killed for earlier, later in pairwise(real.lives)) if real.kills else 0.0


def measured(real: RealRun, clean_secs: float) -> Told:
    """From diary and store."""
    steps, down, lost = final_step(real) - 1, sum(_downs(real, clean_secs)), _lost_secs(real, clean_secs)
    useful = steps * clean_secs
    slowed = real.secs - useful - lost - down
    return Told(steps, useful / real.secs, lost, down, slowed, real.snapshot_bytes, real.plt)


def final_step(real: RealRun) -> int:
    """Steps of the state at the end: the last that was done, or, in a restart, what it would have come back to."""
    done = real.lives[-1].steps
    return done[-1][0] if done else open_step(real.directory / "checkpoints")[1].step


def _downs(real: RealRun, clean_secs: float) -> Iterable[float]:
    """From each kill to the next life's first step, less ``clean_secs`` for that step; or to the next kill."""
    for earlier, later in pairwise(real.lives):
        first = min(later.steps[0][1] - clean_secs, later.killed) if later.steps else later.killed
        yield max(0.0, first - earlier.killed)


def _lost_secs(real: RealRun, clean_secs: float) -> float:
    """Iterations that a later life did again, and what a life had of an iteration when it was killed."""
    undone, parts, reached = 0, 0.0, 0
    for life in real.lives:
        if life.steps:
            undone += max(0, reached - (life.steps[0][0] - 1))
            parts += min(life.killed - life.steps[-1][1], clean_secs)
            reached = life.steps[-1][0]
    if not real.lives[-1].steps:
        undone += max(0, reached - final_step(real))
    return undone * clean_secs + parts


def _of(outcome: Outcome, secs: float, clean_secs: float) -> Told:
    """In the same terms as what was measured: an iteration counts ``clean_secs``."""
    spent, one = outcome.spent, outcome.iteration_secs
    useful = outcome.steps * clean_secs
    lost = spent.lost * clean_secs / one
    down = spent.down + spent.idle + spent.retrieve + spent.replay
    iterated = outcome.steps + spent.lost / one
    return Told(
        steps=outcome.steps,
        ettr=useful / secs,
        lost=lost,
        down=down,
        slowed=secs - useful - lost - down,
        snapshot_bytes=outcome.total_bytes_per_step * iterated,
        plt=outcome.plt,
    )
