"""The checkpoints of a simulated run: under way, durable, and what a failure returns to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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

    def sealed(self, sequence: int, *, sent: bool) -> None:
        """Every rank has a snapshot in its memory, as a recovery would find it.

        Args:
            sent: To peers, too; then it is settled once those have it.
        """
        if not sent:
            self.in_memory(sequence, complete=True)
            return
        pending = self.sealing[sequence]
        operators = pending.operators_in(Tier.HOST)
        self.ledger.hold(operators, pending.step, pending.applied)
        self._rescued -= frozenset(operators)

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


class When(NamedTuple):
    """When a snapshot is there.

    Attributes:
        ready_secs: Durable; with peers, in the memory of its own ranks.
        sent_secs: On all peers, too; None if it does not go there.
    """

    ready_secs: float
    sent_secs: float | None = None

    def later(self, secs: float) -> When:
        """The same so many seconds later."""
        return When(self.ready_secs + secs, None if self.sent_secs is None else self.sent_secs + secs)


@dataclass
class UnderWay:
    """A checkpoint that is being written, or sent to peers.

    Attributes:
        flush_secs: What writing it to storage takes once it is durable, if it goes there.
        anchored_at: As ``Durable``'s.
        durable: The same, once it is.
    """

    sequence: int
    pending: Pending
    when: When
    index: int
    flush_secs: float | None = None
    anchored_at: Counts | None = None
    durable: Durable | None = None


def _in(found: Durable, tier: Tier) -> dict[Tier, Counts]:
    """What a checkpoint knows of a tier."""
    saved = found.ledger.tokens.saved
    return {tier: saved[tier]} if tier in saved else {}


class Track:
    """Books, snapshots under way, and the durable checkpoint that a failure returns to.

    Times are absolute seconds of the run.

    Attributes:
        newest: What is durable; with peers, in the memory of its own ranks. None until something is.
        copied: The newest that all peers have, too.
        backup: What is on storage beside both.
        moving: When each snapshot that is still in a buffer, a window's slots among them, leaves it.
        sends: When peers have each snapshot that is on its way to them, slots among them.

    Args:
        tiered: Memory and storage have books of their own, and a plan says what goes to storage; else storage gets what
            memory holds.
        stores: Something does.
        watched: See ``MovingRunLedger``.
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
        logs: bool = False,
        leaves_out: bool = False,
    ) -> None:
        self._catalog, self._tiered, self._logs = catalog, tiered, logs
        self._stores, self._watched, self._leaves_out = stores, watched, leaves_out
        self.run_ledger = self._books()
        self.anchored_at = np.full(len(catalog.operators), -1, dtype=np.int64)
        """Of the log of gradients, if there is one, with what is under way; as ``PolicyContext.anchored_at``."""
        self.under_way: deque[UnderWay] = deque()
        self.moving: deque[float] = deque()
        self.sends: deque[float] = deque()
        self.newest: Durable | None = None
        self.copied: Durable | None = None
        self.backup: Durable | None = None
        self._sending: deque[UnderWay] = deque()
        self._missed = -1
        """Newest step of which peers got nothing."""
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
        when: When,
        window: Window | None,
    ) -> None:
        """A snapshot of ``step`` begins; of a window, only its last slot is told, which makes it a checkpoint."""
        self._sequence += 1
        slot = window.size - 1 if window else 0
        applied = self.run_ledger.tokens.applied.copy()
        pending = Pending(self._catalog, step, self._generation, operators, host_only, applied, {}, window, slot)
        self.under_way.append(UnderWay(self._sequence, pending, when, self.run_ledger.index))
        self.run_ledger.begun(self._sequence, pending)

    def begin_tiered(self, plan: SnapshotPlan, when: When, flush_secs: float | None) -> None:
        """A snapshot begins that goes to storage in ``flush_secs`` once memory has it; None where that is not due."""
        self._sequence += 1
        host_only = plan.operators(Tier.HOST)
        operators = plan.operators()
        stored, applied = flush_secs is not None, self.run_ledger.tokens.applied.copy()
        pending = Pending(
            *(self._catalog, plan.step, self._generation, operators, host_only, applied, {}),
            stored=stored,
            copied=when.sent_secs is not None,
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
        self._missed = plan.step if when.sent_secs is None else self._missed
        one = UnderWay(self._sequence, pending, when, self.run_ledger.index, flush_secs, anchored_at)
        self.under_way.append(one)
        self.run_ledger.begun(self._sequence, pending, self._sequence)

    def gap(self) -> None:
        """Nothing was saved of a step: no operator comes to the newest one any more."""
        self.anchored_at = np.full_like(self.anchored_at, -1)

    def resolve(self, now_secs: float) -> tuple[bool, bool]:
        """What has become durable by ``now_secs`` counts from now on.

        Returns:
            Whether a checkpoint has become durable, and whether peers have got one.
        """
        newest, copied = self.newest, self.copied
        for moments in (self.moving, self.sends):
            while moments and moments[0] <= now_secs:
                moments.popleft()
        self._resolve_backup(now_secs)
        while self.under_way and self.under_way[0].when.ready_secs <= now_secs:
            done = self.under_way.popleft()
            self.newest = done.durable = self._in_memory(done) if self._tiered else self._resolved(done)
            if done.when.sent_secs is not None:
                self._sending.append(done)
            self._resolve_backup(now_secs)
        while self._sending and (self._sending[0].when.sent_secs or 0.0) <= now_secs:
            self._sent(self._sending.popleft())
        return self.newest is not newest, self.copied is not copied

    def _resolved(self, done: UnderWay) -> Durable:
        pending = self.run_ledger.resolved(done.sequence, committed=True)
        versions = self.run_ledger.ledger.as_of(pending.applied)
        return Durable(pending.step, versions, done.index, pending.window)

    def _in_memory(self, done: UnderWay) -> Durable:
        """A snapshot is in the memory of its own ranks."""
        self.run_ledger.sealed(done.sequence, sent=done.when.sent_secs is not None)
        versions = self.run_ledger.ledger.as_of(done.pending.applied)
        durable = Durable(done.pending.step, versions, done.index, None, done.anchored_at)
        if done.flush_secs is not None:
            self._backing = done.when.ready_secs + done.flush_secs, durable, done.sequence
            self.flushed_secs, self.backup_lost = done.when.ready_secs, False
        return durable

    def _sent(self, done: UnderWay) -> None:
        """Peers have a snapshot, too."""
        found = done.durable
        if found is not None and self._tiered:
            self.run_ledger.in_memory(done.sequence, complete=True, copied=True)
            ledger = self.run_ledger.ledger.as_of(found.ledger.tokens.applied)
            ledger.tokens.saved |= _in(found, Tier.HOST)  # memory may have later ones by now
            known = replace(found, ledger=ledger)
            self.newest = known if self.newest is found else self.newest
            found = known
        if found is None or not self._is_cut_off(found.anchored_at):
            self.copied = found

    def _is_cut_off(self, anchored_at: Counts | None) -> bool:
        """Whether peers lack a step on the way from these anchors."""
        return anchored_at is not None and 0 <= int(anchored_at.min(initial=0)) <= self._missed

    def _resolve_backup(self, now_secs: float) -> None:
        if self._backing is None or self._backing[0] > now_secs:
            return
        _, self.backup, sequence = self._backing
        self._backing = None
        if sequence is None:
            return
        pending = self.run_ledger.resolved(sequence, committed=True)
        self.backup = replace(self.backup, ledger=self.run_ledger.ledger.as_of(pending.applied))
        # Which know now that storage has it.
        is_copied, self.newest = self.newest is self.copied, self._knowing(self.newest)
        self.copied = self.newest if is_copied else self._knowing(self.copied)

    def _knowing(self, found: Durable | None) -> Durable | None:
        """A checkpoint in memory that knows what storage has now."""
        if found is None:
            return None
        ledger = self.run_ledger.ledger.as_of(found.ledger.tokens.applied)
        ledger.tokens.saved |= _in(found, Tier.HOST) | _in(found, Tier.PEER)
        return replace(found, ledger=ledger)

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
        for each in (self.moving, self.sends, self._sending):
            each.clear()
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
    ) -> FaultRecord | None:
        """The run goes back to ``to``, or to its very beginning where that is None.

        Args:
            to: What it goes back to.
            alive: ``[L, E]`` whether host memory that may hold the expert is still there; None: nowhere.
            sealed: ``[L, E]`` whether survivors have sealed the expert as of this very step; None: none.
        """
        self.run_ledger = self._books()
        self.under_way.clear()
        self._stop_moving()
        self._generation += 1
        self._missed = -1
        # A start keeps what it goes on from, here and on peers, and nothing else that memory had.
        self.copied = to if to is self.copied and alive is not None else None
        self.newest = to
        self.gap()  # a new life begins its log anew
        return None if to is None else self.run_ledger.return_to(to, alive, sealed)

    def move(self, steps: int, secs: float, checkpoints: int, counts: Counts) -> None:
        """Everything as it would be ``steps`` and ``secs`` later, in a run that repeats itself."""
        self.run_ledger.move(steps, checkpoints, counts)
        books = self.run_ledger.sealing if self._tiered else self.run_ledger.pending
        for one in (*self.under_way, *self._sending):
            one.pending, one.when = books.get(one.sequence, one.pending), one.when.later(secs)
            one.index += checkpoints
            one.anchored_at = _later(one.anchored_at, steps)
        self.anchored_at = np.where(self.anchored_at < 0, -1, self.anchored_at + steps)
        self.moving, self.sends = (deque(at + secs for at in moments) for moments in (self.moving, self.sends))
        known = [one.durable for one in self._sending] + [self.newest, self.copied]
        later = {id(each): each.moved(steps, counts, stored=not self._tiered) for each in known if each is not None}
        for one in self._sending:
            one.durable = later.get(id(one.durable))
        self.newest, self.copied = later.get(id(self.newest)), later.get(id(self.copied))
        self._missed += steps if self._missed >= 0 else 0
        self.mover_free_secs += secs

    def pattern(self, step: int, now_secs: float) -> tuple[object, ...]:
        """Alike at two decisions if the run repeats itself."""
        pending = tuple((step - one.pending.step, one.when.later(-now_secs)) for one in self.under_way)
        chosen = b"".join(one.pending.experts.tobytes() for one in self.under_way)
        host_only = tuple(one.pending.host_only for one in self.under_way)
        moving = tuple(at - now_secs for at in (*self.moving, *self.sends))
        sending = tuple((step - one.pending.step, one.when.later(-now_secs)) for one in self._sending)
        idle = max(self.mover_free_secs - now_secs, 0.0)
        window = None if self.run_ledger.window is None else self.order_of(self.run_ledger.window)
        behind = tuple(None if each is None else step - each.step for each in (self.newest, self.copied))
        last = None if self.run_ledger.last_step is None else step - self.run_ledger.last_step
        anchors = np.where(self.anchored_at < 0, -1, step - self.anchored_at).tobytes()
        is_near = self._logs and self._missed >= int(self.anchored_at.min(initial=0))
        missed = step - self._missed if is_near else -1
        stored = tuple(one.flush_secs for one in self.under_way)
        books = anchors, stored, *self.run_ledger.pattern(step)
        on_links = moving, len(self.sends), sending, missed, idle
        return (*books, chosen, pending, host_only, on_links, window, behind, last)
