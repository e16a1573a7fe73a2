"""The port of the tiers in host memory: what keeps a rank's buffers once snapshots were copied into them.

``tiers.host_tier`` (of this process) and ``tiers.memory_tier`` (files that outlive it) implement it. Storage does
not, for its unit is the commit of all ranks (``commit.persisting``), not a buffer of one. What each of the three has
after a failure is told by a ``recovery.sources.Source``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from moe_ckpt.memory.left_slots import LeftSlots
from moe_ckpt.peers.replication import Replicator
from moe_ckpt.slices.snapshot import Snapshot
from moe_ckpt.slices.writing import SealedShare


class BufferTier(Protocol):
    """Owns the buffers of one rank that are kept for a recovery.

    For each snapshot that goes to storage the persist thread calls ``offer`` and then ``ended``; the training thread
    calls ``drop`` where it finds no buffer; ``retire`` ends it.

    Attributes:
        rank: This process's.
        outlives_process: It keeps snapshots by itself, whatever becomes of them on storage, and windows as well.
        replicator: Sends copies to peers; None without.
        left_slots: What earlier lives left.
    """

    rank: int
    outlives_process: bool
    replicator: Replicator | None
    left_slots: LeftSlots

    def offer(self, snapshot: Snapshot, share: SealedShare) -> None:
        """This rank's share is on storage, and will be acknowledged next."""
        ...

    def ended(self, snapshot: Snapshot, *, committed: bool) -> None:
        """The outcome on storage was announced: storage needs the snapshot's buffer no longer."""
        ...

    def drop(self, *, chain: bool = True, last: bool = False) -> bool:
        """Give up what only a fault would need, because there is no other room.

        Args:
            chain: Also the newest step of a gradient log, with all that it needs.
            last: Also what only later snapshots would make a checkpoint of.

        Returns:
            True if there was any.
        """
        ...

    def retire(self, *, keep: bool) -> None:
        """The session ended.

        Args:
            keep: It failed: what is kept stays for the next start of the run.
        """
        ...

    @property
    def retained_count(self) -> int:
        """Buffers of older snapshots that no next one gets."""
        ...

    @property
    def has_more(self) -> bool:
        """It keeps something that storage has in older versions only, or not at all."""
        ...

    @property
    def droppable_bytes(self) -> int:
        """Host memory that ``drop`` would free."""
        ...

    @property
    def nbytes(self) -> int:
        """Host memory that survives a failure."""
        ...

    @property
    def paths(self) -> Sequence[Path]:
        """Directories of what outlives the process."""
        ...
