"""What ranks sealed of the newest step when training stopped (``survivors``), laid over an older checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from moe_ckpt.format.manifest import Manifest, pruned
from moe_ckpt.ledger.freshness import STALE
from moe_ckpt.reading.memory.memory_checkpoints import SURVIVORS_SUFFIX, MemoryCheckpoints
from moe_ckpt.reading.memory.memory_shares import MemoryCheckpoint, Share, checkpoints_of
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.reading.memory.slot_views import LaidSnapshots, SnapshotFacts
from moe_ckpt.reading.reader import StoreReader


class KeptState:
    """The kept state of ranks that lived on; the same on every rank. On the training thread.

    Args:
        memory: What slots hold.
        ranks: Of the run.
    """

    def __init__(self, memory: MemoryCheckpoints, ranks: int) -> None:
        self._memory, self._ranks = memory, ranks

    @property
    def generation(self) -> int:
        """Newest life that memory has anything of."""
        return max((share.generation for share in self._memory.shares), default=0)

    def steps(self) -> list[int | None]:
        """Returns of each rank the newest step that it sealed; None where it sealed none.

        Of the newest life that memory has anything of, if that had as many ranks.
        """
        steps: list[int | None] = [None] * self._ranks
        for share in self._sealed():
            steps[share.writer] = max(share.step, steps[share.writer] or 0)
        return steps

    def _sealed(self) -> list[Share]:
        """What ranks sealed of their own in the newest life, whole and fresh."""
        return [
            share
            for share in self._memory.shares
            if share.is_own_at_parting
            and share.freshness != STALE
            and (share.generation, share.writers) == (self.generation, self._ranks)
        ]

    def of_step(self, step: int) -> MemoryCheckpoint:
        """Returns what ranks sealed of a step that ``steps`` tells."""
        identity = self.generation, step
        sealed = (one for one in checkpoints_of(self._memory.shares) if one.is_parting)
        return next(one for one in sealed if (one.generation, one.step) == identity)

    def ask(
        self,
        sealed: MemoryCheckpoint,
        recounted: Collection[int],
        reader: StoreReader,
        manifest: Manifest,
        opened: OpenedMemory | None,
    ) -> Callable[[], OpenedMemory]:
        """Hears from all ranks what they sealed of the newest step. A collective; reads no slice.

        Args:
            sealed: See ``of_step``.
            recounted: Ranks that compute that step again. Its tokens are then without theirs, unless the ranks had
                agreed on them.
            reader: Of the older checkpoint.
            manifest: Of the same. Of a sparse window, each operator is taken as of its anchor.
            opened: The same, if memory gives something of it.

        Returns:
            Opens it; no collective. Raises ``MoECheckpointError`` if this rank cannot.
        """
        [described] = self._memory.describe([sealed], recounted)
        return lambda: self._laid_over(sealed, described, reader, manifest, opened)

    def _laid_over(
        self,
        sealed: MemoryCheckpoint,
        described: SnapshotFacts,
        reader: StoreReader,
        manifest: Manifest,
        opened: OpenedMemory | None,
    ) -> OpenedMemory:
        memory, facts = self._memory, described.require_facts(sealed.step)
        is_last = manifest.step == sealed.step  # a window that ends with that step has its plain state as well
        [part] = memory.parts(sealed, [described], SURVIVORS_SUFFIX if is_last else "")
        view = LaidSnapshots(list(manifest.files), dict(manifest.operators))
        view.slots |= {} if opened is None else opened.slots.files
        host_only = part.host_only
        others = frozenset(stored.entry.operator for stored in part.slices()) - host_only
        covered = memory.covered(part, host_only | others, manifest, reader)
        view.lay(part, described, stored=sorted(covered & others), host_only=sorted(covered & host_only))
        view.slots |= part.files
        view.brought_to(described.contents, facts)
        beneath = opened.beneath if opened is not None else manifest
        whole = memory.whole(sealed, facts, view.operators, beneath)
        states = tuple(state for state in part.states if state.rank in _own_writers(sealed))
        whole = replace(whole, states=manifest.states if is_last else states)
        whole = pruned(whole, view.files, {part.directory, manifest.directory} if is_last else {part.directory})
        overlaid, slots = memory.reading(whole, view.slots_of(whole), [part])
        return OpenedMemory(overlaid, slots, whole, beneath, view.fresh)


def _own_writers(checkpoint: MemoryCheckpoint) -> set[int]:
    """Ranks whose share is there as they sealed it themselves."""
    return {writer for snapshot in checkpoint.snapshots for writer, shares in snapshot.items() if not shares[0].is_lent}
