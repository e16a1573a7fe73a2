"""The checkpoints of a simulated run: under way, durable, and what a failure returns to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.ledger import Ledger
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import SnapshotPlan, Tier
from moe_ckpt.core.rolling import anchored_after
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.core.window import Window
from moe_ckpt.engine.run_ledger import Pending, RunLedger


class MovingRunLedger(RunLedger):
    """A trainer's books that can be told of many steps at once, and moved ahead in time.

    Steps told together route alike, and time-decayed activity is taken at the limit to which that brings it.

    stores: storage has books of its own; without, what is durable stands for it. watched: the policy goes by these
        at each step, as a budget for lost tokens does.
    """

    stores = watched = False

    def routed_often(self, counts: Counts, steps: int) -> None:
        """``steps`` optimizer steps, each of which routed ``counts`` [L, E]."""
        if steps >= 1:
            self.tokens.apply(counts * steps)
            self.activity.add_often(counts, steps)

    def _missing(self, under_way: Sequence[Pending]) -> tuple[str, ...]:
        """The first checkpoint of a run is dense, whatever the policy: after it, nothing is, but on storage."""
        if self.last_step is None or not self.stores:
            return self.catalog.everything if self.last_step is None else ()
        return super()._missing(under_way)

    def return_to(
        self, checkpoint: Durable, alive: npt.NDArray[np.bool_] | None, sealed: npt.NDArray[np.bool_] | None
    ) -> FaultRecord:
        """As ``resume_from``, from a checkpoint that was never written.

        Args:
            alive: See ``Track.fail``.
            sealed: Likewise.
        """
        self.ledger = checkpoint.ledger.as_of(checkpoint.ledger.tokens.applied)
        if sealed is not None:
            self.tokens.mark_saved(Tier.HOST, np.argwhere(sealed), self.tokens.applied)
            alive = sealed if alive is None else alive | sealed
        self.index, self.last_step = checkpoint.index + 1, checkpoint.step
        self.committed_step = checkpoint.step
        if not self.outlives_process:
            return self.ledger.recover(checkpoint.step, alive)
        if alive is None:
            return self.tokens.recover(checkpoint.step)
        nothing = np.zeros_like(self.tokens.applied)
        here, peers = (self.tokens.saved.get(tier, nothing) for tier in (Tier.HOST, Tier.PEER))
        seen = np.maximum(np.where(alive, here, 0), peers)
        fault = self.tokens.recover(checkpoint.step, seen)
        self._rescued = self._newer(seen)
        return fault

    def move(self, steps: int, checkpoints: int, counts: Counts) -> None:
        """Everything as it would be ``steps`` later, in a run that does all the time what it did before.

        Args:
            checkpoints: Begun in that time.
        """
        self.ledger.move(steps, counts, stored=not self.outlives_process)
        self.index += checkpoints
        self.last_step = None if self.last_step is None else self.last_step + steps
        self.committed_step = None if self.committed_step is None else self.committed_step + steps
        if self.window is not None:
            self.window = replace(self.window, start=self.window.start + steps)
        self.sealing = {key: moved(pending, steps, counts) for key, pending in self.sealing.items()}
        # What goes on from memory to storage stays what it is.
        if not self.outlives_process:
            self.pending = {key: moved(pending, steps, counts) for key, pending in self.pending.items()}

    def pattern(self, step: int) -> tuple[bytes, ...]:
        """Everything that policies go by, as seen from ``step``: alike at two steps if the run repeats itself.

        Where memory outlives the process, most policies look at storage only when it is due.
        """
        resting = self.outlives_process and not self.watched
        tiers = sorted(tier for tier in self.tokens.saved if not (resting and tier is Tier.STORAGE))
        unsaved = [(self.tokens.applied - self.tokens.saved[tier]).tobytes() for tier in tiers]
        ages = [self.ledger.expert_ages(step)]
        if self.outlives_process:
            ages = [step - self.ledger.expert_steps(tier) for tier in tiers]
        hard = self.activity.described().hard.tobytes()
        return *(each.tobytes() for each in ages), hard, repr(sorted(self.rescued)).encode(), *unsaved


def moved(pending: Pending, steps: int, counts: Counts) -> Pending:
    """A snapshot under way, as it would be ``steps`` later."""
    window = None if pending.window is None else replace(pending.window, start=pending.window.start + steps)
    return replace(pending, step=pending.step + steps, applied=pending.applied + counts * steps, window=window)


@dataclass(frozen=True)
class Durable:
    """A checkpoint that outlives a failure.

    Attributes:
        step: Of the state it holds.
        ledger: As of ``step``, with what its experts have seen.
        anchored_at: ``[operators]`` steps of the anchors from which a log of gradients leads to ``step``; None where it
            is no log, or of one step.
    """

    step: int
    ledger: Ledger
    index: int
    window: Window | None
    anchored_at: Counts | None = None

    def moved(self, steps: int, counts: Counts, *, stored: bool = True) -> Durable:
        """As it would be ``steps`` later.

        Args:
            stored: See ``Ledger.move``.
        """
        ledger = self.ledger.as_of(self.ledger.tokens.applied)
        ledger.move(steps, counts, stored=stored)
        window = None if self.window is None else replace(self.window, start=self.window.start + steps)
        return Durable(self.step + steps, ledger, self.index, window, _later(self.anchored_at, steps))


def _later(anchored_at: Counts | None, steps: int) -> Counts | None:
    return None if anchored_at is None else np.where(anchored_at < 0, anchored_at, anchored_at + steps)


@dataclass
class UnderWay:
    """A checkpoint that is being written.

    Attributes:
        ready_secs: When it is durable.
        flush_secs: What writing it to storage then takes, if it goes there.
        anchored_at: As ``Durable``'s.
    """

    sequence: int
    pending: Pending
    ready_secs: float
    index: int
    flush_secs: float | None = None
    anchored_at: Counts | None = None


class Track:
    """Books, snapshots under way, and the durable checkpoint that a failure returns to.

    Times are absolute seconds of the run. ``newest`` is None until something is durable. moving: when each snapshot
    that is still in a buffer, a window's slots among them, is durable. backup: what is on storage beside the peers.

    Args:
        tiered: Memory and storage have books of their own, and a plan says what goes to storage; else storage gets what
            memory holds.
        stores: Something does.
        watched: See ``MovingRunLedger``.
        copied: Peers have copies, where it is tiered.
        logs: Snapshots may be steps of a log of gradients.
        leaves_out: Which leaves operators out.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        tiered: bool = False,
        stores: bool = False,
        watched: bool = False,
        copied: bool = False,
        logs: bool = False,
        leaves_out: bool = False,
    ) -> None:
        self._catalog, self._tiered, self._copied, self._logs = catalog, tiered, copied, logs
        self._stores, self._watched, self._leaves_out = stores, watched, leaves_out
        self.run_ledger = self._books()
        self.anchored_at = np.full(len(catalog.operators), -1, dtype=np.int64)
        """Of the log of gradients, if there is one, with what is under way; as ``PolicyContext.anchored_at``."""
        self.under_way: deque[UnderWay] = deque()
        self.moving: deque[float] = deque()
        self.newest: Durable | None = None
        self.backup: Durable | None = None
        self.flushed_secs = 0.0
        """When the newest flush to storage began."""
        self._backing: tuple[float, Durable, int | None] | None = None
        self.backup_lost = False
        """A failure cut off a flush, and none was begun since."""
        self.mover_free_secs = 0.0
        self._sequence = 0
        self._generation = 0
        self._ordered: tuple[Window, int] | None = None

    def _books(self) -> MovingRunLedger:
        """Empty ones."""
        found = MovingRunLedger(self._catalog, outlives_process=self._tiered)
        found.stores, found.watched = self._stores, self._watched
        return found

    def order_of(self, window: Window) -> int:
        """Alike for windows of the same slots that were ordered by the same frequencies; within one process only."""
        slots, frequencies = window.slots, window.frequencies
        if self._ordered is not None:
            last, known = self._ordered
            if last.slots is slots and last.frequencies is frequencies:  # a moved window, most of the time
                return known
        found = hash((slots, None if frequencies is None else tuple(frequencies.items())))
        self._ordered = window, found
        return found

    def begin(
        self,
        step: int,
        operators: tuple[str, ...],
        host_only: tuple[str, ...],
        ready_secs: float,
        window: Window | None,
    ) -> None:
        """A snapshot of ``step`` begins; of a window, only its last slot is told, which makes it a checkpoint."""
        self._sequence += 1
        slot = window.size - 1 if window else 0
        applied = self.run_ledger.tokens.applied.copy()
        pending = Pending(self._catalog, step, self._generation, operators, host_only, applied, {}, window, slot)
        self.under_way.append(UnderWay(self._sequence, pending, ready_secs, self.run_ledger.index))
        self.run_ledger.begun(self._sequence, pending)

    def begin_tiered(self, plan: SnapshotPlan, ready_secs: float, flush_secs: float | None) -> None:
        """A snapshot begins that is complete in memory at ``ready_secs``, and then goes to storage in ``flush_secs``.

        Args:
            flush_secs: None where storage is not due.
        """
        self._sequence += 1
        host_only = plan.operators(Tier.HOST)
        operators = plan.operators()
        stored, applied = flush_secs is not None, self.run_ledger.tokens.applied.copy()
        pending = Pending(
            *(self._catalog, plan.step, self._generation, operators, host_only, applied, {}),
            stored=stored,
            copied=self._copied,
            sends_held=plan.sends_held,
            gradients=plan.gradients,
        )
        anchored_at = None
        if plan.gradients or self._leaves_out:
            places = self._catalog.places_of
            self.anchored_at = anchored_after(
                self.anchored_at, plan.step, places(plan.operators()), places(plan.gradients)
            )
            if plan.gradients:
                anchored_at = np.where(self.anchored_at < 0, plan.step, self.anchored_at)
        elif self._logs and len(operators) == len(self.anchored_at):
            self.anchored_at = np.full_like(self.anchored_at, plan.step)
        one = UnderWay(self._sequence, pending, ready_secs, self.run_ledger.index, flush_secs, anchored_at)
        self.under_way.append(one)
        self.run_ledger.begun(self._sequence, pending, self._sequence)

    def gap(self) -> None:
        """Nothing was saved of a step: no operator comes to the newest one any more."""
        self.anchored_at = np.full_like(self.anchored_at, -1)

    def resolve(self, now_secs: float) -> bool:
        """What has become durable by ``now_secs`` counts from now on; True if a checkpoint has."""
        before = self.newest
        while self.moving and self.moving[0] <= now_secs:
            self.moving.popleft()
        self._resolve_backup(now_secs)
        while self.under_way and self.under_way[0].ready_secs <= now_secs:
            done = self.under_way.popleft()
            if self._tiered:
                self._in_memory(done)
                self._resolve_backup(now_secs)
                continue
            pending = self.run_ledger.resolved(done.sequence, committed=True)
            versions = self.run_ledger.ledger.as_of(pending.applied)
            self.newest = Durable(pending.step, versions, done.index, pending.window)
        return self.newest is not before

    def _in_memory(self, done: UnderWay) -> None:
        """A snapshot is complete in memory, and on peers where there are any."""
        pending = done.pending
        self.run_ledger.in_memory(done.sequence, complete=True, copied=self._copied)
        versions = self.run_ledger.ledger.as_of(pending.applied)
        self.newest = Durable(pending.step, versions, done.index, None, done.anchored_at)
        if done.flush_secs is not None:
            self._backing = done.ready_secs + done.flush_secs, self.newest, done.sequence
            self.flushed_secs, self.backup_lost = done.ready_secs, False

    def _resolve_backup(self, now_secs: float) -> None:
        if self._backing is None or self._backing[0] > now_secs:
            return
        _, self.backup, sequence = self._backing
        self._backing = None
        if sequence is None:
            return
        pending = self.run_ledger.resolved(sequence, committed=True)
        ledger = self.run_ledger.ledger
        self.backup = replace(self.backup, ledger=ledger.as_of(pending.applied))
        if self.newest is not None:  # which knows now that storage has it
            self.newest = replace(self.newest, ledger=ledger.as_of(self.newest.ledger.tokens.applied))

    def back_up(self, now_secs: float, takes_secs: float) -> None:
        """What is durable now is written to storage, too."""
        if self.newest is not None:
            self._backing, self.flushed_secs = (now_secs + takes_secs, self.newest, None), now_secs
        self.backup_lost = False

    @property
    def flush_ends_secs(self) -> float | None:
        """When what is on its way from memory to storage is there; None where nothing is."""
        return None if self._backing is None else self._backing[0]

    @property
    def flush_is_coming(self) -> bool:
        """A snapshot for storage is on its way to memory."""
        return self._tiered and any(one.flush_secs is not None for one in self.under_way)

    @property
    def flushed_step(self) -> int:
        """Of the newest checkpoint that is on storage or on its way there."""
        newest = self._backing[1] if self._backing is not None else self.backup
        return 0 if newest is None else newest.step

    def drop(self) -> None:
        """Snapshots under way are lost, but training goes on from where it is."""
        while self.under_way:
            self.run_ledger.resolved(self.under_way.pop().sequence, committed=False)
        self._stop_moving()

    def _stop_moving(self) -> None:
        self.moving.clear()
        self.backup_lost = self.backup_lost or self._backing is not None
        self.mover_free_secs, self._backing = 0.0, None

    def sealed(self, step: int) -> Durable:
        """What survivors have of ``step``, the newest one: everything, in memory of this node alone."""
        ledger = self.run_ledger.ledger.as_of(self.run_ledger.tokens.applied)
        every = np.ones(ledger.tokens.applied.shape, dtype=bool)
        ledger.tokens.mark_saved(Tier.HOST, np.argwhere(every), ledger.tokens.applied)
        return Durable(step, ledger, self.run_ledger.index, None)

    def fail(
        self,
        to: Durable | None,
        alive: npt.NDArray[np.bool_] | None = None,
        sealed: npt.NDArray[np.bool_] | None = None,
        *,
        copied: bool = True,
    ) -> FaultRecord | None:
        """The run goes back to ``to``, or to its very beginning where that is None.

        Args:
            to: What it goes back to.
            alive: ``[L, E]`` whether host memory that may hold the expert is still there; None: nowhere.
            sealed: ``[L, E]`` whether survivors have sealed the expert as of this very step; None: none.
            copied: ``to`` is where checkpoints are. What survivors sealed is not, so that the newest one stays what is
                left when a node is lost next.
        """
        self.run_ledger = self._books()
        self.under_way.clear()
        self._stop_moving()
        self._generation += 1
        self.newest = to if copied else self.newest
        self.gap()  # a new life begins its log anew
        return None if to is None else self.run_ledger.return_to(to, alive, sealed)

    def move(self, steps: int, secs: float, checkpoints: int, counts: Counts) -> None:
        """Everything as it would be ``steps`` and ``secs`` later, in a run that repeats itself."""
        self.run_ledger.move(steps, checkpoints, counts)
        for one in self.under_way:
            books = self.run_ledger.sealing if self._tiered else self.run_ledger.pending
            one.pending, one.ready_secs = books[one.sequence], one.ready_secs + secs
            one.index += checkpoints
            one.anchored_at = _later(one.anchored_at, steps)
        self.anchored_at = np.where(self.anchored_at < 0, -1, self.anchored_at + steps)
        self.moving = deque(ready + secs for ready in self.moving)
        if self.newest is not None:
            self.newest = self.newest.moved(steps, counts, stored=not self._tiered)
        self.mover_free_secs += secs

    def pattern(self, step: int, now_secs: float) -> tuple[object, ...]:
        """Alike at two decisions if the run repeats itself."""
        pending = tuple((step - one.pending.step, one.ready_secs - now_secs) for one in self.under_way)
        chosen = b"".join(one.pending.experts.tobytes() for one in self.under_way)
        host_only = tuple(one.pending.host_only for one in self.under_way)
        moving = tuple(ready - now_secs for ready in self.moving)
        idle = max(self.mover_free_secs - now_secs, 0.0)
        window = None if self.run_ledger.window is None else self.order_of(self.run_ledger.window)
        behind = None if self.newest is None else step - self.newest.step
        last = None if self.run_ledger.last_step is None else step - self.run_ledger.last_step
        anchors = np.where(self.anchored_at < 0, -1, step - self.anchored_at).tobytes()
        stored = tuple(one.flush_secs for one in self.under_way)
        books = anchors, stored, *self.run_ledger.pattern(step)
        return (*books, chosen, pending, host_only, moving, idle, window, behind, last)
