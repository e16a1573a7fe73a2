"""Failures: who goes back, from where, and for how long; further failures on the way."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from moe_ckpt.sim.costs import Costs
from moe_ckpt.sim.failures import Event
from moe_ckpt.sim.recovery import Recoveries, Repair, peers_lost
from moe_ckpt.sim.stepping import State
from moe_ckpt.sim.track import Durable


class Spares:
    """Nodes that wait to replace a dead one.

    count: at the start; None: there is always one. repair_secs: None where dead nodes do not come back by themselves.
    """

    def __init__(self, count: int | None, repair_secs: float | None) -> None:
        self._count, self._repair_secs = count, repair_secs
        self._coming: list[float] = []

    def add(self, at_secs: float) -> None:
        """One more, from then on."""
        heapq.heappush(self._coming, at_secs)

    def take(self, now: float) -> float:
        """When a spare is there for a node that dies at ``now``; ``inf`` if never."""
        if self._count is None:
            return now
        if self._repair_secs is not None:
            self.add(now + self._repair_secs)
        while self._coming and self._coming[0] <= now:
            heapq.heappop(self._coming)
            self._count += 1
        if self._count:
            self._count -= 1
            return now
        return heapq.heappop(self._coming) if self._coming else inf


@dataclass(frozen=True)
class _Attempt:
    """One recovery of some neighbouring stages, or of all.

    start: the failure that it answers. phases: (field of ``State``, seconds), one after the other.
    """

    first: int
    last: int
    start: float
    phases: tuple[tuple[str, float], ...]

    @property
    def end(self) -> float:
        return self.start + sum(secs for _, secs in self.phases)

    def spend(self, state: State, start: float, stop: float) -> None:
        """Book what of it lies between two moments."""
        at = self.start
        for name, secs in self.phases:
            part = min(at + secs, stop) - max(at, start)
            if part > 0:
                setattr(state, name, getattr(state, name) + part)
            at += secs

    def touches(self, first: int, last: int) -> bool:
        """Whether these stages are its own or next to them."""
        return first <= self.last + 1 and last >= self.first - 1


class Failing:
    """Brings a run back after each failure.

    ``events`` hands out what happens to nodes; those that join become spares as they pass by.
    """

    def __init__(self, costs: Costs, recoveries: Recoveries, events: Iterator[Event], spares: Spares) -> None:
        self._costs, self._recoveries, self._spares = costs, recoveries, spares
        self._layout = costs.layout
        self._events = events
        self._next: Event | None = None
        self.failures = self.fallbacks = 0
        self.stranded = False
        self._advance()

    @property
    def next_secs(self) -> float:
        """When the next failure comes; ``inf`` if none does."""
        return self._next.at_secs if self._next else inf

    def _advance(self) -> Event | None:
        """Take the next failure; nodes that join before the one after it are spares from then on."""
        taken, self._next = self._next, None
        for event in self._events:
            if not event.joins:
                self._next = event
                break
            self._spares.add(event.at_secs)
        return taken

    def recover(self, state: State, until: float) -> None:
        """The failure that comes at ``state.now``, and all that come before it is repaired, or before ``until``."""
        attempts, local = list[_Attempt](), self._costs.system.rollback == "localized"
        while (event := self._advance()) is not None:
            self.failures += 1
            state.failed_nodes.add(event.node)
            ready = self._ready(event.at_secs)
            source, from_storage = self._source(state)
            local = local and source is not None and source.window is not None and not from_storage
            if local and source is not None and source.window is not None:
                stages = self._layout.stages_of(event.node)
                attempts = self._joint(attempts, state, source, stages.start, stages.stop - 1, event.at_secs, ready)
            else:
                repair = self._recoveries.whole(
                    None if source is None else source.window, state.counts, from_storage=from_storage
                )
                attempts = [self._attempt(0, self._layout.parallel.pp - 1, event.at_secs, ready, repair)]
            longest = max(attempts, key=lambda one: one.end)
            stop = min(longest.end, self.next_secs, until)
            longest.spend(state, state.now, stop)
            state.now = stop
            if self.next_secs >= min(longest.end, until):
                break
        if local:
            state.track.drop()
        else:
            self._go_back(state)

    def _ready(self, at: float) -> tuple[tuple[str, float], ...]:
        """From a failure to ranks that can load: noticed, a spare found, restarted."""
        cluster = self._layout.cluster
        noticed = at + cluster.detect_secs
        spare = self._spares.take(noticed)
        self.stranded = self.stranded or spare == inf
        return ("down", cluster.detect_secs), ("idle", spare - noticed), ("down", cluster.restart_secs)

    def _source(self, state: State) -> tuple[Durable | None, bool]:
        """What to go back to, and whether it must come from storage though the system has peers."""
        system, newest = self._costs.system, state.track.newest
        if system.durable == "storage":
            return newest, False
        if newest is not None and not peers_lost(state.failed_nodes, self._layout.nodes, system.replicas):
            return newest, False
        return state.track.backup, True

    def _joint(
        self,
        attempts: list[_Attempt],
        state: State,
        source: Durable,
        first: int,
        last: int,
        at: float,
        ready: tuple[tuple[str, float], ...],
    ) -> list[_Attempt]:
        """The recoveries under way and that of stages ``first`` to ``last``: neighbours recover together, anew, and
        others go on by themselves (MoEvement, appendix A)."""
        apart: list[_Attempt] = []
        for one in attempts:
            if one.end > at and one.touches(first, last):
                first, last = min(first, one.first), max(last, one.last)
            else:
                apart.append(one)
        if source.window is None:
            raise RuntimeError("localized recovery without a window")
        repair = self._recoveries.local(source.window, state.counts, state.step - source.step, last - first + 1)
        return [*apart, self._attempt(first, last, at, ready, repair)]

    def _attempt(
        self, first: int, last: int, at: float, ready: tuple[tuple[str, float], ...], repair: Repair
    ) -> _Attempt:
        return _Attempt(first, last, at, (*ready, ("retrieve", repair.retrieve), ("replay", repair.replay)))

    def _go_back(self, state: State) -> None:
        """All ranks: to the newest durable checkpoint whose copies are still there, or to the very beginning."""
        source, _ = self._source(state)
        if source is not state.track.newest:
            self.fallbacks += 1
            state.failed_nodes.clear()
        step = 0 if source is None else source.step
        state.lost += (state.step - step) * self._costs.iteration.secs
        state.step = step
        state.track.fail(source)
