"""The checkpoints of a simulated run: under way, durable, and the one that a failure returns to."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.step import Contents, PeerPart, SnapshotPlan, Step, Tier, WindowPlace
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.core.window import Window
from moe_ckpt.ledger.ledger import Anchors
from moe_ckpt.run.run_ledger import InFlight, expert_indices
from moe_ckpt_sim.run.anchors import PeersLog
from moe_ckpt_sim.run.durable import Backup, Durable, UnderWay, When, later
from moe_ckpt_sim.run.moving_ledger import MovingRunLedger


class Track:
    """The ledger of a run, its snapshots under way and its durable checkpoints.

    Times are absolute seconds of the run.

    Attributes:
        newest: The newest durable checkpoint; with peers, the newest in the memory of its own ranks. None at first.
        copied: The newest checkpoint that all peers have, too.
        backup: The checkpoint on storage, if memory holds the others.
        moving: When each snapshot in a buffer, slots of a window included, leaves it.
        sends: When peers have each snapshot on its way to them, slots included.

    Args:
        run_ledger: An empty ledger.
        log: The steps of a log of gradients that peers lack.
        tiered: Memory and storage have separate versions, and plans say what goes to storage; otherwise storage gets
            what memory holds.
    """

    def __init__(self, run_ledger: MovingRunLedger, log: PeersLog, *, tiered: bool = False) -> None:
        self.run_ledger, self._log, self._tiered = run_ledger, log, tiered
        self.backup = Backup()
        self.under_way: deque[UnderWay] = deque()
        self.moving: deque[float] = deque()
        self.sends: deque[float] = deque()
        self.newest: Durable | None = None
        self.copied: Durable | None = None
        self._sending: deque[UnderWay] = deque()
        self.mover_free_secs = 0.0
        self._number = 0
        self._generation = 0

    @property
    def anchors(self) -> Anchors:
        """The anchors of the log of gradients."""
        return self.run_ledger.ledger.anchors

    @property
    def _catalog(self) -> Catalog:
        return self.run_ledger.catalog

    def begin(
        self,
        step: int,
        operators: tuple[str, ...],
        host_only: tuple[str, ...],
        when: When,
        window: Window | None,
    ) -> None:
        """Begin a snapshot of ``step``. Of a window, only the last slot, which completes it, is recorded."""
        last = None if window is None else WindowPlace(window.start, window.size, window.size - 1)
        snapshot = self._next(step, Contents(operators, host_only, window=last))
        self.under_way.append(UnderWay(snapshot, when, self.run_ledger.index, window))
        self.run_ledger.begun(snapshot, window)

    def begin_tiered(self, plan: SnapshotPlan, when: When, flush_secs: float | None) -> None:
        """Begin a snapshot. Once memory has it, storage gets it in ``flush_secs``; None if storage is not due."""
        sent = when.sent_secs is not None
        whole = PeerPart.EVERYTHING if plan.sends_memory_only else PeerPart.STORED
        contents = Contents(
            plan.full,
            plan.memory_only,
            gradients=plan.gradients,
            to_storage=flush_secs is not None,
            to_peers=whole if sent else PeerPart.NOTHING,
        )
        snapshot = self._next(plan.step, contents)
        anchored_at = self._log.save(self.anchors, self._number, plan, sent=sent)
        self.under_way.append(
            UnderWay(snapshot, when, self.run_ledger.index, flush_secs=flush_secs, anchored_at=anchored_at)
        )
        self.run_ledger.begun(snapshot)

    def _next(self, step: int, contents: Contents) -> InFlight:
        self._number += 1
        identity = Step("", "", self._generation, step, self._number)
        return InFlight(identity, contents, self.run_ledger.tokens.applied.copy())

    def resolve(self, now_secs: float) -> tuple[bool, bool]:
        """Settle all snapshots that have arrived by ``now_secs``.

        Returns:
            True if a checkpoint has become durable, and true if peers have received one.
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
        snapshot = self.run_ledger.resolved(done.snapshot.identity.number, committed=True)
        versions = self.run_ledger.ledger.as_of(snapshot.applied)
        return Durable(snapshot.step, versions, done.index, done.window)

    def _in_memory(self, done: UnderWay) -> Durable:
        """Record a snapshot that is in the memory of its own ranks."""
        number = done.snapshot.identity.number
        self.run_ledger.sealed(number, sent=done.when.sent_secs is not None)
        versions = self.run_ledger.ledger.as_of(done.snapshot.applied)
        durable = Durable(done.snapshot.step, versions, done.index, None, done.anchored_at)
        if done.flush_secs is not None:
            self.backup.begin(durable, done.when.ready_secs, done.flush_secs, number)
        return durable

    def _sent(self, done: UnderWay) -> None:
        """Record a snapshot that peers have, too."""
        durable = done.durable
        if durable is not None and self._tiered:
            self.run_ledger.in_memory(done.snapshot.identity.number, complete=True, copied=True)
            before = durable.ledger
            ledger = self.run_ledger.ledger.as_of(before.tokens.applied, before, (Tier.HOST,))
            updated = replace(durable, ledger=ledger)
            self.newest = updated if self.newest is durable else self.newest
            durable = updated
        if durable is None or not self._log.is_cut_off(durable.anchored_at):
            self.copied = durable

    def _resolve_backup(self, now_secs: float) -> None:
        number = self.backup.arrived(now_secs)
        if number is None or self.backup.durable is None:
            return
        snapshot = self.run_ledger.resolved(number, committed=True)
        self.backup.durable = replace(self.backup.durable, ledger=self.run_ledger.ledger.as_of(snapshot.applied))
        # The checkpoints in memory now know that storage has it.
        is_copied, self.newest = self.newest is self.copied, self._knowing(self.newest)
        self.copied = self.newest if is_copied else self._knowing(self.copied)

    def _knowing(self, checkpoint: Durable | None) -> Durable | None:
        """Returns the checkpoint in memory with the versions that storage has now."""
        if checkpoint is None:
            return None
        before = checkpoint.ledger
        ledger = self.run_ledger.ledger.as_of(before.tokens.applied, before, (Tier.HOST, Tier.PEER))
        return replace(checkpoint, ledger=ledger)

    @property
    def flush_is_coming(self) -> bool:
        """True if a snapshot for storage is on its way to memory."""
        return self._tiered and any(one.flush_secs is not None for one in self.under_way)

    def drop(self) -> None:
        """Drop the snapshots under way, while training goes on from its step."""
        while self.under_way:
            self.run_ledger.resolved(self.under_way.pop().snapshot.identity.number, committed=False)
        self._stop_moving()

    def _stop_moving(self) -> None:
        for queue in (self.moving, self.sends, self._sending):
            queue.clear()
        self.backup.cut_off()
        self.mover_free_secs = 0.0

    def sealed(self, step: int) -> Durable:
        """Returns the checkpoint of ``step``, the newest one, that survivors seal in their own memory."""
        ledger = self.run_ledger.ledger.as_of(self.run_ledger.tokens.applied)
        ledger.hold(self._catalog.everything, step, ledger.tokens.applied)
        return Durable(step, ledger, self.run_ledger.index, None)

    def fail(
        self,
        to: Durable | None,
        alive: npt.NDArray[np.bool_] | None = None,
        sealed: npt.NDArray[np.bool_] | None = None,
    ) -> FaultRecord | None:
        """Go back to the checkpoint ``to``, or to the beginning if it is None.

        Args:
            to: The checkpoint to go back to.
            alive: ``[L, E]`` true if host memory that may hold the expert survived; None: no memory did.
            sealed: ``[L, E]`` true if survivors have sealed the expert at the same step; None: they sealed none.
        """
        self.run_ledger = self.run_ledger.empty()
        self.under_way.clear()
        self._stop_moving()
        self._generation += 1
        # A restart keeps only the checkpoint that it continues from, here and on peers.
        self.copied = to if to is self.copied and alive is not None else None
        self.newest = to
        self._log.forget()
        return None if to is None else self.run_ledger.return_to(to, alive, sealed)

    def move(self, steps: int, secs: float, checkpoints: int, counts: Counts) -> None:
        """Advance everything by ``steps`` and ``secs``, in a run that repeats itself."""
        self.run_ledger.move(steps, checkpoints, counts)
        books = self.run_ledger.sealing if self._tiered else self.run_ledger.pending
        for one in (*self.under_way, *self._sending):
            number = one.snapshot.identity.number
            one.snapshot, one.when = books.get(number, one.snapshot), one.when.later(secs)
            one.window = None if one.window is None else replace(one.window, start=one.window.start + steps)
            one.index += checkpoints
            one.anchored_at = None if one.anchored_at is None else later(one.anchored_at, steps)
        self._log.move(steps)
        self.moving, self.sends = (deque(at + secs for at in moments) for moments in (self.moving, self.sends))
        durables = [one.durable for one in self._sending] + [self.newest, self.copied]
        moved = {
            id(checkpoint): checkpoint.moved(steps, counts, stored=not self._tiered)
            for checkpoint in durables
            if checkpoint is not None
        }
        for one in self._sending:
            one.durable = moved.get(id(one.durable))
        self.newest, self.copied = moved.get(id(self.newest)), moved.get(id(self.copied))
        self.mover_free_secs += secs

    def pattern(self, step: int, now_secs: float) -> tuple[object, ...]:
        """A pattern that is equal at two decisions if the run repeats itself."""
        pending = tuple((step - one.snapshot.step, one.when.later(-now_secs)) for one in self.under_way)
        held = tuple(one.snapshot.contents for one in self.under_way)
        stored = (
            expert_indices(self._catalog, contents.brings(Tier.STORAGE, self._catalog.everything)) for contents in held
        )
        chosen = b"".join(experts.tobytes() for experts in stored)
        host_only = tuple(contents.memory_only for contents in held)
        moving = tuple(at - now_secs for at in (*self.moving, *self.sends))
        sending = tuple((step - one.snapshot.step, one.when.later(-now_secs)) for one in self._sending)
        idle = max(self.mover_free_secs - now_secs, 0.0)
        behind = tuple(
            None if checkpoint is None else step - checkpoint.step for checkpoint in (self.newest, self.copied)
        )
        last = None if self.run_ledger.last_step is None else step - self.run_ledger.last_step
        anchors, missed = self._log.pattern(self.anchors, step)
        flushes = tuple(one.flush_secs for one in self.under_way)
        books = anchors, flushes, *self.run_ledger.pattern(step)
        on_links = moving, len(self.sends), sending, missed, idle
        return (*books, chosen, pending, host_only, on_links, behind, last)
