"""Simulated snapshots, under way and durable, and the ledger of versions that a failure returns to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import AtRisk, Counts, FaultRecord
from moe_ckpt.core.window import Window
from moe_ckpt.ledger.ledger import NEVER, Ledger, Versions
from moe_ckpt.run.run_ledger import InFlight


def later(numbers: Counts, steps: int) -> Counts:
    """Returns the steps of anchors or versions as they would be ``steps`` later; ``NEVER`` stays never."""
    return np.where(numbers == NEVER, NEVER, numbers + steps)


class MovingLedger(Ledger):
    """The ledger of a simulated run: what a failure returns to is a copy of it, and many equal steps are one."""

    def as_of(self, applied: Counts, memory: MovingLedger | None = None, tiers: Iterable[Tier] = ()) -> MovingLedger:
        """A copy of it when ``applied`` ``[L, E]`` tokens had been routed: what a failure returns to.

        Without anchors: the life after it begins its log anew.

        Args:
            applied: See above.
            memory: A copy made before, whose versions in ``tiers`` are taken: those may have later ones by now.
            tiers: Which.
        """
        copied = MovingLedger(self.catalog)
        copied.tokens.applied = applied.copy()
        copied.tokens.faults = list(self.tokens.faults)
        copied.at_risk = self.at_risk
        copied._stored, copied._built_upon = self._stored.copy(), self._built_upon.copy()
        copied._mandatory = dict(self._mandatory)
        before = {} if memory is None else {tier: memory for tier in tiers if tier in memory.tokens.saved}
        sources = dict.fromkeys(self.tokens.saved, self) | before
        copied.tokens.saved = {tier: of.tokens.saved[tier].copy() for tier, of in sources.items()}
        copied._in_memory = {tier: of._in_memory[tier].copy() for tier, of in sources.items() if tier in of._in_memory}
        return copied

    def steps(self, tier: Tier) -> Counts:
        """``[operators]`` step of the newest version of each operator in ``tier``; ``NEVER`` where there is none."""
        versions = self._stored if tier is Tier.STORAGE else self._in_memory.get(tier) or Versions(self.catalog)
        return versions.numbers[:-1].copy()

    def recover(self, step: int, seen: Counts) -> FaultRecord:
        """Book a return to this very state of ``step``, after which memory holds nothing more.

        Args:
            step: Of the state.
            seen: ``[L, E]`` tokens seen by the experts that came from memory; 0 where they came from storage.
        """
        self._in_memory.clear()
        return self.tokens.recover(step, seen)

    def move(self, steps: int, counts: Counts, *, stored: bool = True) -> None:
        """Everything as it would be ``steps`` later, in a run that routes ``counts`` ``[L, E]`` at each.

        Args:
            stored: Storage has got, meanwhile, what it got before; else it has what it had.
        """
        routed = counts * steps
        self.tokens.applied = self.tokens.applied + routed
        self.at_risk = AtRisk(self.at_risk.lacking, self.at_risk.routed + routed)
        resting = () if stored else (Tier.STORAGE,)
        self.tokens.saved = {
            tier: saved if tier in resting else saved + routed for tier, saved in self.tokens.saved.items()
        }
        for versions in (*((self._stored,) if stored else ()), *self._in_memory.values()):
            versions.numbers = later(versions.numbers, steps)
        self.anchors.steps = later(self.anchors.steps, steps)


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
