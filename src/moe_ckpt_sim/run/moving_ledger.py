"""A trainer's ledger that a simulated run advances by many steps at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.policies.base import TOKENS
from moe_ckpt.recovery.recovery_plan import ABSENT, Inventory, RecoveryPlan, plan_recovery
from moe_ckpt.run.run_ledger import InFlight, RoutingActivity, RunLedger
from moe_ckpt_sim.run.durable import Durable, MovingLedger


class MovingActivity(RoutingActivity):
    """The activity of many equal steps at once."""

    def add_often(self, routed: Counts, steps: int) -> None:
        """Adds ``steps`` equal steps; time-decayed activity is set to its limit under them."""
        self.newest = routed
        self._hard = self._hard + routed * steps
        self._soft = self._soft + routed * steps
        self._decayed = routed.astype(np.float64)


class MovingRunLedger(RunLedger):
    """A trainer's ledger that can record many steps at once, and be moved ahead in time.

    Steps that are recorded together route equally, and time-decayed activity is set to its limit under them.

    Args:
        stores: Storage has its own ledger; otherwise a durable checkpoint counts as on storage.
        watched: The policy reads the ledger at each step, as one with a budget for lost tokens does.
    """

    def __init__(
        self, catalog: Catalog, *, outlives_process: bool = False, stores: bool = False, watched: bool = False
    ) -> None:
        super().__init__(catalog, outlives_process=outlives_process)
        self.ledger: MovingLedger = MovingLedger(catalog)
        self.activity: MovingActivity = MovingActivity(self.tokens.applied.shape)
        self._stores, self._watched = stores, watched

    def empty(self) -> MovingRunLedger:
        """Returns an empty ledger for a new life."""
        return MovingRunLedger(
            self.catalog, outlives_process=self.outlives_process, stores=self._stores, watched=self._watched
        )

    def routed_often(self, counts: Counts, steps: int) -> None:
        """Record ``steps`` optimizer steps, each of which routed ``counts`` [L, E]."""
        if steps >= 1:
            self.tokens.apply(counts * steps)
            self.activity.add_often(counts, steps)

    def _missing(self, under_way: Sequence[InFlight]) -> tuple[str, ...]:
        """The operators without a version: all before the first checkpoint, later only those that storage lacks."""
        if self.last_step is None or not self._stores:
            return self.catalog.everything if self.last_step is None else ()
        return super()._missing(under_way)

    def return_to(
        self, checkpoint: Durable, alive: npt.NDArray[np.bool_] | None, sealed: npt.NDArray[np.bool_] | None
    ) -> FaultRecord:
        """Resume from a simulated checkpoint, as ``resume_from`` does from a written one.

        Args:
            alive: As in ``Track.fail``.
            sealed: As in ``Track.fail``.
        """
        self.ledger = ledger = checkpoint.ledger.as_of(checkpoint.ledger.tokens.applied)
        if sealed is not None:
            experts = [op for op, at in self.catalog.expert_at.items() if sealed[at]]
            ledger.hold(tuple(experts), checkpoint.step, ledger.tokens.applied)
            alive = sealed if alive is None else alive | sealed
        self.index, self.last_step = checkpoint.index + 1, checkpoint.step
        self.committed_step = checkpoint.step
        step, inventories = checkpoint.step, tuple(_inventories(ledger, alive))
        plan = plan_recovery(f"step {step}", step, self.catalog.everything, inventories)
        fault = ledger.recover(step, _seen(ledger, plan))
        if self.outlives_process and alive is not None:
            self._rescued = self._newer()
        return fault

    def sealed(self, number: int, *, sent: bool) -> None:
        """Record that every rank has sealed a snapshot in its memory.

        Args:
            sent: It also goes to peers; then it is settled once they have it.
        """
        if not sent:
            self.in_memory(number, complete=True)
            return
        snapshot = self.sealing[number]
        operators = snapshot.contents.brings(Tier.HOST, self.catalog.everything)
        self.ledger.hold(operators, snapshot.step, snapshot.applied)
        self._rescued -= frozenset(operators)

    def move(self, steps: int, checkpoints: int, counts: Counts) -> None:
        """Advance everything by ``steps``, in a run that repeats itself.

        Args:
            checkpoints: Number of checkpoints that begin in that time.
        """
        self.ledger.move(steps, counts, stored=not self.outlives_process)
        self.index += checkpoints
        self.last_step = None if self.last_step is None else self.last_step + steps
        self.committed_step = None if self.committed_step is None else self.committed_step + steps
        if self.window is not None:
            self.window = replace(self.window, start=self.window.start + steps)
        self.sealing = {number: moved(snapshot, steps, counts) for number, snapshot in self.sealing.items()}
        # A snapshot on its way from memory to storage does not move.
        if not self.outlives_process:
            self.pending = {number: moved(snapshot, steps, counts) for number, snapshot in self.pending.items()}

    def pattern(self, step: int) -> tuple[bytes, ...]:
        """All inputs of policies relative to ``step``, which are equal at two steps if the run repeats itself.

        If memory outlives the process, most policies read storage only when it is due.
        """
        resting = self.outlives_process and not self._watched
        tiers = sorted(tier for tier in self.tokens.saved if not (resting and tier is Tier.STORAGE))
        unsaved = [(self.tokens.applied - self.tokens.saved[tier]).tobytes() for tier in tiers]
        ages = [self.ledger.expert_ages(step)]
        if self.outlives_process:
            ages = [step - self.ledger.expert_steps(tier) for tier in tiers]
        hard = self.activity.popularity(TOKENS).tobytes()
        return *(steps.tobytes() for steps in ages), hard, repr(sorted(self.rescued)).encode(), *unsaved


def moved(snapshot: InFlight, steps: int, counts: Counts) -> InFlight:
    """Returns a snapshot under way, advanced by ``steps``."""
    identity, contents, window = snapshot.identity, snapshot.contents, snapshot.contents.window
    if window is not None:
        contents = replace(contents, window=replace(window, start=window.start + steps))
    identity, applied = replace(identity, step=identity.step + steps), snapshot.applied + counts * steps
    return replace(snapshot, identity=identity, contents=contents, applied=applied)


def _inventories(ledger: MovingLedger, alive: npt.NDArray[np.bool_] | None) -> Iterator[Inventory]:
    """Yields the sources that a failure leaves, nearest first; their sizes are not needed and are 0.

    Args:
        ledger: The ledger as of the checkpoint that the run returns to.
        alive: As in ``Track.fail``.
    """
    catalog = ledger.catalog
    nothing = np.zeros(len(catalog.operators), dtype=np.int64)
    if alive is not None:
        here = ledger.steps(Tier.HOST)
        places = catalog.expert_places
        here[places[~alive & (places >= 0)]] = ABSENT
        yield Inventory(Tier.HOST, "own memory", here, nothing)
        yield Inventory(Tier.PEER, "peers' memory", ledger.steps(Tier.PEER), nothing)
    yield Inventory(Tier.STORAGE, "storage", ledger.steps(Tier.STORAGE), nothing)
    # It covers experts that are in no snapshot, since they have seen no token.
    yield Inventory(Tier.STORAGE, "the run's beginning", nothing, nothing)


def _seen(ledger: MovingLedger, plan: RecoveryPlan) -> Counts:
    """Returns ``[L, E]`` tokens seen by the experts that ``plan`` takes from memory; 0 of others."""
    catalog, saved = ledger.catalog, ledger.tokens.saved
    tokens = np.zeros_like(ledger.tokens.applied)
    for number, source in enumerate(plan.sources):
        places = np.flatnonzero(plan.chosen == number)
        if source.tier is not Tier.STORAGE and len(places):
            at = tuple(catalog.layer_and_expert[places[catalog.is_expert[places]]].T)
            tokens[at] = saved[source.tier][at]
    return tokens
