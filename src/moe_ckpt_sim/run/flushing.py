"""The schedule of flushes from memory to storage, and the facts that a policy gets about both."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from moe_ckpt.core.cadence import StorageCadence, StorageFacts
from moe_ckpt.core.step import Tier
from moe_ckpt.policies.base import PolicyContext
from moe_ckpt_sim.cluster.clock import on_clock
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.run.state import SimulatedState


class Flushing:
    """The flushes of one system, as of the current ``state``.

    Most systems flush what is complete in memory. A system whose policy plans for memory and storage separately
    (``Needs.tiers``) begins a snapshot for storage when one is due.
    """

    def __init__(self, costs: Costs, state: SimulatedState) -> None:
        self._costs, self._state = costs, state
        self._cadence: StorageCadence | None = costs.system.cadence
        self._tiered = costs.system.tiered

    @property
    def secs(self) -> float:
        """Time to write the complete checkpoint in memory: of a window all slots, of a partial one all state."""
        newest = self._state.track.newest
        return self._costs.storage_secs(self._costs.bytes_of.held(newest.window if newest else None))

    def _facts(self, step: int) -> StorageFacts:
        """The facts for the cadence at ``step``. The beginning of a run counts as on storage."""
        state, track = self._state, self._state.track
        return StorageFacts(
            step=step,
            last_step=track.backup.step,
            secs_since=state.now - track.backup.begun_secs,
            flush_secs=self.secs,
            iteration_secs=self._costs.iteration.secs,
            failures=state.failures,
            run_secs=state.now,
        )

    @property
    def is_due(self) -> bool:
        """True if memory's complete checkpoint is to be flushed now, at once if a failure cut off the last flush."""
        backup, newest = self._state.track.backup, self._state.track.newest
        if self._tiered or self._cadence is None or newest is None or newest.step <= backup.step:
            return False
        return backup.ends_secs is None and (backup.was_cut_off or self._cadence.due(self._facts(newest.step)))

    @property
    def next_is_due(self) -> bool:
        """True if the snapshot that begins now goes to storage, as the first one always does."""
        track = self._state.track
        if self._cadence is None or track.backup.ends_secs is not None or track.flush_is_coming:
            return False
        first = track.backup.durable is None and track.newest is None
        return first or track.backup.was_cut_off or self._cadence.due(self._facts(self._state.step))

    def begin(self) -> None:
        """Begin to write the newest checkpoint in memory to storage."""
        state = self._state
        if state.track.newest is not None:
            state.track.backup.begin(state.track.newest, state.now, on_clock(self.secs))

    def informed(self, context: PolicyContext) -> PolicyContext:
        """Returns the context with the facts about memory."""
        tiers = self._costs.system.memory_tiers | ({Tier.STORAGE} if self.next_is_due else set())
        memory = replace(context.memory, tiers=tiers, sends=self._costs.sends)
        # Without storage, checkpoints can be safe only in memory.
        run = replace(context.run, nothing_safe=context.run.nothing_safe and self._cadence is not None)
        return replace(context, run=run, memory=memory)

    def undisturbed_secs(self, otherwise: float) -> float:
        """Returns the time until which no flush interrupts the rounds.

        Args:
            otherwise: Time of another interruption.
        """
        track, newest = self._state.track, self._state.track.newest
        if self._cadence is None or newest is None:
            return otherwise
        if track.backup.ends_secs is not None:
            return min(otherwise, track.backup.ends_secs)
        if self._tiered and track.flush_is_coming:
            return self._state.now
        secs = self._cadence.next_secs(self._facts(newest.step))
        return otherwise if secs is None else min(otherwise, track.backup.begun_secs + on_clock(secs))

    def undisturbed_steps(self) -> float:
        """Returns the steps from here until which no flush interrupts the rounds."""
        track, newest = self._state.track, self._state.track.newest
        if self._cadence is None or newest is None or track.backup.ends_secs is not None:
            return inf
        step = self._state.step if self._tiered else newest.step
        due = self._cadence.next_step(self._facts(step))
        return inf if due is None else due - 1 - step
