"""The threads that a copied snapshot passes through.

Where memory outlives the process a first thread seals each snapshot, so that a storage that is stuck holds up no memory
checkpoint; the persist thread brings those for storage to their end. Each takes them in order, one at a time. Errors
between ranks end the persist thread, because nothing can be committed without every rank, and surface at the next
``raise_fatal``.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from moe_ckpt.commit.commit import NOT_COVERED, Committer
from moe_ckpt.core.step import Contents, Facts, Fate, PeerPart, Superseded, WindowPlace
from moe_ckpt.core.tokens import NO_COUNTS
from moe_ckpt.errors import (
    CoverageError,
    FilesGoneError,
    MemoryFullError,
    MemoryGoneError,
    NotFiniteError,
    SaveFailedError,
)
from moe_ckpt.format.manifest import group_path
from moe_ckpt.format.slot import GRADIENTS, TENSORS, SlotHeader, SlotPart, encode_slot
from moe_ckpt.ledger.coverage import prove_cover
from moe_ckpt.memory.slot import Slot
from moe_ckpt.policies.base import needs_of
from moe_ckpt.ports import Communicator
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.checksums import Checker
from moe_ckpt.slices.compiling import HOST_ONLY
from moe_ckpt.slices.snapshot import (
    Acknowledgement,
    FreshnessWatch,
    Snapshot,
    SnapshotPart,
    acknowledge,
    decode_boxes,
    encode_boxes,
    seal_snapshot,
    write_share,
)
from moe_ckpt.threads import ThreadName, named_thread
from moe_ckpt.tiers.memory_tier import MemoryTier

log = logging.getLogger("moe_ckpt")

_REMEMBERED = 64
"""How many fates are remembered: far more than there can be between two optimizer steps."""
_LONGEST_UNSEEN_SECS = 1.0
_TICK_SECS = 1e-6
_FULL = os.strerror(errno.ENOSPC)
_NOT_CLEARED = "files of the failed checkpoint of step %d could not be removed, retrying: %s"
_NOT_REMOVED = "old checkpoints could not be removed after step %d: %s"
_NUMBERS = re.compile(r"\d[\d,]*")
"""What differs between two failures for one reason: steps, sizes, ranks."""


class SnapshotThread:
    """A thread that brings snapshots to their end, in order, one at a time.

    Args:
        resolve: Brings one snapshot to its end, on the thread, and returns its fate on storage, if this decides that.
            What it raises ends the thread.
        looks_gone: Says whether a checkpoint is no longer on storage (``StoreKeeper.looks_gone``); None on ranks that
            do not look.

    Attributes:
        in_flight: Snapshots that it was told to ``expect`` and has not brought to their end.
        fatal: The error that ended it, until that is raised.
    """

    def __init__(
        self,
        name: ThreadName,
        resolve: Callable[[Snapshot], Fate | None],
        looks_gone: Callable[[str], bool] | None = None,
    ) -> None:
        self._resolve = resolve
        self._looks_gone = looks_gone
        self._looked = "", 0.0  # the checkpoint that was gone, and when to look again
        self._taken: tuple[int, float] | None = None
        self._queue: queue.SimpleQueue[Snapshot | str | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.in_flight = 0
        self._fates: deque[Fate] = deque(maxlen=_REMEMBERED)
        self.fatal: BaseException | None = None
        self._through = False
        self._afterwards: Callable[[], None] = lambda: None
        self._thread = named_thread(name, self._run)
        self._thread.start()

    def expect(self) -> None:
        """Counts a snapshot that will be submitted as ``in_flight`` from now on."""
        with self._changed:
            self.in_flight += 1

    def submit(self, snapshot: Snapshot) -> None:
        """Hands over a snapshot that the thread was told to ``expect``. On any thread."""
        self._queue.put(snapshot)

    @property
    def writing(self) -> tuple[int, float] | None:
        """Returns (step, seconds since this thread took it up) of the snapshot under way; None if none is."""
        with self._changed:
            return None if self._taken is None else (self._taken[0], time.monotonic() - self._taken[1])

    def is_gone(self, directory: str) -> bool:
        """Returns whether a checkpoint was gone from storage when the thread looked last.

        If the thread has nothing to write, it looks again now.
        """
        with self._changed:
            gone, due = self._looked
            if gone != directory and not self.in_flight and time.monotonic() >= due:
                self._looked = "", math.inf
                self._queue.put(directory)
        return gone == directory

    def _look(self, directory: str) -> None:
        began = time.monotonic()
        gone = self._looks_gone is not None and self._looks_gone(directory)
        took = time.monotonic() - began
        with self._changed:  # a look takes 1 % of the time at most, where storage is slow, and else follows soon
            self._looked = directory if gone else "", began + min(100 * took, _LONGEST_UNSEEN_SECS)

    def fates(self, after: int) -> list[Fate]:
        """Returns the last fates with a number greater than ``after``, in order."""
        with self._changed:
            return [fate for fate in self._fates if fate.number > after]

    def wait(self, in_flight: int, timeout_secs: float) -> bool:
        """Wait until at most ``in_flight`` snapshots are unresolved; False if the time ran out.

        Raises what ended the thread, if anything did.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._through or self.in_flight <= in_flight, timeout_secs)
            done = done and self.in_flight <= in_flight
        self.raise_fatal()
        return done

    def raise_fatal(self) -> None:
        """Raise, once, the error that ended the thread."""
        with self._changed:
            error, self.fatal = self.fatal, None
        if error is not None:
            raise error

    def close(self, timeout_secs: float, afterwards: Callable[[], None] = lambda: None) -> bool:
        """Stop after what is queued.

        Args:
            timeout_secs: Longest wait for that.
            afterwards: Called when the thread has written its last: here, or by the thread itself.

        Returns:
            False if the thread still runs.
        """
        self._queue.put(None)
        self._thread.join(timeout_secs)
        with self._changed:
            if not self._through:
                self._afterwards = afterwards
                return False
        afterwards()
        return True

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, str):
                    self._look(item)
                    continue
                with self._changed:
                    self._taken = item.step, time.monotonic()
                fate = self._resolve(item)
                del item  # a reference to a snapshot keeps its memory from being freed
                with self._changed:
                    self.in_flight -= 1
                    self._taken = None
                    self._fates += () if fate is None else (fate,)
                    self._changed.notify_all()
        except BaseException as error:  # the thread's boundary: kept for raise_fatal on the training thread
            self.fatal = error
        finally:
            with self._changed:
                self._through = True
                self._changed.notify_all()
            try:
                self._afterwards()
            except OSError as error:  # nobody waits for this thread any more
                log.warning("the store could not be released: %s", error)


