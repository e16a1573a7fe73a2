"""What is said of checkpoints in memory beside what storage has."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moe_ckpt.core.quantities import name_ranks
from moe_ckpt.format.manifest import age_of, step_dir
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.memory.memory_shares import MemoryCheckpoint, Share, checkpoints_of, newer_than

log = logging.getLogger("moe_ckpt")


_GONE = (
    "%s is gone from storage, or its MANIFEST.json is, and memory has steps up to %d that follow it: the run goes on "
    "from there as far as memory has everything. If you removed it in order to go back, stop, run moe-ckpt memory "
    "clear on every node, and start again"
)


class Standing:
    """Knows what storage has, alike on every rank. On the training thread.

    Args:
        comm: The ranks.
        stored: Directories of the checkpoints on storage, newest first, as rank 0 lists them.

    Attributes:
        stored: As given.
    """

    def __init__(self, comm: Communicator, stored: Sequence[str]) -> None:
        self._comm, self.stored = comm, stored

    def follows_what_is_gone(self, checkpoint: MemoryCheckpoint) -> bool:
        """Returns whether storage lacks the checkpoint that this one builds on, and what replaced that.

        A file was lost, or a user removed checkpoints, or restored an older copy of the store.
        """
        base, begun = age_of(checkpoint.base), checkpoint.generation
        return bool(checkpoint.base) and not any(
            name == checkpoint.base or (age_of(name)[0] == begun and age_of(name) > base) for name in self.stored
        )

    def say_gone(self, checkpoints: Sequence[MemoryCheckpoint]) -> None:
        """Says what is gone from storage that the newest of ``checkpoints`` follows."""
        newest = next(iter(checkpoints), None)
        newer = newest is not None and all((newest.generation, newest.step) > age_of(name) for name in self.stored)
        if newest is not None and newer and self.follows_what_is_gone(newest) and self._comm.rank == 0:
            announce(_GONE, newest.base, newest.step, level=logging.WARNING)


def say_unusable(directory: str, reasons: Sequence[str]) -> None:
    """Logs each reason once, with the ranks that gave it, unless all did.

    Args:
        directory: Of a checkpoint in memory.
        reasons: Why it cannot be used, of each rank; empty where it can.
    """
    for reason in dict.fromkeys(filter(None, reasons)):
        ranks = [rank for rank, other in enumerate(reasons) if other == reason]
        where = "" if len(ranks) == len(reasons) else f" by {name_ranks(ranks)}"
        log.warning("%s in memory cannot be used%s: %s", directory, where, reason)


def checkpoint_in(shares: Sequence[Share], directory: str) -> MemoryCheckpoint:
    """Returns the checkpoint of this name that memory has whole, or else has a part of: rather of what was due than of
    what survivors sealed, which is then laid over that."""
    candidates = [
        candidate for candidate in checkpoints_of(shares) if step_dir(candidate.step, candidate.generation) == directory
    ]
    return min(
        candidates,
        key=lambda candidate: 0 if candidate.is_complete else 1 + candidate.is_parting,
    )


def say_kept(shares: Sequence[Share], directory: str) -> None:
    """All ranks go back to this checkpoint: says which of them kept a newer step, if any did."""
    checkpoint = checkpoint_in(shares, directory)
    newer = newer_than(checkpoint, shares)
    if newer is None:
        return
    why = "the other ranks' state of it is lost: all continue from step %d, the newest that all of them have"
    if checkpoint.is_log:
        why = "the other ranks' gradients of it are lost: all ranks are restored to step %d by the log"
    if checkpoint.writers == 1:
        why = "it cannot be used: the run continues from step %d"
    ranks = name_ranks(newer.writers)
    announce(f"%s kept step %d when training stopped, but {why}", ranks, newer.step, checkpoint.step)
