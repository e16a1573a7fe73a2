"""Simulated snapshots: under way, and durable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_ckpt.core.anchors import later
from moe_ckpt.core.ledger import Ledger
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import Window
from moe_ckpt.engine.run_ledger import InFlight


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
        anchored_at = None if self.anchored_at is None else later(self.anchored_at, steps)
        return Durable(self.step + steps, ledger, self.index, window, anchored_at)


class When(NamedTuple):
    """When a snapshot is there.

    Attributes:
        ready_secs: Durable; with peers, in the memory of its own ranks.
        sent_secs: On all peers, too; None if it does not go there.
    """

    ready_secs: float
    sent_secs: float | None = None

    def later(self, secs: float) -> When:
        """The same, ``secs`` later."""
        return When(self.ready_secs + secs, None if self.sent_secs is None else self.sent_secs + secs)


@dataclass
class UnderWay:
    """A checkpoint that is being written, or sent to peers.

    Attributes:
        snapshot: Its entry in the ledger.
        window: The sparse window that it ends.
        flush_secs: What writing it to storage takes once it is durable, if it goes there.
        anchored_at: As ``Durable``'s.
        durable: The same, once it is.
    """

    snapshot: InFlight
    when: When
    index: int
    window: Window | None = None
    flush_secs: float | None = None
    anchored_at: Counts | None = None
    durable: Durable | None = None