def announce_fate(fate: Fate, comm: Communicator) -> Fate:
    """Returns rank 0's fate of a snapshot, on every rank."""
    message = json.dumps([fate.cause, fate.lost, fate.superseded]).encode()
    return Fate(*json.loads(comm.announce(message)))


@dataclass
class FailureCount:
    """Counts checkpoints that failed. The steps of a sparse window are one checkpoint together, and fail as one.

    Attributes:
        total: How many failed in this life of the run.
        in_row: How many failed since the last one that was committed.
    """

    total: int = 0
    in_row: int = 0
    _windows: set[int] = field(default_factory=set)

    def note(self, window: WindowPlace | None, *, committed: bool) -> bool:
        """Counts a snapshot that has ended. Returns whether one more checkpoint has failed by it."""
        if committed:
            if window is None or window.is_last:
                self.in_row = 0
                self._windows.clear()
            return False
        if self.has_failed(window):
            return False
        if window is not None:
            self._windows.add(window.start)
        self.total += 1
        self.in_row += 1
        return True

    def has_failed(self, window: WindowPlace | None) -> bool:
        """Returns whether a step of this window has failed, so that its other steps are of no use."""
        return window is not None and window.start in self._windows


class MemorySealer:
    """Makes the header of each snapshot's slot. For the thread that seals.

    Args:
        run: The session's.
        tier: Keeps the slots.
        to_storage: Takes each snapshot that also goes to storage, or that is made from one for storage, in order.
        checker: Takes checksums.
    """

    def __init__(
        self, run: RunContext, tier: MemoryTier, to_storage: Callable[[Snapshot], None], checker: Checker
    ) -> None:
        self._comm = run.comm
        self._tier = tier
        self._to_storage, self._checker = to_storage, checker
        self._headers = SlotHeaders(run)
        self._watch = FreshnessWatch()
        self._said: set[str] = set()
        self._is_spoiled = False

    def resolve(self, snapshot: Snapshot) -> None:
        """Seal this rank's share. After an error the other ranks are told, and the snapshot may still go to storage."""
        trouble, header = snapshot.refused, list[bytes]()
        try:
            if trouble is None:
                writer = snapshot.contents.writer(self._comm.rank)
                seal_snapshot(snapshot, writer, self._comm.world_size, self._checker)
                snapshot.freshness = self._watch.seen(snapshot)
                trouble = self._spoiled(snapshot)
                header = [] if trouble else self._seal_somehow(snapshot)
        except Exception as error:  # whatever it is, the other ranks must learn that this one has nothing
            trouble = f"{type(error).__name__}: {error}"
            log.warning("memory does not hold the checkpoint of step %d: %s", snapshot.step, trouble)
            if isinstance(error, MemoryGoneError):
                self._tier.forget_gone()
            if snapshot.sealed is None:
                snapshot.refused = trouble
        if snapshot.refused is not None and snapshot.contents.since is not None and snapshot.refused not in self._said:
            self._said.add(snapshot.refused)
            log.warning("step %d of the gradient log is not kept: %s", snapshot.step, snapshot.refused)
        self._tier.sealed(snapshot, header)
        if snapshot.contents.to_storage:
            self._to_storage(snapshot)

    def _seal_somehow(self, snapshot: Snapshot) -> list[bytes]:
        """Seal, on a full file system at the expense of headers that are needed less."""
        while True:
            try:
                self._tier.files.describe()
                return self._seal(snapshot)
            except MemoryFullError:
                if not self._tier.give_up() and not self._tier.files.shrink():
                    raise

    def _spoiled(self, snapshot: Snapshot) -> str | None:
        """Why the snapshot is not sealed, though storage may have it: the newest that memory holds stays a finite one.
        Said once, where snapshots begin to hold NaN or infinity."""
        first, before = snapshot.not_finite(), self._is_spoiled
        self._is_spoiled = bool(first)
        if not first:
            return None
        problem = NotFiniteError(f"step {snapshot.step}", f"{first} on rank {self._comm.rank}")
        if not before:
            log.warning("memory keeps the newest finite step: %s", problem)
        return f"{type(problem).__name__}: {problem}"

    def _seal(self, snapshot: Snapshot) -> list[bytes]:
        """Headers of the slots, as peers get them, that of the snapshot's own after those of gradients beside it; none
        if something lies in private memory, for want of room."""
        own_slot, headers = snapshot.buffer.slot, list[bytes]()
        piece_slots = [buffer.slot for buffer in snapshot.pieces if buffer.slot is not None]
        if own_slot is None or len(piece_slots) < len(snapshot.pieces):
            return headers
        sealed_pieces = (snapshot.sealed or ())[len(snapshot.plan.share_parts) :]
        for index, sealed, slot in zip(snapshot.plan.slots, sealed_pieces, piece_slots, strict=True):
            headers.append(encode_slot(self._headers.of_gradients(snapshot, index, sealed)))
            slot.seal(headers[-1])
        # The one that says which others belong to it comes last: it is never there without them.
        return [*headers, self._seal_own(snapshot, own_slot)]

    def _seal_own(self, snapshot: Snapshot, slot: Slot) -> bytes:
        header = self._headers.of_share(snapshot)
        full, _ = snapshot.plan.claims.saved(snapshot.contents.full)
        raw = encode_slot(header, full)
        slot.seal(raw)
        sent_parts = tuple(part for part in header.parts if part.kind != HOST_ONLY)
        if snapshot.contents.to_peers is not PeerPart.STORED or len(sent_parts) == len(header.parts):
            return raw
        sent_nbytes = max(1, snapshot.plan.own_nbytes(host_only=False))
        return encode_slot(replace(header, parts=sent_parts, nbytes=sent_nbytes, sent=True), full)


