"""The persist thread: from a copied snapshot to a committed checkpoint, in order, one at a time.

Storage errors fail one checkpoint and are reported; errors between ranks end the thread, because nothing
can be committed without every rank, and surface at the next ``raise_fatal``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from moe_ckpt.engine.commit import Committer
from moe_ckpt.engine.host_tier import HostTier, hold
from moe_ckpt.engine.keeping import StoreKeeper
from moe_ckpt.engine.outcomes import FailureCount, Outcome
from moe_ckpt.engine.snapshot import Snapshot
from moe_ckpt.engine.writing import Acknowledgement, write_share
from moe_ckpt.errors import FilesGoneError, MoECheckpointError, TornSnapshotError
from moe_ckpt.ports import Communicator
from moe_ckpt.storage.base import Storage

log = logging.getLogger("moe_ckpt")

_REMEMBERED = 64
"""Resolutions kept; far more than can come between two optimizer steps."""
_KEEP_ALIVE_SECS = 60.0


@dataclass(frozen=True)
class Resolution:
    """How one snapshot ended.

    persist_secs: from its beginning to its end. nbytes: of this rank's tensors, which took ``copy_secs`` to host memory
    and ``write_secs`` from there to the end. lost: see ``Outcome``.
    """

    sequence: int
    step: int
    directory: str
    committed: bool
    cause: str | None
    persist_secs: float
    nbytes: int = 0
    copy_secs: float = 0.0
    write_secs: float = 0.0
    lost: bool = False


class Persister:
    """Owns the persist thread of one rank.

    committer, keeper: on rank 0, who commits and who keeps the store in order; None elsewhere.
    tier: takes each snapshot's buffer when its outcome is known.
    max_failures: after so many checkpoints that failed in a row training is about to stop, and nothing more is tried.
    keep_alive: called on rank 0 about once a minute (renews the lock of a remote store); what it raises
        is kept for ``raise_fatal`` unless it is a passing error of the storage.
    """

    def __init__(
        self,
        storage: Storage,
        comm: Communicator,
        run_id: str,
        committer: Committer | None,
        keeper: StoreKeeper | None,
        tier: HostTier,
        max_failures: int,
        keep_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._storage = storage
        self._comm = comm
        self._run_id = run_id
        self._committer = committer
        self._keeper = keeper
        self._tier = tier
        self._max_failures = max_failures
        self._failures = FailureCount()
        self._taken: tuple[int, float] | None = None
        self._keep_alive = keep_alive
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._in_flight = 0
        self._resolutions: deque[Resolution] = deque(maxlen=_REMEMBERED)
        self._fatal: BaseException | None = None
        self._ended = self._through = False
        self._afterwards: Callable[[], None] = lambda: None
        self._renewed = time.monotonic()
        # A daemon: a peer that is gone must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="moe_ckpt-persist", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
        with self._changed:
            self._in_flight += 1
        self._queue.put(snapshot)

    @property
    def in_flight(self) -> int:
        with self._changed:
            return self._in_flight

    @property
    def writing(self) -> tuple[int, float] | None:
        """(step, seconds since this thread took it up) of the snapshot that is being written; None if none is."""
        with self._changed:
            return None if self._taken is None else (self._taken[0], time.monotonic() - self._taken[1])

    def resolutions(self, after: int) -> list[Resolution]:
        """The last resolutions with a sequence greater than ``after``, in order."""
        with self._changed:
            return [r for r in self._resolutions if r.sequence > after]

    def wait(self, in_flight: int, timeout_secs: float) -> bool:
        """Wait until at most ``in_flight`` snapshots are unresolved; False if the time ran out.

        Raises what ended the thread, if anything did.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._ended or self._in_flight <= in_flight,
                timeout_secs,
            )
            done = done and self._in_flight <= in_flight
        self.raise_fatal()
        return done

    def raise_fatal(self) -> None:
        """Raise, once, the error that ended the thread."""
        with self._changed:
            error, self._fatal = self._fatal, None
        if error is not None:
            raise error

    def close(self, timeout_secs: float, afterwards: Callable[[], None]) -> bool:
        """Stop after what is queued; False if the thread still runs after ``timeout_secs``.

        afterwards: called when the thread has written its last: here, or by the thread itself.
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
            while (snapshot := self._next()) is not None:
                with self._changed:
                    self._taken = snapshot.step, time.monotonic()
                resolution = self._persist(snapshot)
                self._tier.settle(snapshot.buffer, committed=resolution.committed)
                with self._changed:
                    self._in_flight -= 1
                    self._taken = None
                    self._resolutions.append(resolution)
                    self._changed.notify_all()
        except BaseException as error:  # the thread's boundary: kept for raise_fatal on the training thread
            with self._changed:
                self._fatal, self._ended = error, True
                self._changed.notify_all()
        finally:
            with self._changed:
                self._through = True
            try:
                self._afterwards()
            except OSError as error:  # nobody waits for this thread any more
                log.warning("the store could not be let go of: %s", error)

    def _next(self) -> Snapshot | None:
        """The next snapshot, or None at the end; keeps the store's lock alive meanwhile."""
        while True:
            try:
                return self._queue.get(timeout=_KEEP_ALIVE_SECS)
            except queue.Empty:
                self._renew_lock()

    def _renew_lock(self) -> None:
        """Renew the lock when it is time. Raises ``StoreInUseError``, which ends the thread, if it was lost."""
        if self._comm.rank or time.monotonic() - self._renewed < _KEEP_ALIVE_SECS:
            return
        try:
            self._keep_alive()
            self._renewed = time.monotonic()
        except OSError as error:
            log.warning("the lock of the store could not be renewed, it is tried again: %s", error)

    def _persist(self, snapshot: Snapshot) -> Resolution:
        self._renew_lock()
        taken_at = time.perf_counter()
        refusal = snapshot.refused or self._refusal(snapshot)
        acknowledgement = Acknowledgement(self._comm.rank, refusal) if refusal else self._write(snapshot)
        gathered = self._comm.gather(acknowledgement.encode())
        outcome = Outcome() if gathered is None else self._commit(snapshot, gathered)
        outcome = Outcome.decode(self._comm.announce(outcome.encode()))
        failed = self._failures.note(snapshot.window, snapshot.slot, committed=outcome.cause is None)
        if outcome.cause is None:
            self._collect_garbage(snapshot.step)
        elif self._comm.rank == 0:
            log.log(
                logging.WARNING if failed else logging.INFO,
                "the checkpoint of step %d was not committed; training goes on. %s",
                snapshot.step,
                outcome.cause,
            )
        ended_at = time.perf_counter()
        return Resolution(
            snapshot.sequence,
            snapshot.step,
            snapshot.directory,
            outcome.cause is None,
            outcome.cause,
            ended_at - snapshot.began_at,
            snapshot.nbytes,
            snapshot.copy.secs,
            ended_at - max(taken_at, snapshot.began_at + snapshot.copy.secs),
            outcome.lost,
        )

    def _refusal(self, snapshot: Snapshot) -> str | None:
        """Why there is no use in writing this snapshot, alike on every rank; None if there is."""
        if snapshot.window is not None and self._failures.has_failed(snapshot.window):
            return "an earlier step of its window was not saved"
        if self._failures.in_row >= self._max_failures:
            return f"{self._failures.in_row} checkpoints before it failed in a row"
        return None

    def _write(self, snapshot: Snapshot) -> Acknowledgement:
        try:
            snapshot.copy.wait_on_host()
            if snapshot.copy.changed:
                raise TornSnapshotError(snapshot.step, snapshot.copy.changed)
            written = write_share(self._storage, snapshot, self._run_id, self._comm.rank, self._comm.world_size)
            if snapshot.keep:
                self._tier.offer(hold(snapshot, self._run_id, tuple(header for _, header in written.files)))
            return written
        except Exception as error:  # whatever it is, the other ranks are waiting for an answer
            return Acknowledgement(self._comm.rank, f"{type(error).__name__}: {error}")

    def _commit(self, snapshot: Snapshot, gathered: list[bytes]) -> Outcome:
        """Commit on rank 0. Where that fails, what was written goes before any rank hears of it and writes on."""
        if self._committer is None or self._keeper is None:
            return Outcome("rank 0 has no committer")
        acknowledgements: list[Acknowledgement] = []
        try:
            acknowledgements += [Acknowledgement.decode(raw) for raw in gathered]
            self._committer.commit(snapshot, acknowledgements)
            return Outcome()
        except (OSError, MoECheckpointError) as error:
            outcome = Outcome(f"{type(error).__name__}: {error}", lost=isinstance(error, FilesGoneError))
        try:
            self._keeper.clear_away(self._committer.abandon(snapshot, acknowledgements))
        except (OSError, MoECheckpointError) as error:
            log.warning(
                "what the checkpoint of step %d left could not be removed, it is tried again: %s", snapshot.step, error
            )
        return outcome

    def _collect_garbage(self, step: int) -> None:
        if self._committer is None or self._keeper is None:
            return
        try:
            self._keeper.collect(self._committer.superseded())
        except (OSError, MoECheckpointError) as error:
            log.warning("old checkpoints could not be removed after step %d: %s", step, error)
