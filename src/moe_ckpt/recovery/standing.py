"""Whether a run may go on from what memory holds, beside what storage has."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moe_ckpt.core.memory_shares import MemoryCheckpoint
from moe_ckpt.ports import Communicator
from moe_ckpt.recovery.slot_views import age_of

log = logging.getLogger("moe_ckpt")


class Standing:
    """Decides alike on every rank; rank 0 says once why not. On the training thread.

    Args:
        comm: The ranks.
        stored: Directories of the checkpoints on storage.
    """

    def __init__(self, comm: Communicator, stored: Sequence[str]) -> None:
        self._comm, self._stored = comm, stored
        self._said: set[str] = set()

    def may_use(self, checkpoint: MemoryCheckpoint) -> bool:
        """Whether the run can go on from it, and storage does not say that it must not."""
        return self.stands(checkpoint) and self._fits(checkpoint)

    def stands(self, checkpoint: MemoryCheckpoint) -> bool:
        """Whether storage still has what it had when the checkpoint began, or what replaced that.

        It has not if somebody went back by removing checkpoints, or by putting an older copy of the store in its place:
        what memory holds would undo that.
        """
        base, begun = age_of(checkpoint.base), checkpoint.generation
        stands = not checkpoint.base or any(
            name == checkpoint.base or (age_of(name)[0] == begun and age_of(name) > base) for name in self._stored
        )
        if not stands:
            self._say(
                checkpoint.base,
                "memory holds step %d, which came after %s. That checkpoint is not on storage any more, so memory is "
                "not used",
                checkpoint.step,
                checkpoint.base,
            )
        return stands

    def _fits(self, checkpoint: MemoryCheckpoint) -> bool:
        """Whether this run can make the updates of a gradient log once more; others are left for dense checkpoints."""
        ranks = self._comm.world_size
        fits = not checkpoint.is_log or checkpoint.writers == ranks
        if not fits:
            self._say(
                "log",
                "memory holds a gradient log up to step %d, which %d ranks wrote. This run has %d, which cannot make "
                "its updates once more: the newest dense checkpoint is taken instead. To go on from step %d, stop now "
                "and start %d ranks",
                checkpoint.step,
                checkpoint.writers,
                ranks,
                checkpoint.step,
                checkpoint.writers,
            )
        return fits

    def _say(self, about: str, words: str, *values: object) -> None:
        if self._comm.rank == 0 and about not in self._said:
            self._said.add(about)
            log.warning(words, *values)