class SlotHeaders:
    """Makes headers for one rank of one life, on one thread.

    Args:
        run: The session's.
    """

    def __init__(self, run: RunContext) -> None:
        self._rank, self._ranks, self._catalog = run.comm.rank, run.comm.world_size, run.catalog
        needs = needs_of(run.policy)
        self._names_gradients = needs.gradients and needs.partial  # else they are of all others

    def of_gradients(self, snapshot: Snapshot, index: int, sealed: SnapshotPart) -> SlotHeader:
        """Returns the header of a slot of gradients. It does not repeat the facts that the share's header has.

        Args:
            snapshot: That the gradients belong to.
            index: Of the gradients, among those of the snapshot.
            sealed: The gradients.
        """
        part = SlotPart(sealed.compiled.kind, 0, b"".join(sealed.header))
        return self._header(
            snapshot,
            nbytes=max(1, sealed.compiled.nbytes),
            contents=Contents((), since=snapshot.contents.since),
            facts=Facts(snapshot.facts.index, snapshot.facts.base, NO_COUNTS),
            parts=(part,),
            state=b"",
            only=GRADIENTS,
            gradient_slot=index,
        )

    def of_share(self, snapshot: Snapshot) -> SlotHeader:
        """Returns the header of the slot that has a rank's share of a snapshot. Waits for the step's tokens."""
        contents, everything = snapshot.contents, self._catalog.everything
        without_state = contents.on_behalf_of is not None and contents.is_whole(everything)
        _, saved = snapshot.plan.claims.saved(contents.full)
        if len(saved) < len(contents.full):
            contents = replace(contents, full=tuple(map(everything.__getitem__, saved.tolist())))
        if not self._names_gradients:
            contents = replace(contents, gradients=())
        sealed_parts = (snapshot.sealed or ())[: len(snapshot.plan.share_parts)]
        return self._header(
            snapshot,
            nbytes=max(1, snapshot.plan.own_nbytes()),
            contents=contents,
            facts=replace(snapshot.facts, applied=snapshot.applied.result()),
            parts=tuple(SlotPart(part.compiled.kind, part.begin, b"".join(part.header)) for part in sealed_parts),
            state=snapshot.state_file,
            only=TENSORS if without_state else "",
            gradient_slots=snapshot.plan.slots,
        )

    def _header(self, snapshot: Snapshot, **of_slot: Any) -> SlotHeader:
        """of_slot: fields of this slot alone."""
        return SlotHeader(
            snapshot.identity,
            rank=snapshot.contents.writer(self._rank),
            sealer=self._rank if snapshot.identity.parting else None,
            world_size=self._ranks,
            freshness=snapshot.freshness,
            **of_slot,
        )


