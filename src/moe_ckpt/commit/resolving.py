"""Brings a copied snapshot to a committed checkpoint, together with the other ranks.

Storage errors fail one checkpoint and are reported; errors between ranks are raised, because nothing can be committed
without every rank.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
from dataclasses import dataclass, field, replace

from moe_ckpt.commit.commit import Committer, CoverDiffersError
from moe_ckpt.core.step import Fate, Superseded, WindowPlace
from moe_ckpt.errors import CoverageError, FilesGoneError, MoECheckpointError, NotFiniteError, SaveFailedError
from moe_ckpt.format.manifest import group_path
from moe_ckpt.ledger.coverage import prove_cover
from moe_ckpt.ports import Communicator
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.compiling import cover_difference
from moe_ckpt.slices.freshness import FreshnessWatch
from moe_ckpt.slices.snapshot import Snapshot
from moe_ckpt.slices.writing import Acknowledgement, acknowledge, decode_boxes, encode_boxes, seal_share, write_share
from moe_ckpt.tiers.tiers import BufferTier

log = logging.getLogger("moe_ckpt")

_FULL = os.strerror(errno.ENOSPC)
_NOT_CLEARED = "files of the failed checkpoint of step %d could not be removed, retrying: %s"
_NOT_REMOVED = "old checkpoints could not be removed after step %d: %s"
_NUMBERS = re.compile(r"\d[\d,]*")
"""What differs between two failures for one reason: steps, sizes, ranks."""


def announced(fate: Fate, comm: Communicator) -> Fate:
    """Returns rank 0's fate of a snapshot, on every rank."""
    message = json.dumps([fate.cause, fate.lost, fate.differs, fate.superseded]).encode()
    return Fate(*json.loads(comm.announce(message)))


@dataclass
class FailureCount:
    """Counts checkpoints that failed. The steps of a sparse window are one checkpoint together, and fail as one.

    Attributes:
        total: Of this life of the run.
        in_row: Since the last one that was committed.
    """

    total: int = 0
    in_row: int = 0
    _windows: set[int] = field(default_factory=set)

    def note(self, window: WindowPlace | None, *, committed: bool) -> bool:
        """Count one snapshot. Returns True if with it one more checkpoint has failed."""
        if committed:
            if window is None or window.is_last:
                self.in_row = 0
                self._windows.clear()
            return False
        if window is not None:
            if self.has_failed(window):
                return False
            self._windows.add(window.start)
        self.total += 1
        self.in_row += 1
        return True

    def has_failed(self, window: WindowPlace) -> bool:
        """True if a step of this window failed already, so that the others are of no use."""
        return window.start in self._windows


