"""One real run beside simulations of it: where the time of both went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean

import numpy as np

from benchmarks.sim_reality_contestants import Contestant
from benchmarks.sim_reality_runs import NODE_EVERY, RealRun
from moe_ckpt.reading.reader import open_step
from moe_ckpt_sim.cluster.cluster import Cluster
from moe_ckpt_sim.failures.failures import FailureEvent, Failures, Poisson
from moe_ckpt_sim.failures.traces import Trace
from moe_ckpt_sim.planner.lives import Restarts
from moe_ckpt_sim.planner.profile import RunProfile, read_profile, scenario_from
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.scenario import Outcome, Scenario
from moe_ckpt_sim.run.system import System
from moe_ckpt_sim.workload.iteration import Timing, boundary_bytes, pipeline_slots
from moe_ckpt_sim.workload.model import LayerShape

NEARBY_SECS = 2.0
SEEDS = 40
"""Of the simulations with other failures."""


@dataclass(frozen=True)
class Told:
    """One side. Seconds of the whole run. steps: part of the state at the end.

    lost: iterations that failures undid, and parts of iterations.
    down: from a kill to an iteration of usual length; loading and computing again are in it.
    slowed: what remains: iterations waited for checkpoints, or took longer than one without.
    again: rank-iterations that were computed a second time.
    logged, log_held, brought: bytes of an upstream log, as in ``RealRun``.
    """

    steps: int
    ettr: float
    lost: float
    down: float
    slowed: float
    snapshot_bytes: float
    plt: float
    again: int
    logged: float = 0.0
    log_held: float = 0.0
    brought: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """clean_secs: of an iteration without checkpoints and failures. iteration_secs: as simulated. stall_secs: measured
        waits, part of ``slowed``. restarts: seconds of each.
    nearby: ETTR of simulations in which each kill comes up to ``NEARBY_SECS`` sooner or later, in order: where between
        two checkpoints a kill falls is luck, and this is how much of it there is.
    spread: ETTR of simulations with other failures of the same mean, in order; none where a restart takes longer than
        that on this machine, for such a run would never advance.
    anew: ETTR of the same failures, simulated with new processes after each; None where there are new ones anyway.
    """

    name: str
    title: str
    secs: float
    kills: tuple[float, ...]
    clean_secs: float
    restarts: tuple[float, ...]
    iteration_secs: float
    stall_secs: float
    real: Told
    simulated: Told
    nearby: tuple[float, ...]
    spread: tuple[float, ...]
    anew: float | None = None

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
    same = simulated(contestant, profile, real, trace(contestant, real))
    moved = [simulated(contestant, profile, real, trace(contestant, real, seed)) for seed in range(1, SEEDS + 1)]
    cluster = cluster_of(contestant, profile, real)
    down_secs = cluster.detect_secs + max(cluster.restart_secs, cluster.in_place_secs or 0.0)
    seeds = range(1, SEEDS + 1) if mtbf_secs > down_secs else ()
    share = (1 - 1 / NODE_EVERY if contestant.loses_nodes else 1.0) if contestant.memory else 0.0
    drawn = Poisson(mtbf_secs, process_share=share)
    others = [simulated(contestant, profile, real, drawn, seed) for seed in seeds]
    return Comparison(
        name=contestant.name,
        title=contestant.title,
        secs=real.secs,
        kills=real.kills,
        clean_secs=clean_secs,
        restarts=tuple(_downs(real, 0.0)),
        iteration_secs=same.iteration_secs,
        stall_secs=real.stall_secs,
        real=measured(real, clean_secs),
        simulated=_of(same, real.secs, clean_secs),
        nearby=_ettrs(moved, real.secs, clean_secs),
        spread=_ettrs(others, real.secs, clean_secs),
        anew=_anew(contestant, profile, real, clean_secs) if contestant.in_place else None,
    )


def _anew(contestant: Contestant, profile: RunProfile, real: RealRun, clean_secs: float) -> float:
    cluster = replace(cluster_of(contestant, profile, real), in_place_secs=None)
    result = simulated(contestant, profile, real, trace(contestant, real), cluster=cluster)
    return result.steps * clean_secs / real.secs


def simulated(
    contestant: Contestant,
    profile: RunProfile,
    real: RealRun,
    failures: Failures,
    seed: int = 0,
    cluster: Cluster | None = None,
) -> Outcome:
    """The run as the library's policy and the run's own profile have it. cluster: None for the run's own."""
    settings = {"when_busy": "skip" if contestant.loop is None else "wait", **contestant.memory}
    system = System(contestant.title, contestant.policy, **settings)
    cluster = cluster or cluster_of(contestant, profile, real)
    scenario = scenario_from(profile, failures, system, real.secs, seed, cluster=cluster)
    return simulate(piped(scenario, contestant))