class SnapshotResolver:
    """Writes this rank's share of each snapshot, and takes part in its commit. For the persist thread.

    Args:
        run: The session's.
        committer: On rank 0; None elsewhere.
        tier: Takes each snapshot's buffer when its outcome is known.
        checker: Takes checksums.
    """

    def __init__(self, run: RunContext, committer: Committer | None, tier: MemoryTier, checker: Checker) -> None:
        self._storage, self._checker = run.storage, checker
        self._comm = run.comm
        self._committer = committer
        self._tier = tier
        self._failures = FailureCount()
        self._watch = FreshnessWatch()
        self._reason = ""
        self._is_spoiled = False
        self._headers = None if tier.outlives_process else SlotHeaders(run)

    def resolve(self, snapshot: Snapshot) -> Fate:
        """Writes and commits one snapshot, or says why it failed. A collective: all ranks, in the same order."""
        taken_at, window, refusal = time.perf_counter(), snapshot.contents.window, snapshot.refused
        if refusal is None and self._failures.has_failed(window):
            refusal = "an earlier step of its window was not saved"
        acknowledged = Acknowledgement.failed(self._comm.rank, refusal) if refusal else self._write(snapshot)
        columns = self._comm.combine(acknowledged.columns)
        fate = Fate()
        if columns is not None and self._committer is not None:
            fate = self._commit(self._committer, snapshot, Acknowledgement(*columns))
        fate = announce_fate(fate, self._comm)
        if fate.cause == NOT_COVERED:
            fate = announce_fate(self._explain(snapshot), self._comm)
        failed = self._failures.note(window, committed=fate.committed)
        if fate.superseded and self._comm.rank:
            self._delete_own(fate.superseded, snapshot.step)
        if fate.cause is not None and self._comm.rank == 0:
            self._say_failed(snapshot.step, fate.cause, counted=failed)
        self._tier.ended(snapshot, committed=fate.committed)
        ended_at, nbytes, copy = time.perf_counter(), snapshot.nbytes, snapshot.copy
        write_secs = ended_at - max(taken_at, snapshot.began_at + copy.secs)
        rates = {
            "copy_bytes_per_sec": nbytes / max(copy.moving_secs, _TICK_SECS),
            "persist_bytes_per_sec": nbytes / max(write_secs, _TICK_SECS),
        }
        return replace(
            fate,
            number=snapshot.identity.number,
            step=snapshot.step,
            persist_secs=ended_at - snapshot.began_at,
            rates=rates if nbytes else {},
        )

    def _say_failed(self, step: int, cause: str, *, counted: bool) -> None:
        """Warns of a failure: in full for the first of several in a row and for a new reason, then of each second,
        fourth, eighth and so on in short."""
        reason = _FULL if _FULL in cause else _NUMBERS.sub("#", cause)
        in_row = self._failures.in_row
        if not counted:
            log.info("the checkpoint of step %d was not committed; training continues. %s", step, cause)
        elif in_row > 1 and reason == self._reason:
            again = "the checkpoint of step %d was not committed either, for the same reason (%d in a row)"
            log.log(logging.INFO if in_row & (in_row - 1) else logging.WARNING, again, step, in_row)
        else:
            advice = " Make room there, or keep fewer checkpoints (retention)." if reason == _FULL else ""
            log.warning("the checkpoint of step %d was not committed; training continues. %s.%s", step, cause, advice)
        self._reason = reason

    def _explain(self, snapshot: Snapshot) -> Fate:
        """Sends rank 0 the boxes that each rank wrote, from which it finds why they are not what was planned."""
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
            if snapshot.sealed is None:
                seal_snapshot(snapshot, self._comm.rank, self._comm.world_size, self._checker)
                snapshot.freshness = self._watch.seen(snapshot)
            records, state = write_share(self._storage, snapshot, self._comm.rank)
            if self._headers is not None and snapshot.contents.window is None and not snapshot.not_finite():
                self._tier.offer(snapshot, self._headers.of_share(snapshot))  # a step of a window is no checkpoint
            spoiled = snapshot.not_finite(written=True)
            return acknowledge(records, state, snapshot.plan.cover_difference, snapshot.freshness, spoiled)
        except Exception as error:  # whatever it is, the other ranks are waiting for an answer
            return Acknowledgement.failed(self._comm.rank, f"{type(error).__name__}: {error}")

    def _commit(self, committer: Committer, snapshot: Snapshot, acknowledged: Acknowledgement) -> Fate:
        """Commits on rank 0, and deletes what is superseded.

        If that fails, the step's files are deleted before any rank hears of it and writes on.
        """
        keeper = committer.keeper
        try:
            manifest = committer.commit(snapshot, acknowledged)
        except Exception as error:  # no thread to be had, for instance: training goes on
            causes = error.causes if isinstance(error, SaveFailedError) else [f"{type(error).__name__}: {error}"]
            try:
                keeper.clear_away(committer.abandon(snapshot, acknowledged))
            except Exception as trouble:  # likewise
                log.warning(_NOT_CLEARED, snapshot.step, trouble)
            return Fate("; ".join(causes), isinstance(error, FilesGoneError))
        if manifest is not None:
            if manifest.not_finite and not self._is_spoiled:  # once, where checkpoints begin to hold NaN or infinity
                problem = NotFiniteError(f"the checkpoint of step {manifest.step}", manifest.not_finite)
                log.warning("%s: starts pass it over, and the newest finite one stays", problem)
            self._is_spoiled = bool(manifest.not_finite)
        try:
            if manifest is None:
                keeper.look_ahead(committer.begun)
            return Fate(superseded=keeper.collect(committer.superseded()))
        except Exception as error:  # likewise
            log.warning(_NOT_REMOVED, snapshot.step, error)
            return Fate()

    def _delete_own(self, superseded: Superseded, step: int) -> None:
        """Deletes this rank's files that no checkpoint needs. Rank 0 names again what could not be deleted."""
        try:
            for directory, (whole, groups) in superseded.items():
                for group in groups:
                    self._storage.delete(group_path(directory, self._comm.rank, group))
                if whole:
                    self._storage.delete_dir(directory)
        except OSError as error:
            log.warning(_NOT_REMOVED, step, error)
