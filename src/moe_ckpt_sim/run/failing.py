"""Failures: which ranks roll back, from which copy, and for how long; further failures during a recovery."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import inf

import numpy as np

from moe_ckpt.core.step import Tier
from moe_ckpt.core.window import Window
from moe_ckpt.localized.segments import Segment, segments
from moe_ckpt.recovery.recovery_plan import first_choice
from moe_ckpt_sim.cluster.clock import on_clock
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.cluster.surviving import Survivors
from moe_ckpt_sim.failures.failures import FailureEvent
from moe_ckpt_sim.run.durable import Durable
from moe_ckpt_sim.run.recovery import Copies, Recoveries, Repair, host_nodes
from moe_ckpt_sim.run.state import SimulatedState

FUTILE_FAILURES = 100
"""Failures in a row without a completed recovery, or without a lasting iteration, after which a run is given up."""


class SpareNodes:
    """Nodes that wait to replace a dead one.

    Args:
        count: Spares at the start; None: there is always one.
        repair_secs: Time until a dead node is a spare again; None for never.
        joins: Other spares may be added later.
    """

    def __init__(self, count: int | None, repair_secs: float | None, joins: bool = False) -> None:
        self._count, self.joins = count, joins
        self._repair_secs = None if repair_secs is None else on_clock(repair_secs)
        self._coming: list[float] = []
        self._dead: deque[int] = deque()

    def add(self, at_secs: float) -> None:
        """Add a spare from that time on."""
        heapq.heappush(self._coming, at_secs)

    def replace(self, nodes: Iterable[int], now: float) -> float:
        """Returns when all dead nodes, and ``nodes`` that die now, are replaced; ``inf`` if never.

        A node that died before and was not replaced yet does not die again.
        """
        if self._count is None:
            return now
        self._arrive(now)
        fresh = [node for node in nodes if node not in self._dead]
        self._dead.extend(fresh)
        if self._repair_secs is not None:
            for _ in fresh:
                self.add(now + self._repair_secs)
        self._arrive(now)
        if not self._dead:
            return now
        return sorted(self._coming)[len(self._dead) - 1] if len(self._coming) >= len(self._dead) else inf

    def _arrive(self, now: float) -> None:
        """Replace dead nodes, the first to die first, by spares that are available now."""
        if self._count is None:
            return
        while self._coming and self._coming[0] <= now:
            heapq.heappop(self._coming)
            self._count += 1
        while self._count and self._dead:
            self._count -= 1
            self._dead.popleft()


@dataclass(frozen=True)
class _Failure:
    """One failure: everything that fails at one moment.

    nodes: lost nodes, with their memory. restarted: nodes that stay, but whose processes end.
    """

    at_secs: float
    nodes: tuple[int, ...]
    restarted: tuple[int, ...] = ()


def _failures(events: Iterator[FailureEvent], spares: SpareNodes) -> Iterator[_Failure]:
    """Yield failures. Nodes that join before the next one become spares."""
    for at, together in groupby(events, key=lambda event: on_clock(event.at_secs)):
        nodes, restarted = list[int](), list[int]()
        for event in together:
            if event.joins:
                spares.add(at)
            else:
                (restarted if event.process else nodes).append(event.node)
        if nodes or restarted:
            yield _Failure(at, tuple(nodes), tuple(restarted))


@dataclass(frozen=True)
class _Attempt:
    """One recovery of some neighbouring stages, or of all.

    start: time of the failure. phases: (field of ``BookedSecs``, seconds), one after the other. again: rank-iterations
        that it computes a second time, those that a failure undid included.
    """

    segment: Segment
    start: float
    phases: tuple[tuple[str, float], ...]
    again: int = 0

    @property
    def end(self) -> float:
        return self.start + sum(secs for _, secs in self.phases)

    def spend(self, state: SimulatedState, start: float, stop: float) -> None:
        """Book the part of the recovery between two moments."""
        at = self.start
        for name, secs in self.phases:
            part = min(at + secs, stop) - max(at, start)
            if part > 0:
                setattr(state.secs, name, getattr(state.secs, name) + part)
            at += secs


class Failing:
    """Brings a run back after each failure.

    stranded: a dead node is never replaced. hopeless: one recovery was started again ``FUTILE_FAILURES`` times.
    """

    def __init__(
        self, costs: Costs, recoveries: Recoveries, events: Iterator[FailureEvent], spares: SpareNodes
    ) -> None:
        self._costs, self._recoveries, self._spares = costs, recoveries, spares
        self._layout, self._host_nodes = costs.layout, host_nodes(costs.layout)
        self._copies = Copies(costs.layout, costs.system.replicas if costs.system.durable == "peers" else 0)
        self._survivors = Survivors(costs.layout, seal=costs.system.seals)
        self._upcoming = _failures(events, spares)
        self._next = next(self._upcoming, None)
        self.fallbacks = 0
        self.recovered = dict.fromkeys(Tier, 0)
        """Number of recoveries by the farthest tier that a rank loaded from."""
        self.steps_again = 0
        """Rank-iterations that are computed a second time, of recoveries that ended."""
        self.stranded = self.hopeless = False

    @property
    def next_secs(self) -> float:
        """Time of the next failure; ``inf`` if there is none."""
        return self._next.at_secs if self._next else inf

    def recover(self, state: SimulatedState, until: float) -> None:
        """Recover from the failure at ``state.now``, and from those before it is repaired, up to ``until``."""
        attempts, local, begun = list[_Attempt](), self._costs.system.rollback == "localized", 0
        dead, seals = set[int](), self._costs.system.seals and state.step > 0
        # Ranks that complete an update alone seal the next step, of which dead ranks have nothing.
        sealed = state.track.sealed(state.step) if seals and not state.lost_memory.in_update else None
        while (failure := self._next) is not None and not self.hopeless:
            self._next = next(self._upcoming, None)
            state.failures += 1
            begun += 1
            state.lost_memory.nodes.update(failure.nodes)
            state.lost_memory.holders.update(failure.nodes)
            if self._costs.system.durable == "storage":  # host memory is private to the processes then
                state.lost_memory.nodes.update(failure.restarted)
            ready = self._ready(failure, seal=seals and not dead)
            dead |= self._survivors.dead(failure.nodes, failure.restarted)
            if failure.nodes or not self._survivors.have_everything(dead):
                sealed = None
            source, tier = self._source(state, sealed)
            local = local and source is not None and tier is not Tier.STORAGE and self._logged(state, source)
            if local and source is not None and source.window is not None:
                attempts = self._local(attempts, state, source, source.window, tier, failure, ready)
            else:
                attempts = [self._whole(state, source, tier, failure, ready)]
            longest = max(attempts, key=lambda one: one.end)
            waits = longest.end == inf
            disturbed = inf if waits and not self._spares.joins else self.next_secs
            stop = min(longest.end, disturbed, until)
            longest.spend(state, state.now, stop)
            state.now = stop
            if disturbed >= min(longest.end, until):
                self.stranded = waits
                break
            begun = 0 if waits else begun
            self.hopeless = begun >= FUTILE_FAILURES
        source, tier = self._source(state, sealed)
        self.recovered[tier] += source is not None
        self.steps_again += sum(one.again for one in attempts)
        if local:
            state.track.drop()
        elif sealed is not None:
            state.track.fail(sealed, self._survivors.experts(()))
        else:
            self._go_back(state, source, tier, dead)

    def _ready(self, failure: _Failure, *, seal: bool) -> tuple[tuple[str, float], ...]:
        """The phases from a failure to ranks that can load: detection, spares, sealing by survivors, restart.

        seal: the failure stopped training; during a recovery there is nothing to seal.
        """
        cluster = self._layout.cluster
        detect_secs = on_clock(cluster.detect_secs)
        noticed = failure.at_secs + detect_secs
        replaced = self._spares.replace(failure.nodes, noticed)
        restart_secs = cluster.restart_secs
        if cluster.in_place_secs is not None and replaced == noticed:
            restart_secs = cluster.in_place_secs
        sealing_secs = self._costs.copy_secs(self._costs.bytes_of.dense) if seal else 0.0
        return ("down", detect_secs), ("idle", replaced - noticed), ("down", on_clock(restart_secs + sealing_secs))

    def _source(self, state: SimulatedState, sealed: Durable | None) -> tuple[Durable | None, Tier]:
        """The checkpoint to go back to, and the farthest tier that a rank loads from: own memory, a peer's, storage.

        sealed: the newest step, if survivors have sealed all of it.
        """
        if sealed is not None:
            return sealed, Tier.HOST
        best = first_choice(self._surviving(state), lambda one: one[0].step)
        return (None, Tier.STORAGE) if best is None else best

    def _surviving(self, state: SimulatedState) -> Iterator[tuple[Durable, Tier]]:
        """Yield the checkpoints that survived, of the nearest tier first."""
        track, lost = state.track, state.lost_memory
        if self._costs.system.durable == "storage":
            stored = track.newest
        else:
            stored = track.backup.durable
            if track.newest is not None and not (lost.is_empty or lost.nodes):
                yield track.newest, Tier.HOST
            if track.copied is not None and not (lost.is_empty or self._copies.lost(lost.holders)):
                yield track.copied, Tier.PEER
        if stored is not None:
            yield stored, Tier.STORAGE

    def _logged(self, state: SimulatedState, source: Durable) -> bool:
        """Returns whether upstream logs reach back far enough for a stage to recover alone."""
        if source.window is None:
            return False
        return self._costs.log.reaches(self._recoveries.logged_steps(source.window, state.step - source.step))

    def _whole(
        self,
        state: SimulatedState,
        source: Durable | None,
        tier: Tier,
        failure: _Failure,
        ready: tuple[tuple[str, float], ...],
    ) -> _Attempt:
        """The recovery of all ranks; without a checkpoint they start from scratch at once."""
        repair = Repair(0.0, 0.0)
        if source is not None and source.anchored_at is not None and tier is not Tier.STORAGE:
            repair = self._recoveries.logged(source.step - source.anchored_at, tier)
        elif source is not None:
            repair = self._recoveries.whole(source.window, state.counts, tier)
        undone = state.step - (0 if source is None else source.step)
        replayed = 0 if source is None or source.window is None else source.window.size - 1
        again = (undone + replayed) * self._layout.parallel.ranks
        return _attempt(Segment(0, self._layout.parallel.pp - 1), failure.at_secs, ready, repair, again)

    def _local(
        self,
        attempts: list[_Attempt],
        state: SimulatedState,
        source: Durable,
        window: Window,
        tier: Tier,
        failure: _Failure,
        ready: tuple[tuple[str, float], ...],
    ) -> list[_Attempt]:
        """The recoveries under way, with those of the stages of ``failure`` added.

        Neighbours start again together, others continue separately (MoEvement, appendix A).
        """
        at, steps = failure.at_secs, state.step - source.step
        hit = (*failure.nodes, *failure.restarted)
        for failed in segments(stage for node in hit for stage in self._layout.stages_of(node)):
            joined = [one for one in attempts if one.end > at and one.segment.touches(failed)]
            segment = failed.joined(one.segment for one in joined)
            stages = segment.last - segment.first + 1
            repair = self._recoveries.local(window, state.counts, steps, stages, tier)
            alone = self._recoveries.logged_steps(window, steps)
            again = alone * stages * self._layout.parallel.stage_ranks
            apart = [one for one in attempts if one not in joined]
            attempts = [*apart, _attempt(segment, at, ready, repair, again)]
        return attempts

    def _go_back(self, state: SimulatedState, source: Durable | None, tier: Tier, dead: Collection[int]) -> None:
        """Roll all ranks back to ``source``, or to the beginning if it is None."""
        in_memory = tier is not Tier.STORAGE
        if source is not state.track.newest and tier is Tier.STORAGE:
            self.fallbacks += 1
        if not in_memory and self._costs.system.durable != "storage":
            state.lost_memory.nodes.clear()
            state.lost_memory.holders.clear()
            state.lost_memory.is_empty = True
        step = 0 if source is None else source.step
        again, state.step = state.step - step, step
        state.secs.lost += again * self._costs.iteration.secs
        # A process's checkpoints in memory survive if its node does (two-level PEC).
        gone = np.isin(self._host_nodes, list(state.lost_memory.nodes)).any(axis=2)
        has_memory = in_memory or self._costs.system.durable == "storage"
        # If survivors sealed the same step, their experts are taken.
        is_same = in_memory and not again and not state.lost_memory.in_update
        sealed = self._survivors.experts(dead) if is_same else None
        state.track.fail(source, np.logical_not(gone) if has_memory else None, sealed)


def _attempt(segment: Segment, at: float, ready: tuple[tuple[str, float], ...], repair: Repair, again: int) -> _Attempt:
    loading, computing = on_clock(repair.retrieve), on_clock(repair.replay)
    return _Attempt(segment, at, (*ready, ("retrieve", loading), ("replay", computing)), again)
