"""The threads that a copied snapshot passes through: sealing, where memory outlives the process, then persisting."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from moe_ckpt.engine.memory_tier import MemoryTier
from moe_ckpt.engine.outcomes import Resolution
from moe_ckpt.engine.persisting import Persister
from moe_ckpt.engine.sealing import MemorySealer
from moe_ckpt.engine.snapshot import Snapshot
from moe_ckpt.threads import ThreadName

log = logging.getLogger("moe_ckpt")


class Stages:
    """Owns both threads. Its methods are called on the training thread.

    Args:
        persister: Writes what goes to storage.
        sealer: Seals every snapshot before; None where memory is the process's own.
        memory: That it seals in.
    """

    def __init__(self, persister: Persister, sealer: MemorySealer | None, memory: MemoryTier | None) -> None:
        self._persister = persister
        self._memory = memory
        self._sealer: Persister | None = None
        if sealer is not None:
            self._sealer = Persister(sealer.resolve, lambda: None, ThreadName.SEAL)

    @property
    def in_flight(self) -> int:
        """Snapshots that the next one would wait for: not sealed yet, or, in private memory, not written yet."""
        return (self._sealer or self._persister).in_flight

    @property
    def storage_in_flight(self) -> int:
        """Snapshots that storage does not have yet, of those that go there."""
        return self._persister.in_flight

    def submit(self, snapshot: Snapshot) -> None:
        """Take a snapshot over. Its copy may still be under way."""
        if snapshot.request.stored:
            self._persister.expect()
        if self._sealer is None or self._memory is None:
            self._persister.submit(snapshot)
            return
        self._memory.begin(snapshot)
        self._sealer.expect()
        self._sealer.submit(snapshot)

    def wait(self, most: int, timeout_secs: float) -> bool:
        """Wait until at most ``most`` snapshots are in the next one's way; False if the time ran out."""
        return (self._sealer or self._persister).wait(most, timeout_secs)

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
        writing = self._persister.in_flight
        return bool(writing) and self._persister.wait(writing - 1, timeout_secs)

    def wait_for_all(self, timeout_secs: float) -> bool:
        """Wait until no snapshot is under way; False if the time ran out."""
        until = time.monotonic() + timeout_secs
        sealed = self._sealer is None or self._sealer.wait(0, timeout_secs)
        return sealed and self._persister.wait(0, max(0.0, until - time.monotonic()))

    @property
    def writing(self) -> tuple[int, float] | None:
        """Returns the snapshot under way: see ``Persister.writing``."""
        return self._persister.writing

    def resolutions(self, after: int) -> Sequence[Resolution]:
        """Recent snapshots that ended on storage, with a sequence greater than ``after``."""
        return self._persister.resolutions(after)

    def is_gone(self, directory: str) -> bool:
        """Returns whether a checkpoint is gone: see ``Persister.is_gone``."""
        return self._persister.is_gone(directory)

    def raise_fatal(self) -> None:
        """Raise, once, the error that ended a thread."""
        if self._sealer is not None:
            self._sealer.raise_fatal()
        self._persister.raise_fatal()

    def close(self, timeout_secs: float, afterwards: Callable[[], None]) -> bool:
        """End the threads once what is queued is done. See ``Persister.close``."""
        until = time.monotonic() + timeout_secs
        if self._sealer is not None:
            self._sealer.close(timeout_secs, lambda: None)
        return self._persister.close(max(0.0, until - time.monotonic()), afterwards)
