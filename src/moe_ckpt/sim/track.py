"""The checkpoints of a simulated run: under way, durable, and what a failure returns to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import Tier
from moe_ckpt.core.tokens import Counts, FaultRecord, TokenBook
from moe_ckpt.core.window import Window
from moe_ckpt.engine.books import Books, Pending


class MovingBooks(Books):
    """A trainer's books that can be told of many steps at once, and moved ahead in time.

    Steps told together route alike, and time-decayed activity is taken at the limit to which that brings it.
    """

    def routed_often(self, counts: Counts, steps: int) -> None:
        """``steps`` optimizer steps, each of which routed ``counts`` [L, E]."""
        if steps < 1:
            return
        self.routed(counts * steps, soft=counts * steps)
        self._decayed = counts.astype(np.float64)
        self.popularity = counts

    def _missing(self, under_way: Sequence[Pending]) -> tuple[str, ...]:
        """The first checkpoint of a run is dense, whatever the policy: after it, nothing is."""
        return self.catalog.everything if self.last_step is None else ()

    def _hold(self, pending: Pending) -> None:
        """As in a trainer, but for the ledger, which only says what is missing."""
        self._committed_at[tuple(pending.experts.T)] = pending.step

    def window_begins(self) -> None:
        """What is counted since a window's first slot, which ``begun`` is not told of, begins anew."""
        self._hard, self._soft = np.zeros_like(self._hard), np.zeros_like(self._soft)

    def return_to(self, checkpoint: Durable, alive: npt.NDArray[np.bool_] | None) -> FaultRecord:
        """As ``adopt``, from a checkpoint that was never written. alive: see ``Track.fail``."""
        tokens = book_of(checkpoint.tokens.applied.copy(), checkpoint.tokens)
        kept = tokens.saved.get(Tier.HOST)
        held = None if alive is None or kept is None else np.where(alive, kept, 0)
        fault = self._go_on(tokens, checkpoint.step, checkpoint.index, held)
        self.committed_step = checkpoint.step
        self._committed_at = checkpoint.copies.copy()
        return fault

    def move(self, steps: int, checkpoints: int, counts: Counts) -> None:
        """Everything as it would be ``steps`` later, in a run that does all the time what it did before.

        checkpoints: begun in that time.
        """
        tokens = self.tokens
        tokens.applied = tokens.applied + counts * steps
        tokens.saved = {tier: saved + counts * steps for tier, saved in tokens.saved.items()}
        self._committed_at = np.where(self._committed_at < 0, self._committed_at, self._committed_at + steps)
        self.index += checkpoints
        self.last_step = None if self.last_step is None else self.last_step + steps
        self.committed_step = None if self.committed_step is None else self.committed_step + steps
        if self.window is not None:
            self.window = replace(self.window, start=self.window.start + steps)
        self.pending = {key: moved(pending, steps, counts) for key, pending in self.pending.items()}

    def pattern(self, step: int) -> tuple[bytes, ...]:
        """Everything that policies go by, as seen from ``step``: alike at two steps if the run repeats itself."""
        tiers = sorted(self.tokens.saved)
        unsaved = [(self.tokens.applied - self.tokens.saved[tier]).tobytes() for tier in tiers]
        ages = np.where(self._committed_at < 0, -1, step - self._committed_at)
        return ages.tobytes(), self._hard.tobytes(), *unsaved


def moved(pending: Pending, steps: int, counts: Counts) -> Pending:
    """A snapshot under way, as it would be ``steps`` later."""
    window = None if pending.window is None else replace(pending.window, start=pending.window.start + steps)
    return replace(pending, step=pending.step + steps, applied=pending.applied + counts * steps, window=window)


@dataclass(frozen=True)
class Durable:
    """A checkpoint that outlives a failure.

    step: of the state it holds. tokens: the book as of ``step``, with what its experts have seen. copies: ``[L, E]``
        step of each expert's copy.
    """

    step: int
    tokens: TokenBook
    copies: Counts
    index: int
    window: Window | None

    def moved(self, steps: int, counts: Counts) -> Durable:
        """As it would be ``steps`` later."""
        tokens = book_of(self.tokens.applied + counts * steps, self.tokens)
        tokens.saved = {tier: saved + counts * steps for tier, saved in self.tokens.saved.items()}
        window = None if self.window is None else replace(self.window, start=self.window.start + steps)
        copies = np.where(self.copies < 0, self.copies, self.copies + steps)
        return Durable(self.step + steps, tokens, copies, self.index, window)


def book_of(applied: Counts, like: TokenBook) -> TokenBook:
    """A token book with the same faults and saved counts, and other tokens applied."""
    book = TokenBook(like.layers, like.experts)
    book.applied, book.saved, book.faults = applied, dict(like.saved), list(like.faults)
    return book


