"""The checkpoints of a simulated run: under way, durable, and what a failure returns to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.ledger import Ledger
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.core.window import Window
from moe_ckpt.engine.run_ledger import Pending, RunLedger


class MovingRunLedger(RunLedger):
    """A trainer's books that can be told of many steps at once, and moved ahead in time.

    Steps told together route alike, and time-decayed activity is taken at the limit to which that brings it.
    """

    def routed_often(self, counts: Counts, steps: int) -> None:
        """``steps`` optimizer steps, each of which routed ``counts`` [L, E]."""
        if steps >= 1:
            self.tokens.apply(counts * steps)
            self.activity.add_often(counts, steps)

    def _missing(self, under_way: Sequence[Pending]) -> tuple[str, ...]:
        """The first checkpoint of a run is dense, whatever the policy: after it, nothing is."""
        return self.catalog.everything if self.last_step is None else ()

    def return_to(self, checkpoint: Durable, alive: npt.NDArray[np.bool_] | None) -> FaultRecord:
        """As ``resume_from``, from a checkpoint that was never written. alive: see ``Track.fail``."""
        self.ledger = checkpoint.ledger.as_of(checkpoint.ledger.tokens.applied)
        self.index, self.last_step = checkpoint.index + 1, checkpoint.step
        self.committed_step = checkpoint.step
        return self.ledger.recover(checkpoint.step, alive)

    def move(self, steps: int, checkpoints: int, counts: Counts) -> None:
        """Everything as it would be ``steps`` later, in a run that does all the time what it did before.

        checkpoints: begun in that time.
        """
        self.ledger.move(steps, counts)
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
        return self.ledger.expert_ages(step).tobytes(), self.activity.described().hard.tobytes(), *unsaved


def moved(pending: Pending, steps: int, counts: Counts) -> Pending:
    """A snapshot under way, as it would be ``steps`` later."""
    window = None if pending.window is None else replace(pending.window, start=pending.window.start + steps)
    return replace(pending, step=pending.step + steps, applied=pending.applied + counts * steps, window=window)


@dataclass(frozen=True)
class Durable:
    """A checkpoint that outlives a failure.

    step: of the state it holds. ledger: as of ``step``, with what its experts have seen.
    """

    step: int
    ledger: Ledger
    index: int
    window: Window | None

    def moved(self, steps: int, counts: Counts) -> Durable:
        """As it would be ``steps`` later."""
        ledger = self.ledger.as_of(self.ledger.tokens.applied)
        ledger.move(steps, counts)
        window = None if self.window is None else replace(self.window, start=self.window.start + steps)
        return Durable(self.step + steps, ledger, self.index, window)


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
        self.run_ledger = MovingRunLedger(catalog)
        self.under_way: deque[UnderWay] = deque()
        self.moving: deque[float] = deque()
        self.newest: Durable | None = None
        self.backup: Durable | None = None
        self.flushed_secs = 0.0
        """When the newest flush to storage began."""
        self._backing: tuple[float, Durable] | None = None
        self.backup_lost = False
        """A failure cut off a flush, and none was begun since."""
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
        applied = self.run_ledger.tokens.applied.copy()
        pending = Pending(self._catalog, step, self._generation, operators, held, applied, {}, window, slot)
        self.under_way.append(UnderWay(self._sequence, pending, ready_secs, self.run_ledger.index))
        self.run_ledger.begun(self._sequence, pending)

    def resolve(self, now_secs: float) -> bool:
        """What has become durable by ``now_secs`` counts from now on; True if a checkpoint has."""
        before = self.newest
        while self.moving and self.moving[0] <= now_secs:
            self.moving.popleft()
        if self._backing is not None and self._backing[0] <= now_secs:
            self.backup, self._backing = self._backing[1], None
        while self.under_way and self.under_way[0].ready_secs <= now_secs:
            done = self.under_way.popleft()
            pending = self.run_ledger.resolved(done.sequence, committed=True)
            versions = self.run_ledger.ledger.as_of(pending.applied)
            self.newest = Durable(pending.step, versions, done.index, pending.window)
        return self.newest is not before

    def back_up(self, now_secs: float, takes_secs: float) -> None:
        """What is durable now is written to storage, too."""
        if self.newest is not None:
            self._backing, self.flushed_secs = (now_secs + takes_secs, self.newest), now_secs
        self.backup_lost = False

    @property
    def flush_ends_secs(self) -> float | None:
        """When what is on its way from memory to storage is there; None where nothing is."""
        return None if self._backing is None else self._backing[0]

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

    def fail(self, to: Durable | None, alive: npt.NDArray[np.bool_] | None = None) -> FaultRecord | None:
        """The run goes back to ``to``, or to its very beginning where that is None.

        alive: ``[L, E]`` whether host memory that may hold the expert is still there; None: nowhere.
        """
        self.run_ledger = MovingRunLedger(self._catalog)
        self.under_way.clear()
        self._stop_moving()
        self._generation += 1
        self.newest = to
        return None if to is None else self.run_ledger.return_to(to, alive)

    def move(self, steps: int, secs: float, checkpoints: int, counts: Counts) -> None:
        """Everything as it would be ``steps`` and ``secs`` later, in a run that repeats itself."""
        self.run_ledger.move(steps, checkpoints, counts)
        for one in self.under_way:
            one.pending, one.ready_secs = self.run_ledger.pending[one.sequence], one.ready_secs + secs
            one.index += checkpoints
        self.moving = deque(ready + secs for ready in self.moving)
        if self.newest is not None:
            self.newest = self.newest.moved(steps, counts)
        self.mover_free_secs += secs

    def pattern(self, step: int, now_secs: float) -> tuple[object, ...]:
        """Alike at two decisions if the run repeats itself."""
        pending = tuple((step - one.pending.step, one.ready_secs - now_secs) for one in self.under_way)
        chosen = b"".join(one.pending.experts.tobytes() for one in self.under_way)
        held = tuple(one.pending.host_only for one in self.under_way)
        moving = tuple(ready - now_secs for ready in self.moving)
        idle = max(self.mover_free_secs - now_secs, 0.0)
        window = None if self.run_ledger.window is None else self.order_of(self.run_ledger.window)
        behind = None if self.newest is None else step - self.newest.step
        last = None if self.run_ledger.last_step is None else step - self.run_ledger.last_step
        return (*self.run_ledger.pattern(step), chosen, pending, held, moving, idle, window, behind, last)
