"""Simulated snapshots: under way, and durable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import Window
from moe_ckpt.run.run_ledger import InFlight
from moe_ckpt_sim.run.moving_versions import MovingLedger, later


@dataclass(frozen=True)
class Durable:
    """A checkpoint that survives a failure.

    Attributes:
        step: Step of its state.
        ledger: The ledger as of ``step``, with the tokens that its experts have seen.
        anchored_at: ``[operators]`` steps of the anchors from which a log of gradients leads to ``step``; None without
            a log, or for one of a single step.
    """

    step: int
    ledger: MovingLedger
    index: int
    window: Window | None
    anchored_at: Counts | None = None

    def moved(self, steps: int, counts: Counts, *, stored: bool = True) -> Durable:
        """Returns the checkpoint that a run that repeats itself has ``steps`` later.

        Args:
            stored: See ``MovingLedger.move``.
        """
        ledger = self.ledger.as_of(self.ledger.tokens.applied)
        ledger.move(steps, counts, stored=stored)
        window = None if self.window is None else replace(self.window, start=self.window.start + steps)
        anchored_at = None if self.anchored_at is None else later(self.anchored_at, steps)
        return Durable(self.step + steps, ledger, self.index, window, anchored_at)


class When(NamedTuple):
    """The times at which a snapshot arrives.

    Attributes:
        ready_secs: When it is durable; with peers, when it is in the memory of its own ranks.
        sent_secs: When all peers have it, too; None if it does not go to peers.
    """

    ready_secs: float
    sent_secs: float | None = None

    def later(self, secs: float) -> When:
        """Returns both times, ``secs`` later."""
        return When(self.ready_secs + secs, None if self.sent_secs is None else self.sent_secs + secs)


@dataclass
class UnderWay:
    """A checkpoint that is being written, or sent to peers.

    Attributes:
        snapshot: Its entry in the ledger.
        window: The sparse window that it ends.
        flush_secs: Time to write it to storage once it is durable; None if it does not go there.
        anchored_at: As in ``Durable``.
        durable: The durable checkpoint, as soon as it is one.
    """

    snapshot: InFlight
    when: When
    index: int
    window: Window | None = None
    flush_secs: float | None = None
    anchored_at: Counts | None = None
    durable: Durable | None = None


class Backup:
    """The newest checkpoint on storage, and the one flush at a time that brings the next.

    Times are absolute seconds of the run.

    Attributes:
        durable: The checkpoint on storage; None until there is one.
        begun_secs: When the newest flush began.
        was_cut_off: A failure cut off a flush, and none has begun since.
    """

    def __init__(self) -> None:
        self.durable: Durable | None = None
        self.begun_secs = 0.0
        self.was_cut_off = False
        self._coming: Durable | None = None
        self._sequence: int | None = None
        self._ends_secs = 0.0

    def begin(self, durable: Durable, at_secs: float, takes_secs: float, sequence: int | None = None) -> None:
        """Begin to write ``durable`` to storage at ``at_secs``.

        Args:
            sequence: Number of its snapshot, if storage has its own ledger.
        """
        self._coming, self._sequence, self._ends_secs = durable, sequence, at_secs + takes_secs
        self.begun_secs, self.was_cut_off = at_secs, False

    def cut_off(self) -> None:
        """Drop the flush under way, at a failure."""
        self.was_cut_off = self.was_cut_off or self._coming is not None
        self._coming = None

    def arrived(self, now_secs: float) -> int | None:
        """Complete the flush under way if it has ended by ``now_secs``.

        Returns:
            The number of the snapshot that has arrived, if it has one.
        """
        if self._coming is None or self._ends_secs > now_secs:
            return None
        self.durable, self._coming = self._coming, None
        return self._sequence

    @property
    def ends_secs(self) -> float | None:
        """When the flush under way ends; None if there is none."""
        return None if self._coming is None else self._ends_secs

    @property
    def step(self) -> int:
        """Step of the newest checkpoint on storage or on its way there; 0 if there is none."""
        newest = self._coming or self.durable
        return 0 if newest is None else newest.step
