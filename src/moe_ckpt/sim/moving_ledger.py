"""A trainer's ledger that a simulated run advances by many steps at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import Tier
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.engine.run_ledger import Pending, RunLedger
from moe_ckpt.sim.durable import Durable


class MovingRunLedger(RunLedger):
    """A trainer's ledger that can record many steps at once, and be moved ahead in time.

    Steps recorded together route equally, and time-decayed activity is set to its limit under them.

    Args:
        stores: Storage has its own ledger; without, what is durable stands for it.
        watched: The policy reads these at each step, as a budget for lost tokens does.
    """

    def __init__(
        self, catalog: Catalog, *, outlives_process: bool = False, stores: bool = False, watched: bool = False
    ) -> None:
        super().__init__(catalog, outlives_process=outlives_process)
        self._stores, self._watched = stores, watched

    def empty(self) -> MovingRunLedger:
        """The ledger that a new life begins with."""
        return MovingRunLedger(
            self.catalog, outlives_process=self.outlives_process, stores=self._stores, watched=self._watched
        )

    def routed_often(self, counts: Counts, steps: int) -> None:
        """``steps`` optimizer steps, each of which routed ``counts`` [L, E]."""
        if steps >= 1:
            self.tokens.apply(counts * steps)
            self.activity.add_often(counts, steps)

    def _missing(self, under_way: Sequence[Pending]) -> tuple[str, ...]:
        """The first checkpoint of a run is dense, whatever the policy: after it, nothing is, but on storage."""
        if self.last_step is None or not self._stores:
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
        """All inputs of policies, relative to ``step``: equal at two steps if the run repeats itself.

        Where memory outlives the process, most policies look at storage only when it is due.
        """
        resting = self.outlives_process and not self._watched
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