def cluster_of(contestant: Contestant, profile: RunProfile, real: RealRun) -> Cluster:
    """The machine as the profile has it, and what that does not know: the time from a kill to the start of the next
    life, which is measured here, and which ranks are one node.

    In place, the first life tells what a start of all processes takes, and the others what those that stay need.
    """
    known: dict[str, float] = {"detect_secs": _handover_secs(real)}
    if contestant.nodes > 1:
        known |= {"nodes": contestant.nodes, "gpus_per_node": contestant.ranks // contestant.nodes}
    if contestant.in_place:  # a life ends when its state is sealed and its groups are gone
        begun = (life.started_unix_secs - real.began_unix_secs for life in profile.lives[1:])
        known["detect_secs"] = mean(max(0.0, at - kill) for at, kill in zip(begun, real.kills, strict=True))
        known["restart_secs"] = Restarts(profile.lives[:1], profile.pace).set_up_secs or 0.0
        known["in_place_secs"] = profile.restarts.set_up_secs or 0.0
    return profile.cluster(**known)


def piped(scenario: Scenario, contestant: Contestant) -> Scenario:
    """A profile does not know micro-batches, nor widths: how long a pipeline stage takes alone, without the pipeline's
    bubbles, and what crosses a boundary between stages. Its sequences are of one token."""
    loop = contestant.loop
    if loop is None or loop.stages == 1:
        return scenario
    share = loop.microbatches / pipeline_slots(loop.stages, loop.microbatches)
    batch = replace(scenario.batch, sequences=loop.microbatches * loop.tokens, micro_sequences=loop.tokens)
    model = scenario.layout.model
    shapes = (LayerShape(model.seq, loop.width, model.seq),) * loop.stages
    layout = replace(scenario.layout, model=replace(model, shapes=shapes))
    sent = boundary_bytes(layout, batch, Timing(activation_bytes=4))  # fp32
    iteration = replace(scenario.iteration, stage_secs=share * scenario.iteration.open_secs, boundary_bytes=sent)
    return replace(scenario, batch=batch, iteration=iteration)


def _ettrs(outcomes: Iterable[Outcome], secs: float, clean_secs: float) -> tuple[float, ...]:
    return tuple(sorted(one.steps * clean_secs / secs for one in outcomes))


def trace(contestant: Contestant, real: RealRun, seed: int | None = None) -> Trace:
    """A node dies, and is there again, or only a process on it. seed: moves each kill by ``NEARBY_SECS``."""
    kills = real.kills
    if seed is not None:
        rng = np.random.Generator(np.random.PCG64(seed))
        kills = tuple(sorted(max(0.0, at + NEARBY_SECS * (2 * rng.random() - 1)) for at in kills))
    results: list[FailureEvent] = []
    for at, rank, lost in zip(kills, real.victims, real.took_node, strict=True):
        node = rank * contestant.nodes // contestant.ranks
        results += (
            [FailureEvent(at, node), FailureEvent(at, node, joins=True)]
            if lost
            else [FailureEvent(at, node, process=True)]
        )
    return Trace(recorded=tuple(results))


def _handover_secs(real: RealRun) -> float:
    return mean(later.spawned - earlier.killed for earlier, later in pairwise(real.lives)) if real.kills else 0.0


def measured(real: RealRun, clean_secs: float) -> Told:
    """From diary and store."""
    steps, down, lost = final_step(real) - 1, sum(_downs(real, clean_secs)), _lost_secs(real, clean_secs)
    useful = steps * clean_secs
    slowed = real.secs - useful - lost - down
    log = (real.logged, real.log_held, real.brought)
    return Told(steps, useful / real.secs, lost, down, slowed, real.snapshot_bytes, real.plt, real.again, *log)


def final_step(real: RealRun) -> int:
    """Steps of the state at the end: the last that was done, or, in a restart, what it came back to, or would have."""
    last = real.lives[-1]
    if last.steps:
        return last.steps[-1][0]
    return open_step(real.directory / "checkpoints")[1].step if last.from_step is None else last.from_step


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
            parts += max(0.0, min(life.killed - life.steps[-1][1], clean_secs))
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
        again=outcome.steps_again,
        logged=outcome.logged_bytes_per_step,
        log_held=outcome.log_bytes,
        brought=outcome.logged_bytes_per_step,  # as much as a rank sends on, it gets from its neighbours' logs
    )
