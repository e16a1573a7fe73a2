"""Training between failures: iterations, snapshots and stalls, with the policy called as a trainer calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

import numpy as np
import xxhash

from moe_ckpt.core.cadence import are_behind, goes_to_peers
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.window import Window
from moe_ckpt.policies.base import DECAYED, PolicyContext
from moe_ckpt_sim.cluster.clock import on_clock
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.cluster.snapshot_bytes import SnapshotSize
from moe_ckpt_sim.run.anchors import PeersLog
from moe_ckpt_sim.run.durable import When
from moe_ckpt_sim.run.flushing import Flushing
from moe_ckpt_sim.run.known_windows import KnownWindows
from moe_ckpt_sim.run.moving_ledger import MovingRunLedger
from moe_ckpt_sim.run.state import SimulatedState
from moe_ckpt_sim.run.system import System
from moe_ckpt_sim.run.track import Track
from moe_ckpt_sim.workload.load import DriftingLoad, ExpertLoad


class Stepper:
    """Trains a run from one failure to the next.

    Args:
        stepwise: Never skip several rounds at once.
    """

    def __init__(
        self, costs: Costs, load: ExpertLoad, assignments: int, rng: np.random.Generator, stepwise: bool = False
    ) -> None:
        self._costs, self._system = costs, costs.system
        self._policy = costs.system.policy
        self._catalog = costs.layout.model.catalog
        self._needs = costs.system.needs
        self._stepwise = stepwise
        self._load = DriftingLoad(load, [layer.experts for layer in self._catalog.layers], assignments, rng)
        self._rounds: dict[bytes, tuple[float, ...]] = {}
        self._windows = KnownWindows()
        self._resumed_at = 0
        self.state = SimulatedState(_empty_track(self._system, self._catalog), self._load.counts())
        self._flushing = Flushing(costs, self.state)

    # --- between failures ---

    def train(self, until: float, tick: Callable[[], None]) -> None:
        """Train up to the moment ``until``; the iteration that it interrupts is lost.

        Args:
            tick: Called when the load changes.
        """
        state = self.state
        state.lost_memory.in_update = False
        while state.now < until:
            if self._housekeeping():
                tick()
            if self._repeat(until):
                continue
            self._round(until)
        self._settle()

    def interrupted(self) -> None:
        """Restart after a failure: no rounds repeat yet, and the step returned to gets no second snapshot."""
        self._rounds.clear()
        self._resumed_at = self.state.step

    def _housekeeping(self) -> bool:
        """Settle snapshots, drift the load and begin flushes, between rounds. Returns whether the load has changed."""
        state = self.state
        self._settle()
        if drifts := self._load.drift(state.now):
            state.counts = self._load.counts()
            self._rounds.clear()
        if self._flushing.is_due:
            self._flushing.begin()
            self._rounds.clear()
        return drifts

    def _settle(self) -> None:
        durable, copied = self.state.track.resolve(self.state.now)
        if durable:
            self.state.lost_memory.nodes.clear()
            self.state.lost_memory.is_empty = False
        if copied:
            self.state.lost_memory.holders.clear()

    # --- repeated rounds ---

    def _repeat(self, until: float) -> bool:
        """Skip whole rounds if the run repeats itself. Returns whether it did."""
        if self._stepwise:
            return False
        state = self.state
        phase, window = state.step % self._needs.period_steps, state.track.run_ledger.window
        order = None if window is None else self._windows.order_of(window)
        pattern = _digest(phase, order, *state.track.pattern(state.step, state.now))
        counted = state.saved.rank, state.saved.total, state.saved.sent
        here = (state.step, state.now, state.secs.stall, state.track.run_ledger.index, *counted)
        before = self._rounds.get(pattern)
        self._rounds[pattern] = here
        if before is None:
            return False
        steps, secs, stall, begun, *counted_more = (new - old for new, old in zip(here, before, strict=True))
        rank_bytes, total_bytes, sent_bytes = map(int, counted_more)
        rounds = int((min(until, self._flushing.undisturbed_secs(self._load.drifts_at)) - state.now) // secs)
        rounds = int(min(rounds, self._flushing.undisturbed_steps() // steps))
        if self._needs.lost_tokens:  # the budget, and with it K, grows with the tokens routed
            rounds = min(rounds, state.step // (8 * int(steps)))
        if rounds < 1:
            return False
        state.track.move(int(steps) * rounds, secs * rounds, int(begun) * rounds, state.counts)
        state.step += int(steps) * rounds
        state.now += secs * rounds
        state.secs.stall += stall * rounds
        state.saved.rank += rank_bytes * rounds
        state.saved.total += total_bytes * rounds
        state.saved.sent += sent_bytes * rounds
        self._rounds.clear()
        return True

    # --- one decision of the policy, and the iterations up to the next ---

    def _round(self, until: float) -> None:
        state = self.state
        context = self._context()
        due = self._needs.due(context)
        if due > state.step:
            self._iterate(due - state.step, until)
            if self._needs.windows:  # the only gap follows a run's first window
                self._rounds.clear()
            return
        if self._needs.windows:
            self._sparse_round(context, until)
            return
        plan = self._policy.plan(context)
        state.plans += 1
        if not plan:
            self._iterate(1, until)
        elif self._admitted(until):
            self._iterate(1, until, self._begin(context, plan, until))
        elif state.now < until:
            self._skip(until)

    def _context(self) -> PolicyContext:
        state, costs = self.state, self._costs
        track, popularity = state.track, self._needs.popularity
        context = track.run_ledger.context(state.step, costs.layout.placement, costs.measured, popularity)
        context = replace(context, model=replace(context.model, sizes=costs.sizes))
        if not self._system.tiered:
            return context
        if self._needs.gradients and context.run.last_step is not None and state.step > context.run.last_step + 1:
            track.anchors.broken()
        memory = replace(context.memory, anchored_at=track.anchors.steps)
        return self._flushing.informed(replace(context, memory=memory))

    def _admitted(self, until: float, skip: bool = True) -> bool:
        """Returns whether a buffer is free, now or after a wait. skip: do not wait if the system skips when busy."""
        state = self.state
        self._settle()
        if self._free_secs <= state.now:
            return True
        if skip and self._system.when_busy == "skip":
            return False
        self._wait(self._free_secs, until)
        self._settle()
        return state.now < until

    @property
    def _free_secs(self) -> float:
        """The time at which a buffer is free."""
        moving, most = self.state.track.moving, self._system.max_in_flight
        return moving[len(moving) - most] if len(moving) >= most else self.state.now

    def _skip(self, until: float) -> None:
        """Train until an iteration begins with a free buffer. A policy that is due stays due."""
        state, secs = self.state, self._costs.iteration.secs
        moment = min(self._free_secs, self._flushing.undisturbed_secs(self._load.drifts_at), until)
        self._iterate(max(1, ceil((moment - state.now) / secs)), until)

    def _wait(self, moment: float, until: float) -> None:
        state = self.state
        moment = min(max(moment, state.now), until)
        state.secs.stall += moment - state.now
        state.now = moment

    def _begin(self, context: PolicyContext, plan: SnapshotPlan, until: float) -> float:
        """Begin a snapshot, and wait for it if the plan waits. Returns the delay of the next iteration."""
        if self._system.tiered:
            return self._begin_tiered(context, plan)
        state, stored = self.state, self._costs.bytes_of.stored(plan)
        copied = self._costs.bytes_of.plan(plan) if plan.memory_only else stored
        last = state.track.run_ledger.last_step
        state.interval = state.step - (last or 0) if last is not None or state.step else None
        when = self._when(state.now, copied, stored, sent=self._goes_to_peers(plan))
        state.track.begin(state.step, plan.full, plan.memory_only, when, None)
        state.k, state.saved.newest = plan.k, stored.total
        if plan.wait:
            self._wait(max(filter(None, when)), until)
            return on_clock(self._costs.drag_secs(copied))
        return on_clock(self._costs.stall_secs(copied))

    def _begin_tiered(self, context: PolicyContext, plan: SnapshotPlan) -> float:
        """Begin a snapshot whose plan tells memory from storage. context: the input of the plan."""
        state, costs = self.state, self._costs
        rescued = () if plan.gradients else state.track.run_ledger.rescued
        if rescued:  # a trainer, too, adds operators that only the previous life's memory has
            merged = rescued.union(plan.full)
            operators = tuple(op for op in self._catalog.everything if op in merged)
            host_only = tuple(op for op in plan.memory_only if op not in merged)
            plan = SnapshotPlan(
                plan.step, operators, memory_only=host_only, k=plan.k, sends_memory_only=plan.sends_memory_only
            )
        copied, stored = costs.bytes_of.plan(plan), costs.bytes_of.stored(plan)
        sent = copied if plan.sends_memory_only else stored
        last = state.track.run_ledger.last_step
        state.interval = state.step - (last or 0) if last is not None or state.step else None
        due = context.memory.storage_due
        when = self._when(state.now, copied, sent, sent=self._goes_to_peers(plan))
        flush_secs = on_clock(costs.storage_secs(stored)) if due else None
        if due:
            self._rounds.clear()
        state.track.begin_tiered(plan, when, flush_secs)
        if when.sent_secs is None and self._system.durable == "peers" and self._needs.gradients and self._needs.partial:
            state.track.anchors.broken()  # peers miss this gradient, so later ones are of no use to them
        state.k, state.saved.newest = plan.k, sent.total
        if plan.together:
            state.round_steps = len(plan.together)
        return on_clock(costs.stall_secs(copied))

    def _goes_to_peers(self, plan: SnapshotPlan, window_size: int = 1) -> bool:
        """Returns whether a snapshot that begins now goes to peers, as a trainer decides it."""
        system, sends = self._system, self.state.track.sends
        behind = are_behind(len(sends), system.max_in_flight, window_size)
        return system.durable == "peers" and goes_to_peers(plan, behind=behind, waits=system.when_busy == "wait")

    def _when(self, now: float, copied: SnapshotSize, moved: SnapshotSize, *, sent: bool) -> When:
        """Schedule the copy and the move of a snapshot that begins now, and count its bytes.

        Snapshots are moved one after the other; parts that only host memory keeps are not moved.

        Args:
            sent: The snapshot goes to peers, if the system has them.
        """
        state, track, costs = self.state, self.state.track, self._costs
        state.saved.rank += copied.rank
        state.saved.total += moved.total
        state.saved.heaviest = max(state.saved.heaviest, copied.rank)
        copied_at = now + on_clock(costs.copy_secs(copied))
        has_peers = self._system.durable == "peers"
        if sent or not has_peers:
            state.saved.sent += moved.sent
            track.mover_free_secs = max(copied_at, track.mover_free_secs) + on_clock(costs.move_secs(moved))
        if not has_peers:
            track.moving.append(track.mover_free_secs)
            return When(track.mover_free_secs)
        if sent:
            track.sends.append(track.mover_free_secs)
        # A system that may leave out copies does not wait for them.
        track.moving.append(track.mover_free_secs if self._system.when_busy == "wait" else copied_at)
        return When(copied_at, track.mover_free_secs if sent else None)

    def _iterate(self, steps: int, until: float, extra_secs: float = 0.0) -> None:
        """Train ``steps`` iterations, the first of which a snapshot delays by ``extra_secs``."""
        state = self.state
        iteration = self._costs.iteration
        first = iteration.secs + extra_secs
        rest_secs = until - state.now - first
        done = min(steps, 1 + int(rest_secs // iteration.secs)) if rest_secs >= 0 else 0
        state.track.run_ledger.routed_often(state.counts, done)
        state.step += done
        if done:
            state.now += first + (done - 1) * iteration.secs
            state.secs.stall += first - iteration.secs
        if done < steps:
            begun = until - state.now
            state.lost_memory.in_update = begun > (iteration.secs if done else first) - iteration.update_secs
            state.secs.lost += begun
            state.now = until

    # --- sparse windows ---

    def _sparse_round(self, context: PolicyContext, until: float) -> None:
        if 0 < self.state.step == self._resumed_at:  # the next window begins with the next step
            self._iterate(1, until)
            return
        if not self._admitted(until):  # as at every slot; but a window that has begun is completed
            if self.state.now < until:
                self._skip(until)
            return
        window = self._window_of(context)
        if window is None:
            self._iterate(1, until)
        else:
            self._train_window(window, until)

    def _window_of(self, context: PolicyContext) -> Window | None:
        """The window that begins here, if any. The policy is called once for each pattern of its inputs."""
        state = self.state
        # The order depends on shares of tokens: a constant load gives the same order, however long it lasts.
        run, popularity = context.run, context.tokens.popularity
        if self._needs.popularity != DECAYED:
            counts = popularity.astype(np.int64)
            popularity = counts // max(1, int(np.gcd.reduce(counts, axis=None)))
        before = None if run.window is None else self._windows.order_of(run.window)
        first = run.last_step == 0  # the first measurements, since a trainer has no others yet
        key = _digest(popularity.tobytes(), before, run.step == 0, run.last_step is None, first)
        window = self._windows.find(key)
        if window is None:
            window = self._policy.plan(context).window
            state.plans += 1
            if window is None:  # the policy waits for measurements that a trainer would not have yet
                return None
            # Called again with the same load, a policy keeps its window.
            again = _digest(popularity.tobytes(), self._windows.order_of(window), False, False, False)
            for inputs in (key,) if not run.last_step else (key, again):
                self._windows.keep(inputs, window)
        if state.window is not None and window.size > 1 and state.window.order != window.order:
            state.reorders += 1
        state.window = window = replace(window, start=run.step)
        return window

    def _train_window(self, window: Window, until: float) -> None:
        """Train the iterations of a window, each during the copy of one slot."""
        state, snapshots = self.state, self._costs.bytes_of.window(window)
        state.saved.newest = max(snapshot.total for snapshot in snapshots)
        state.track.run_ledger.activity.begin_window()
        sent = self._goes_to_peers(SnapshotPlan(state.step), window.size)
        for slot, snapshot in enumerate(snapshots):
            if not self._admitted(until, skip=False):
                return
            when = self._when(state.now, snapshot, snapshot, sent=sent)
            if slot + 1 == window.size:
                state.track.begin(state.step, window.order, (), when, window)
            done = state.step
            self._iterate(1, until, on_clock(self._costs.stall_secs(snapshot)))
            if state.step == done:
                return


def _empty_track(system: System, catalog: Catalog) -> Track:
    """Returns an empty track, with the ledger that the system's policy reads."""
    needs, tiered = system.needs, system.tiered
    stores = tiered and system.cadence is not None
    books = MovingRunLedger(catalog, outlives_process=tiered, stores=stores, watched=needs.lost_tokens)
    log = PeersLog(logs=needs.gradients is not None, leaves_out=needs.gradients is not None and needs.partial)
    return Track(books, log, tiered=tiered)


def _digest(*parts: object) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return digest.digest()
