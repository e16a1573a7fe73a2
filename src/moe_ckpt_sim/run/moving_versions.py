"""A trainer's ledger of versions that can be copied, and moved ahead in time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from moe_ckpt.core.plan import Tier
from moe_ckpt.core.tokens import AtRisk, Counts, FaultRecord
from moe_ckpt.ledger.ledger import NEVER, Ledger, Versions


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
