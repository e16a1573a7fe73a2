"""A recovery in which some pipeline stages go back: the others wait for them, and all go on together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.localized.attempt import LocalPart
from moe_ckpt.recovery.executing import Restored
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.session.session import CheckpointSession


class Rejoining:
    """This rank's part, until all ranks are of one step again. On the training thread.

    Args:
        part: In the recovery.
        joined: What all ranks go on from (``Restored.joined``).
        session: Goes on from it.

    Attributes:
        part: As given.
    """

    def __init__(self, part: LocalPart, joined: Restored, session: CheckpointSession) -> None:
        self.part = part
        self._joined, self._session = joined, session

    def wait(self) -> None:
        """Before the first step of a rank that keeps its state: waits for those that compute steps again.

        Does nothing on those.

        Raises:
            PeerLostError: One of them is gone.
        """
        if self.part.goes_back:
            return
        for _ in self.part.steps:
            self._session.comm.everyone(b"")  # so that no wait is longer than one step
            self._session.tier.left_slots.step_replayed(equal=True)
        self._go_on(None)

    def step_replayed(self, tokens: Deferred[StepTokens], *, last: bool) -> None:
        """See ``driver.guests.LocalizedRecovery``."""
        self._session.comm.everyone(b"")
        if last:
            self._go_on(tokens)

    def _go_on(self, tokens: Deferred[StepTokens] | None) -> None:
        """All ranks are together. tokens: Of the last step, on a rank that has computed it again."""
        joined = with_tokens(self._joined, self._recounted(tokens)) if self.part.recounts else self._joined
        self._session.resume_from(joined.manifest, **joined.going_on)

    def _recounted(self, tokens: Deferred[StepTokens] | None) -> Counts:
        """``[L, E]`` tokens of the ranks that go back, in the step on which all meet. A collective."""
        none = np.zeros_like(self._session.run_ledger.tokens.applied)
        mine = (lambda: none) if tokens is None else (lambda: tokens.result().applied)
        agreed = self._session.comm.start_agreement(mine, np.zeros(1, dtype=np.int64))
        return agreed.result()[0]


def with_tokens(joined: Restored, recounted: Counts) -> Restored:
    """Returns ``joined`` with tokens of the last step.

    Args:
        recounted: ``[L, E]``, of all ranks that go back.
    """
    tokens = joined.manifest.tokens
    applied = recounted + np.asarray(tokens["applied"], dtype=np.int64).reshape(recounted.shape)
    seen = joined.tokens_from_host  # every operator is as of the last step
    return replace(
        joined,
        manifest=replace(joined.manifest, tokens={**tokens, "applied": applied.tolist()}),
        tokens_from_host=None if seen is None else recounted + seen.reshape(recounted.shape),
    )