@dataclass
class UnderWay:
    """ready_secs: when it is durable."""

    sequence: int
    pending: Pending
    ready_secs: float
    index: int


class Track:
    """Books, snapshots under way, and the durable checkpoint that a failure returns to.

    Times are absolute seconds of the run. ``newest`` is None until something is durable. moving: when each snapshot
    that is still in a buffer, a window's slots among them, is durable. backup: what is on storage beside the peers.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.books = MovingBooks(catalog)
        self.under_way: deque[UnderWay] = deque()
        self.moving: deque[float] = deque()
        self.newest: Durable | None = None
        self.backup: Durable | None = None
        self._backing: tuple[float, Durable] | None = None
        self.backup_lost = False
        """A failure cut off a backup, and none was begun since."""
        self.mover_free_secs = 0.0
        self._sequence = 0
        self._generation = 0
        self._ordered: tuple[Window, int] | None = None

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
        self, step: int, operators: tuple[str, ...], held: tuple[str, ...], ready_secs: float, window: Window | None
    ) -> None:
        """A snapshot of ``step`` begins; of a window, only its last slot is told, which makes it a checkpoint."""
        self._sequence += 1
        slot = window.size - 1 if window else 0
        applied = self.books.tokens.applied.copy()
        pending = Pending(self._catalog, step, self._generation, operators, held, applied, {}, window, slot)
        self.under_way.append(UnderWay(self._sequence, pending, ready_secs, self.books.index))
        self.books.begun(self._sequence, pending)

    def settle(self, now_secs: float) -> bool:
        """What has become durable by ``now_secs`` counts from now on; True if a checkpoint has."""
        before = self.newest
        while self.moving and self.moving[0] <= now_secs:
            self.moving.popleft()
        if self._backing is not None and self._backing[0] <= now_secs:
            self.backup, self._backing = self._backing[1], None
        while self.under_way and self.under_way[0].ready_secs <= now_secs:
            done = self.under_way.popleft()
            pending = self.books.resolved(done.sequence, committed=True)
            tokens = book_of(pending.applied, self.books.tokens)
            tokens.saved = {tier: counts.copy() for tier, counts in tokens.saved.items()}
            self.newest = Durable(pending.step, tokens, self.books.expert_steps(), done.index, pending.window)
        return self.newest is not before

    def back_up(self, ready_secs: float) -> None:
        """What is durable now is on storage, too, from ``ready_secs`` on."""
        if self.newest is not None:
            self._backing = ready_secs, self.newest
        self.backup_lost = False

    def drop(self) -> None:
        """Snapshots under way are lost, but training goes on from where it is."""
        while self.under_way:
            self.books.resolved(self.under_way.pop().sequence, committed=False)
        self._stop_moving()

    def _stop_moving(self) -> None:
        self.moving.clear()
        self.backup_lost = self.backup_lost or self._backing is not None
        self.mover_free_secs, self._backing = 0.0, None

    def fail(self, to: Durable | None, alive: npt.NDArray[np.bool_] | None = None) -> FaultRecord | None:
        """The run goes back to ``to``, or to its very beginning where that is None.

        alive: ``[L, E]`` whether host memory that may hold the expert is still there; None: nowhere.
        """
        self.books = MovingBooks(self._catalog)
        self.under_way.clear()
        self._stop_moving()
        self._generation += 1
        self.newest = to
        return None if to is None else self.books.return_to(to, alive)

    def move(self, steps: int, secs: float, checkpoints: int, counts: Counts) -> None:
        """Everything as it would be ``steps`` and ``secs`` later, in a run that repeats itself."""
        self.books.move(steps, checkpoints, counts)
        for one in self.under_way:
            one.pending, one.ready_secs = self.books.pending[one.sequence], one.ready_secs + secs
            one.index += checkpoints
        self.moving = deque(ready + secs for ready in self.moving)
        if self.newest is not None:
            self.newest = self.newest.moved(steps, counts)
        self.mover_free_secs += secs

    def pattern(self, step: int, now_secs: float) -> tuple[object, ...]:
        """Alike at two decisions if the run repeats itself."""
        pending = tuple((step - one.pending.step, one.ready_secs - now_secs) for one in self.under_way)
        chosen = b"".join(one.pending.experts.tobytes() for one in self.under_way)
        held = tuple(one.pending.held for one in self.under_way)
        moving = tuple(ready - now_secs for ready in self.moving)
        idle = max(self.mover_free_secs - now_secs, 0.0)
        window = None if self.books.window is None else self.order_of(self.books.window)
        behind = None if self.newest is None else step - self.newest.step
        last = None if self.books.last_step is None else step - self.books.last_step
        return (*self.books.pattern(step), chosen, pending, held, moving, idle, window, behind, last)
