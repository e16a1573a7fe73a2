"""A recovery in which some pipeline stages go back: the others wait for them, and all go on together."""

from __future__ import annotations

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.engine.agreement import StepTokens
from moe_ckpt.engine.deferred import Deferred
from moe_ckpt.engine.events import Observer, SessionEvent, StepReplayed
from moe_ckpt.engine.memory_tier import MemoryTier
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.localized.attempt import LocalPart
from moe_ckpt.ports import GradientRecord


def note_replayed(session: CheckpointSession, *, equal: bool) -> None:
    """A step was computed again, ``equal`` to the first time: the slots it began from are not what is wrong."""
    if session.tier.left_slots is not None:
        session.tier.left_slots.step_replayed(equal=equal)


def unlogged(gradients: GradientRecord | None) -> list[Observer]:
    """Returns who forgets the gradients of a step that is computed again, which are not logged."""

    def observe(event: SessionEvent) -> None:
        if isinstance(event, StepReplayed):
            record.forget()

    if gradients is None:
        return []
    record = gradients
    return [observe]


class Rejoining:
    """This rank's part, until all ranks are of one step again. On the training thread.

    Args:
        part: What was restored.
        session: Goes on from it.

    Attributes:
        part: As given.
        is_over: Whether all ranks are together.
    """

    def __init__(self, part: LocalPart, session: CheckpointSession) -> None:
        self.part, self.is_over = part, False
        self._session = session

    def wait(self) -> None:
        """Before the first step of a rank that keeps its state: waits for those that compute steps again.

        Does nothing on those, and the second time.

        Raises:
            PeerLostError: One of them is gone.
        """
        if self.part.goes_back or self.is_over:
            return
        for _ in self.part.steps:
            self._session.comm.everyone(b"")  # so that no wait is longer than one step
            note_replayed(self._session, equal=True)
        self._go_on(None)

    def diverged(self) -> None:
        """A step that this rank computed again is not what it was: at the next start all ranks go back."""
        tier = self._session.tier
        if isinstance(tier, MemoryTier):
            tier.files.note_divergence()

    def step_replayed(self, tokens: Deferred[StepTokens], *, last: bool) -> None:
        """A rank that goes back has computed a step again.

        Args:
            tokens: Of this rank in that step.
            last: It was the last one.

        Raises:
            PeerLostError: Another rank is gone.
        """
        self._session.comm.everyone(b"")
        if last:
            self._go_on(tokens)

    def _go_on(self, tokens: Deferred[StepTokens] | None) -> None:
        """All ranks are together. tokens: Of the last step, on a rank that has computed it again."""
        self.is_over = True
        part = self.part
        joined = part.joined_with(self._recounted(tokens)) if part.recounts else part.joined
        self._session.resume_from(joined.manifest, **joined.going_on)

    def _recounted(self, tokens: Deferred[StepTokens] | None) -> Counts:
        """``[L, E]`` tokens of the ranks that go back, in the step on which all meet. A collective."""
        none = np.zeros_like(self._session.run_ledger.tokens.applied)
        mine = (lambda: none) if tokens is None else (lambda: tokens.result().applied)
        agreed = self._session.comm.start_agreement(mine, np.zeros(1, dtype=np.int64))
        return agreed.result()[0]