class SnapshotResolver:
    """Writes this rank's share of each snapshot, and takes part in its commit. For the persist thread.

    Args:
        run: The session's.
        run_id: Of the store.
        committer: On rank 0; None elsewhere.
        tier: Takes each snapshot's buffer when its outcome is known.
    """

    def __init__(
        self,
        run: RunContext,
        run_id: str,
        committer: Committer | None,
        tier: BufferTier,
    ) -> None:
        self._storage = run.storage
        self._comm = run.comm
        self._run_id = run_id
        self._committer = committer
        self._tier = tier
        self._failures = FailureCount()
        self._watch = FreshnessWatch()
        self._reason = ""
        self._is_spoiled = False

    def resolve(self, snapshot: Snapshot) -> Fate:
        """Bring one snapshot to its end. All ranks, in the same order."""
        taken_at, window, refusal = time.perf_counter(), snapshot.contents.window, snapshot.refused
        if refusal is None and window is not None and self._failures.has_failed(window):
            refusal = "an earlier step of its window was not saved"
        acknowledged = Acknowledgement.failed(self._comm.rank, refusal) if refusal else self._write(snapshot)
        columns = self._comm.combine(acknowledged.columns)
        fate = Fate() if columns is None else self._commit(snapshot, Acknowledgement(*columns))
        fate = announced(fate, self._comm)
        if fate.differs:
            fate = announced(self._explain(snapshot), self._comm)
        failed = self._failures.note(window, committed=fate.committed)
        if fate.superseded and self._comm.rank:
            self._delete_own(fate.superseded, snapshot.step)
        if fate.cause is not None and self._comm.rank == 0:
            self._say_failed(snapshot.step, fate.cause, counted=failed)
        self._tier.ended(snapshot, committed=fate.committed)
        ended_at = time.perf_counter()
        return replace(
            fate,
            number=snapshot.identity.number,
            step=snapshot.step,
            persist_secs=ended_at - snapshot.began_at,
            nbytes=snapshot.nbytes,
            copy_secs=snapshot.copy.moving_secs,
            write_secs=ended_at - max(taken_at, snapshot.began_at + snapshot.copy.secs),
        )

    def looks_gone(self, directory: str) -> bool:
        """Returns whether a checkpoint is no longer on storage; False on all ranks but the first."""
        return self._committer is not None and self._committer.keeper.looks_gone(directory)

    def _say_failed(self, step: int, cause: str, *, counted: bool) -> None:
        """In full where a row of failures begins or has another reason, else in short."""
        reason = _FULL if _FULL in cause else _NUMBERS.sub("#", cause)
        in_row = self._failures.in_row
        if not counted:
            log.info("the checkpoint of step %d was not committed; training continues. %s", step, cause)
        elif in_row > 1 and reason == self._reason:
            again = "the checkpoint of step %d was not committed either, for the same reason (%d in a row)"
            log.warning(again, step, in_row)
        else:
            advice = " Make room there, or keep fewer checkpoints (retention)." if reason == _FULL else ""
            log.warning("the checkpoint of step %d was not committed; training continues. %s.%s", step, cause, advice)
        self._reason = reason

    def _explain(self, snapshot: Snapshot) -> Fate:
        """All ranks tell rank 0 what they wrote, box by box, and it finds out why that is not what was planned."""
        boxes = [box for part in snapshot.written for box in part.boxes]
        columns = self._comm.combine([encode_boxes(boxes)])
        if columns is None:
            return Fate()
        try:
            prove_cover(f"checkpoint of step {snapshot.step}", snapshot.plan.claimed_boxes(), decode_boxes(*columns))
        except CoverageError as error:
            return Fate(f"{type(error).__name__}: {error}")
        return Fate(f"the ranks' plans of step {snapshot.step} differ, although their shares cover it")

    def _write(self, snapshot: Snapshot) -> Acknowledgement:
        try:
            share = snapshot.share
            if share is None:
                share = seal_share(snapshot, self._run_id, self._comm.rank, self._comm.world_size)
                share = replace(share, freshness=self._watch.seen(snapshot, share.parts))
            records, state = write_share(self._storage, snapshot, share, self._comm.rank)
            if not share.not_finite():
                self._tier.offer(snapshot, share)
            spoiled = share.not_finite(written=True)
            return acknowledge(records, state, cover_difference(snapshot.plan), share.freshness, spoiled)
        except Exception as error:  # whatever it is, the other ranks are waiting for an answer
            return Acknowledgement.failed(self._comm.rank, f"{type(error).__name__}: {error}")

    def _commit(self, snapshot: Snapshot, acknowledged: Acknowledgement) -> Fate:
        """Commit on rank 0, and release what is superseded.

        Where that fails, what was written goes before any rank hears of it and writes on.
        """
        if self._committer is None:
            return Fate("rank 0 has no committer")
        keeper = self._committer.keeper
        try:
            manifest = self._committer.commit(snapshot, acknowledged)
        except (OSError, MoECheckpointError) as error:
            causes = error.causes if isinstance(error, SaveFailedError) else [f"{type(error).__name__}: {error}"]
            lost, differs = isinstance(error, FilesGoneError), isinstance(error, CoverDiffersError)
            try:
                keeper.clear_away(self._committer.abandon(snapshot, acknowledged))
            except (OSError, MoECheckpointError) as trouble:
                log.warning(_NOT_CLEARED, snapshot.step, trouble)
            return Fate("; ".join(causes), lost, differs)
        if manifest is not None:
            if manifest.not_finite and not self._is_spoiled:  # once, where checkpoints begin to hold NaN or infinity
                problem = NotFiniteError(f"the checkpoint of step {manifest.step}", manifest.not_finite)
                log.warning("%s: starts pass it over, and the newest finite one stays", problem)
            self._is_spoiled = bool(manifest.not_finite)
        try:
            if manifest is None:
                keeper.look_ahead(self._committer.begun)
            return Fate(superseded=keeper.collect(self._committer.superseded()))
        except (OSError, MoECheckpointError) as error:
            log.warning(_NOT_REMOVED, snapshot.step, error)
            return Fate()

    def _delete_own(self, superseded: Superseded, step: int) -> None:
        """Deletes this rank's files that rank 0 has released; rank 0 deletes its own. The rest is reported again."""
        try:
            for directory, (whole, groups) in superseded.items():
                for group in groups:
                    self._storage.delete(group_path(directory, self._comm.rank, group))
                if whole:
                    self._storage.delete_dir(directory)
        except OSError as error:
            log.warning(_NOT_REMOVED, step, error)
