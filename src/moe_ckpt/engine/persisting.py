"""The persist thread: brings snapshots to their end, in order, one at a time.

Errors between ranks end the thread, because nothing can be committed without every rank, and surface at the next
``raise_fatal``.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from moe_ckpt.engine.outcomes import Resolution
from moe_ckpt.engine.snapshot import Snapshot
from moe_ckpt.errors import MoECheckpointError
from moe_ckpt.threads import ThreadName, named_thread

log = logging.getLogger("moe_ckpt")

_REMEMBERED = 64
"""Resolutions kept; far more than can come between two optimizer steps."""
_KEEP_ALIVE_SECS = 60.0
_LONGEST_UNSEEN_SECS = 1.0


class Persister:
    """Owns the persist thread of one rank.

    Args:
        resolve: Brings one snapshot to its end, on the thread; what it raises ends that.
        keep_alive: Called about once a minute (keeps the store's lock).
        looks_gone: Says whether a checkpoint is no longer on storage (``StoreKeeper.looks_gone``).
    """

    def __init__(
        self,
        resolve: Callable[[Snapshot], Resolution],
        keep_alive: Callable[[], None],
        name: ThreadName = ThreadName.PERSIST,
        looks_gone: Callable[[str], bool] = lambda directory: False,
    ) -> None:
        self._resolve = resolve
        self._keep_alive = keep_alive
        self._looks_gone = looks_gone
        self._looked = "", 0.0  # what was gone then, and when to look again
        self._taken: tuple[int, float] | None = None
        self._queue: queue.SimpleQueue[Snapshot | str | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._in_flight = 0
        self._resolutions: deque[Resolution] = deque(maxlen=_REMEMBERED)
        self._fatal: BaseException | None = None
        self._ended = self._through = False
        self._afterwards: Callable[[], None] = lambda: None
        self._renewed = time.monotonic()
        self._thread = named_thread(name, self._run)
        self._thread.start()

    def expect(self) -> None:
        """A snapshot is under way to this thread: it counts from now on."""
        with self._changed:
            self._in_flight += 1

    def submit(self, snapshot: Snapshot) -> None:
        """Hands over a snapshot. Call it after ``expect``, on any thread."""
        self._queue.put(snapshot)

    @property
    def in_flight(self) -> int:
        with self._changed:
            return self._in_flight

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
            if gone != directory and not self._in_flight and time.monotonic() >= due:
                self._looked = "", math.inf
                self._queue.put(directory)
        return gone == directory

    def _look(self, directory: str) -> None:
        began = time.monotonic()
        gone = self._looks_gone(directory)
        took = time.monotonic() - began
        with self._changed:  # so that it costs little where storage is slow, and is soon done again
            self._looked = directory if gone else "", began + min(100 * took, _LONGEST_UNSEEN_SECS)

    def resolutions(self, after: int) -> list[Resolution]:
        """The last resolutions with a sequence greater than ``after``, in order."""
        with self._changed:
            return [r for r in self._resolutions if r.sequence > after]

    def wait(self, in_flight: int, timeout_secs: float) -> bool:
        """Wait until at most ``in_flight`` snapshots are unresolved; False if the time ran out.

        Raises what ended the thread, if anything did.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._ended or self._in_flight <= in_flight, timeout_secs)
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
            while (snapshot := self._next()) is not None:
                with self._changed:
                    self._taken = snapshot.step, time.monotonic()
                self._renew_lock()
                resolution = self._resolve(snapshot)
                del snapshot  # a slot that is removed takes room for as long as somebody knows its bytes
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
                log.warning("the store could not be released: %s", error)

    def _next(self) -> Snapshot | None:
        """The next snapshot, or None at the end; keeps the store's lock alive meanwhile."""
        while True:
            try:
                item = self._queue.get(timeout=_KEEP_ALIVE_SECS)
            except queue.Empty:
                item = ""
            if not isinstance(item, str):
                return item
            if item:
                self._look(item)
            self._renew_lock()

    def _renew_lock(self) -> None:
        """Renew the lock when it is time. Without it no commit succeeds, but training continues."""
        if time.monotonic() - self._renewed < _KEEP_ALIVE_SECS:
            return
        try:
            self._keep_alive()
            self._renewed = time.monotonic()
        except (OSError, MoECheckpointError) as error:
            log.warning("the lock of the store could not be renewed, retrying: %s", error)
