"""The threads that a copied snapshot passes through.

Where memory outlives the process a first thread seals each snapshot; the persist thread brings those for storage to
their end. Each takes them in order, one at a time. Errors between ranks end the persist thread, because nothing can be
committed without every rank, and surface at the next ``raise_fatal``.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from moe_ckpt.commit.resolving import SnapshotResolver
from moe_ckpt.core.step import Fate
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.snapshot import Snapshot
from moe_ckpt.threads import ThreadName, named_thread
from moe_ckpt.tiers.memory_tier import MemoryTier
from moe_ckpt.tiers.sealing import MemorySealer

log = logging.getLogger("moe_ckpt")

_REMEMBERED = 64
"""Fates remembered; far more than can come between two optimizer steps."""
_LONGEST_UNSEEN_SECS = 1.0


class SnapshotThread:
    """A thread that brings snapshots to their end, in order, one at a time.

    Args:
        resolve: Brings one snapshot to its end, on the thread, and returns its fate on storage, if this decides that.
            What it raises ends the thread.
        looks_gone: Says whether a checkpoint is no longer on storage (``StoreKeeper.looks_gone``).

    Attributes:
        in_flight: Snapshots that it was told to ``expect`` and has not brought to their end.
    """

    def __init__(
        self,
        name: ThreadName,
        resolve: Callable[[Snapshot], Fate | None],
        looks_gone: Callable[[str], bool] = lambda directory: False,
    ) -> None:
        self._resolve = resolve
        self._looks_gone = looks_gone
        self._looked = "", 0.0  # what was gone then, and when to look again
        self._taken: tuple[int, float] | None = None
        self._queue: queue.SimpleQueue[Snapshot | str | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.in_flight = 0
        self._fates: deque[Fate] = deque(maxlen=_REMEMBERED)
        self._fatal: BaseException | None = None
        self._ended = self._through = False
        self._afterwards: Callable[[], None] = lambda: None
        self._thread = named_thread(name, self._run)
        self._thread.start()

    def expect(self) -> None:
        """A snapshot is under way to this thread: it counts from now on."""
        with self._changed:
            self.in_flight += 1

    def submit(self, snapshot: Snapshot) -> None:
        """Hands over a snapshot. Call it after ``expect``, on any thread."""
        self._queue.put(snapshot)

    @property
    def writing(self) -> tuple[int, float] | None:
        """Returns (step, seconds since this thread took it up) of the snapshot under way; None if none is."""
        with self._changed:
            return None if self._taken is None else (self._taken[0], time.monotonic() - self._taken[1])

    def is_gone(self, directory: str) -> bool:
        """Returns whether a checkpoint was gone when the thread looked last.

        It looks again now, if it has nothing to write.
        """
        with self._changed:
            gone, due = self._looked
            if gone != directory and not self.in_flight and time.monotonic() >= due:
                self._looked = "", math.inf
                self._queue.put(directory)
        return gone == directory

    def _look(self, directory: str) -> None:
        began = time.monotonic()
        gone = self._looks_gone(directory)
        took = time.monotonic() - began
        with self._changed:  # so that it costs little where storage is slow, and is soon done again
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
            done = self._changed.wait_for(lambda: self._ended or self.in_flight <= in_flight, timeout_secs)
            done = done and self.in_flight <= in_flight
        self.raise_fatal()
        return done

    def raise_fatal(self) -> None:
        """Raise, once, the error that ended the thread."""
        with self._changed:
            error, self._fatal = self._fatal, None
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
                del item  # a slot that is removed takes room for as long as somebody knows its bytes
                with self._changed:
                    self.in_flight -= 1
                    self._taken = None
                    self._fates += () if fate is None else (fate,)
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
                log.warning("the store could not be released: %s", error)


class Stages:
    """Owns the persist thread, and the sealing thread before it. Its methods are called on the training thread.

    Args:
        run: The session's.
        memory: Where snapshots are sealed first; None where memory is the process's own.
        resolver: Brings snapshots to their end on storage.

    Attributes:
        persister: The persist thread.
    """

    def __init__(
        self,
        run: RunContext,
        memory: MemoryTier | None,
        resolver: SnapshotResolver,
    ) -> None:
        self.persister = self._first = SnapshotThread(ThreadName.PERSIST, resolver.resolve, resolver.looks_gone)
        self._memory = memory
        if memory is not None:
            sealer = MemorySealer(run, memory, self.persister.submit)
            self._first = SnapshotThread(ThreadName.SEAL, sealer.resolve)

    @property
    def in_flight(self) -> int:
        """Snapshots that the next one would wait for: not sealed yet, or, in private memory, not written yet."""
        return self._first.in_flight

    def submit(self, snapshot: Snapshot) -> None:
        """Take a snapshot over. Its copy may still be under way."""
        if self._memory is not None:
            self._memory.begin(snapshot)
            if snapshot.contents.to_storage:
                self.persister.expect()
        self._first.expect()
        self._first.submit(snapshot)

    def wait(self, most: int, timeout_secs: float) -> bool:
        """Wait until at most ``most`` snapshots are in the next one's way; False if the time ran out."""
        return self._first.wait(most, timeout_secs)

    def wait_for_seal(self, timeout_secs: float) -> None:
        """Waits until the newest step of a gradient log is sealed: one that is not sealed breaks it off, so a failure
        costs the step before, not two. A warning tells if the time ran out.
        """
        if not self.wait(0, timeout_secs):
            log.warning(
                "the step before is not sealed in memory after %g s (timeout_secs). Training goes on; a failure costs "
                "two steps until it is",
                timeout_secs,
            )

    def wait_for_storage(self, timeout_secs: float) -> bool:
        """Wait until storage has one snapshot more; False if it has none to write, or not in time."""
        writing = self.persister.in_flight
        return bool(writing) and self.persister.wait(writing - 1, timeout_secs)

    def wait_for_all(self, timeout_secs: float) -> bool:
        """Wait until no snapshot is under way; False if the time ran out."""
        until = time.monotonic() + timeout_secs
        return self.wait(0, timeout_secs) and self.persister.wait(0, max(0.0, until - time.monotonic()))

    def raise_fatal(self) -> None:
        """Raise, once, the error that ended a thread."""
        self._first.raise_fatal()
        self.persister.raise_fatal()

    def close(self, timeout_secs: float, afterwards: Callable[[], None]) -> bool:
        """End the threads once what is queued is done. See ``SnapshotThread.close``."""
        until = time.monotonic() + timeout_secs
        if self._first is not self.persister:
            self._first.close(timeout_secs)
        return self.persister.close(max(0.0, until - time.monotonic()), afterwards)
