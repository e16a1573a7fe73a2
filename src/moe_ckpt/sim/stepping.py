"""Training between failures: iterations, snapshots and stalls, with the policy asked as a trainer would ask it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import xxhash

from moe_ckpt.core.plan import SnapshotPlan, Tier
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import Window
from moe_ckpt.policies.base import PolicyContext, next_due, uses_windows
from moe_ckpt.sim.costs import Costs, Snapshot
from moe_ckpt.sim.load import ExpertLoad, tokens_of
from moe_ckpt.sim.track import Track

_WINDOWS_KEPT = 64


@dataclass
class State:
    """Where a simulated run is. Seconds since its start.

    step: optimizer steps done, less what failures undid. counts: ``[L, E]`` tokens routed by one of them.
    stall, lost, down, idle, retrieve, replay: as ``scenario.Spent``.
    rank_bytes, total_bytes: of all snapshots that began, on the rank that had most, and on all. heaviest_bytes: of one
        snapshot, on one rank.
    """

    track: Track
    counts: Counts
    now: float = 0.0
    step: int = 0
    stall: float = 0.0
    lost: float = 0.0
    down: float = 0.0
    idle: float = 0.0
    retrieve: float = 0.0
    replay: float = 0.0
    plans: int = 0
    reorders: int = 0
    interval: int | None = None
    k: int | None = None
    window: Window | None = None
    saved_bytes: int = 0
    rank_bytes: float = 0.0
    total_bytes: float = 0.0
    heaviest_bytes: int = 0
    failed_nodes: set[int] = field(default_factory=set)
    """Since something last became durable: what they held for others is not there again before."""


class Stepper:
    """Trains a run from one failure to the next."""

    def __init__(self, costs: Costs, load: ExpertLoad, assignments: int, rng: np.random.Generator) -> None:
        self._costs, self._system = costs, costs.system
        self._policy = costs.system.policy
        self._catalog = costs.layout.model.catalog
        self._load, self._assignments, self._rng = load, assignments, rng
        layers = len(self._catalog.layers)
        self._shares = load.draw(rng, layers, self._catalog.layers[0].experts)
        self._drift_at = load.drift_secs if load.drift and load.skewness else inf
        self._backup_at = self._next_backup(0.0)
        self._rounds: dict[bytes, tuple[float, ...]] = {}
        self._windows: dict[bytes, Window] = {}
        self._budgeted = getattr(self._policy, "plt_budget", None) is not None
        self.state = State(Track(self._catalog), tokens_of(self._shares, assignments))

    # --- between failures ---

    def train(self, until: float) -> None:
        """Train to that very moment; the iteration that it interrupts is lost."""
        state = self.state
        while state.now < until:
            self._housekeeping()
            if self._repeat(until):
                continue
            self._round(until)
        state.track.settle(state.now)

    def interrupted(self) -> None:
        """A failure: what was regular is no more."""
        self._rounds.clear()

    def _housekeeping(self) -> None:
        """What is looked at between rounds only."""
        state = self.state
        before = state.track.newest
        state.track.settle(state.now)
        if state.track.newest is not before:
            state.failed_nodes.clear()
        if state.now >= self._drift_at:
            self._shares = self._load.drifted(self._rng, self._shares)
            state.counts = tokens_of(self._shares, self._assignments)
            self._drift_at += self._load.drift_secs * (1 + (state.now - self._drift_at) // self._load.drift_secs)
            self._rounds.clear()
        if state.now >= self._backup_at:
            state.track.back_up()
            self._backup_at = self._next_backup(state.now)
            self._rounds.clear()

    def _next_backup(self, now: float) -> float:
        every = self._system.backup_every_secs
        return inf if every is None or self._system.durable == "storage" else now + max(every, self._costs.backup_secs)

    # --- what repeats ---

    def _repeat(self, until: float) -> bool:
        """Move ahead by whole rounds if the run is where it was a round ago; True if it did."""
        state = self.state
        pattern = _digest(*state.track.pattern(state.step, state.now))
        here = (state.step, state.now, state.stall, state.track.books.index, state.rank_bytes, state.total_bytes)
        before = self._rounds.get(pattern)
        self._rounds[pattern] = here
        if before is None:
            return False
        steps, secs, stall, begun, rank_bytes, total_bytes = (new - old for new, old in zip(here, before, strict=True))
        # One round before each event is stepped through, so that what is under way then is as it would be.
        rounds = int((min(until, self._drift_at, self._backup_at) - state.now) / secs) - 1
        if self._budgeted:  # what may be lost, and with it K, grows with the tokens routed
            rounds = min(rounds, state.step // (8 * int(steps)))
        if rounds < 1:
            return False
        state.track.move(int(steps) * rounds, secs * rounds, int(begun) * rounds, state.counts)
        state.step += int(steps) * rounds
        state.now += secs * rounds
        state.stall += stall * rounds
        state.rank_bytes += rank_bytes * rounds
        state.total_bytes += total_bytes * rounds
        self._rounds.clear()
        return True

    # --- one decision of the policy, and the iterations up to the next ---

    def _round(self, until: float) -> None:
        state = self.state
        context = self._context()
        due = next_due(self._policy, context)
        if due > state.step:
            self._iterate(due - state.step, until)
            return
        if uses_windows(self._policy):
            window = self._window_of(context)
            if window is None:
                self._iterate(1, until)
            else:
                self._train_window(window, until)
            return
        plan = self._policy.plan(context)
        state.plans += 1
        if not plan or not self._admitted(until):
            self._iterate(1, until)
            return
        self._begin(plan)
        self._iterate(1, until, self._copy_secs, wait=plan.wait)

    def _context(self) -> PolicyContext:
        state = self.state
        ranks = self._costs.layout.parallel.ranks
        known = state.track.books.context(state.step, ranks, state.counts, self._costs.measured)
        return replace(known, placement=self._costs.layout.placement, sizes=self._costs.sizes)

    def _admitted(self, until: float) -> bool:
        """Whether a buffer is free, now or after a wait."""
        state = self.state
        waiting = state.track.under_way
        if len(waiting) < self._system.max_in_flight:
            return True
        if self._system.when_busy == "skip":
            return False
        free = waiting[len(waiting) - self._system.max_in_flight].ready_secs
        self._wait(free, until)
        state.track.settle(state.now)
        return state.now < until

    def _wait(self, moment: float, until: float) -> None:
        state = self.state
        moment = min(max(moment, state.now), until)
        state.stall += moment - state.now
        state.now = moment

    def _begin(self, plan: SnapshotPlan) -> None:
        state, snapshot = self.state, self._costs.of_plan(plan)
        last = state.track.books.last_step
        state.interval = state.step - (last or 0) if last is not None or state.step else None
        ready = self._ready_secs(state.now, snapshot)
        state.track.begin(state.step, plan.operators(), plan.operators(Tier.HOST), ready, None)
        state.k, state.saved_bytes = plan.k, snapshot.total
        self._copy_secs = self._costs.copy_secs(snapshot)

    def _ready_secs(self, now: float, snapshot: Snapshot) -> float:
        """When a snapshot that begins now is durable; one after the other is moved."""
        state, track = self.state, self.state.track
        state.rank_bytes += snapshot.rank
        state.total_bytes += snapshot.total
        state.heaviest_bytes = max(state.heaviest_bytes, snapshot.rank)
        copied = now + self._costs.copy_secs(snapshot)
        track.mover_free_secs = max(copied, track.mover_free_secs) + self._costs.move_secs(snapshot)
        return track.mover_free_secs

    def _iterate(self, steps: int, until: float, copy_secs: float = 0.0, wait: bool = False) -> None:
        """``steps`` iterations, the first beside a copy. wait: it begins when that is durable."""
        state = self.state
        if wait:
            self._wait(state.track.under_way[-1].ready_secs, until)
            copy_secs = 0.0
        iteration = self._costs.iteration
        first = iteration.secs + max(0.0, copy_secs - iteration.open_secs)
        done = min(steps, 1 + int((until - state.now - first) / iteration.secs)) if state.now + first <= until else 0
        state.track.books.routed_often(state.counts, done)
        state.step += done
        if done:
            state.now += first + (done - 1) * iteration.secs
            state.stall += first - iteration.secs
        if done < steps:
            state.lost += until - state.now
            state.now = until

    # --- sparse windows ---

    def _window_of(self, context: PolicyContext) -> Window | None:
        """The window that begins here, if any. The policy is asked once for each pattern of what it goes by."""
        state = self.state
        hard, counts = context.activity.hard, context.activity.decayed
        steps = hard.sum() // max(1, int(counts.sum()))
        # The order goes by shares: a load that was the same all the time gives the same one, however long it was.
        activity = b"" if (hard == counts * steps).all() else hard.tobytes()
        before = None if context.window is None else hash(context.window.slots)
        first = (context.step == 0, context.last_step is None, steps == 0)
        key = _digest(activity, counts.tobytes(), before, first)
        window = self._windows.get(key)
        if window is None:
            window = self._policy.plan(context).window
            state.plans += 1
            if window is None:  # it waits for measurements that a trainer would not have yet
                return None
            if len(self._windows) >= _WINDOWS_KEPT:
                self._windows.pop(next(iter(self._windows)))
            self._windows[key] = window
        if state.window is not None and window.size > 1 and state.window.order != window.order:
            state.reorders += 1
        state.window = window = replace(window, start=context.step)
        return window

    def _train_window(self, window: Window, until: float) -> None:
        """One iteration after the other, each beside the copy of one slot."""
        state, snapshots = self.state, self._costs.of_window(window)
        state.saved_bytes = max(snapshot.total for snapshot in snapshots)
        state.track.books.window_begins()
        moving: deque[float] = deque(one.ready_secs for one in state.track.under_way)
        for slot, snapshot in enumerate(snapshots):
            while moving and moving[0] <= state.now:
                moving.popleft()
            if len(moving) >= self._system.max_in_flight:
                if slot == 0 and self._system.when_busy == "skip":  # a window that has begun is gone on with
                    self._iterate(1, until)
                    return
                self._wait(moving[len(moving) - self._system.max_in_flight], until)
            if state.now >= until:
                return
            ready = self._ready_secs(state.now, snapshot)
            moving.append(ready)
            if slot + 1 == window.size:
                state.track.begin(state.step, window.order, (), ready, window)
            done = state.step
            self._iterate(1, until, self._costs.copy_secs(snapshot))
            if state.step == done:
                return


def _digest(*parts: object) -> bytes:
    found = xxhash.xxh3_128()
    for part in parts:
        found.update(part if isinstance(part, bytes) else repr(part).encode())
    return found.digest()
