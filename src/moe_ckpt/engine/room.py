"""Finds host memory for the next snapshot, and waits or makes room for it where it must."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from moe_ckpt.core.peer_copies import are_behind
from moe_ckpt.engine.buffers import HostBufferPool
from moe_ckpt.engine.host_buffer import HostBuffer
from moe_ckpt.engine.settings import Settings
from moe_ckpt.engine.stages import Stages
from moe_ckpt.engine.tiers import BufferTier
from moe_ckpt.errors import HostMemoryError
from moe_ckpt.slices.request import SnapshotRequest

log = logging.getLogger("moe_ckpt")

_MAKING_SECS = 0.001
_SLACK, _PLAIN_NBYTES = 64, 64 << 10
"""What a snapshot may have beyond the tensors that are there before it: a 64th, and plain state, up to half as much."""


class Room:
    """The buffers of one rank, as the training thread asks for them.

    Args:
        pool: Of the buffers.
        tier: What is kept in them.
        stages: What is on its way in them.
        settings: The user's.
        rank: For messages.
        operators: Of the model: how many.
        require: Called before memory is made for what survivors of a failure seal; see ``HostBufferPool.acquire``.
        always_whole: Each snapshot of the policy holds everything.
    """

    def __init__(
        self,
        pool: HostBufferPool,
        tier: BufferTier,
        stages: Stages,
        settings: Settings,
        rank: int,
        operators: int,
        require: Callable[[int], None] | None = None,
        *,
        always_whole: bool = False,
    ) -> None:
        self._pool, self._tier, self._stages, self._settings = pool, tier, stages, settings
        self._always_whole = always_whole
        self._is_ready = threading.Event()
        self._is_ready.set()
        self._rank, self._operators, self._require = rank, operators, require
        self._last_nbytes = self._partial_nbytes = self._most_nbytes = 0
        self._window_size = 1
        self._snapshots = 0
        self._gave_up = False

    @property
    def is_short(self) -> bool:
        """True if another snapshot, as large as the last one or as any partial one, would wait for one under way."""
        return self._stages.in_flight >= self._settings.max_in_flight or not self._pool.fits(
            max(self._last_nbytes, self._partial_nbytes), self._tier.droppable_bytes
        )

    @property
    def is_used_up(self) -> bool:
        """True if another snapshot as large as any so far would find no buffer, though none were under way."""
        return not self._pool.fits(self._most_nbytes, self._tier.droppable_bytes)

    @property
    def copies_behind(self) -> bool:
        """True if peers still have so many copies to take that those of another checkpoint would only wait."""
        replicator = self._tier.replicator
        most = self._settings.max_in_flight
        return replicator is not None and are_behind(replicator.in_flight, most, self._window_size)

    def find(
        self, request: SnapshotRequest, needs: Sequence[tuple[str, int]], patience_secs: float, *, last: bool = False
    ) -> tuple[list[HostBuffer] | None, bool]:
        """(buffers, or None if they did not become free in time; True if snapshots under way had to be waited for).

        It waits where it must even if others are configured to be skipped: peers may have begun already.

        Args:
            request: Of the snapshot.
            needs: As of ``HostBufferPool.acquire_all``.
            patience_secs: Longest wait.
            last: See ``BufferTier.drop``.

        Raises:
            HostMemoryError: There can never be room.
            OSError: There is none for what survivors seal.
        """
        nbytes = sum(each for _, each in needs)
        if nbytes > self._pool.budget_bytes:
            raise self._too_small(request, nbytes)
        self._require_two(request, nbytes)
        until = time.monotonic() + patience_secs
        left = self._settings.max_in_flight - 1
        waited = False
        self._wait_for_making(needs[0][1], until)
        while True:
            waited = waited or self._stages.in_flight > left
            if not self._stages.wait(left, max(0.0, until - time.monotonic())):
                return None, waited
            buffers = self._acquire(request, needs)
            while buffers is None and self._give_up_recovery(nbytes, chain=not request.gradients, last=last):
                buffers = self._acquire(request, needs)
            if buffers is not None:
                return buffers, waited
            if self._tier.outlives_process and not self._stages.in_flight:
                logged = request.since is not None and not self._pool.is_making  # a full snapshot takes its place
                if logged or not self._comes_back(until):
                    return None, waited
            left = max(0, min(left, self._stages.in_flight) - 1)

    def _acquire(self, request: SnapshotRequest, needs: Sequence[tuple[str, int]]) -> list[HostBuffer] | None:
        """Buffers of the pool; None if something must be given up first."""
        try:
            require = self._require if request.survivors_of is not None else None
            return self._pool.acquire_all(needs, require)
        except RuntimeError:  # the budget has room, but the machine no memory: what is only kept must go first
            if not self._tier.droppable_bytes:
                raise
            return None

    def _wait_for_making(self, nbytes: int, until: float) -> None:
        """Waits while another thread makes such a buffer: to make one more here would take as long."""
        self._is_ready.wait(max(0.0, until - time.monotonic()))
        while self._pool.is_made_ahead(nbytes) and time.monotonic() < until:
            time.sleep(_MAKING_SECS)

    def _comes_back(self, until: float) -> bool:
        """Wait for a buffer that storage is reading, or that is being made; False if none will come in time."""
        if self._pool.is_making and time.monotonic() < until:
            time.sleep(_MAKING_SECS)
            return True
        return self._stages.wait_for_storage(max(0.0, until - time.monotonic()))

    def wait(self, timeout_secs: float) -> bool:
        """Wait until it is no longer ``is_short``; False if that took longer than ``timeout_secs``."""
        until = time.monotonic() + timeout_secs
        while self.is_short and self._stages.in_flight:
            fewer = min(self._stages.in_flight, self._settings.max_in_flight) - 1
            if not self._stages.wait(max(0, fewer), max(0.0, until - time.monotonic())):
                return False
        return True

    def note_use(self, request: SnapshotRequest, needs: Sequence[tuple[str, int]]) -> bool:
        """A snapshot began with these buffers. Returns True if more should be made ahead of time (``top_up``)."""
        (_, nbytes), total = needs[0], sum(each for _, each in needs)
        partial = len(request.operators) < self._operators and request.window is None
        self._last_nbytes, self._most_nbytes = total, max(self._most_nbytes, total)
        self._partial_nbytes = max(self._partial_nbytes, total if partial else 0)
        # The first one is full, whatever the policy; one that is full again shows that they all are. Private memory
        # keeps one of them as long as nothing else needs the room: a third is not made ahead of time for that.
        again = self._tier.outlives_process and not self._partial_nbytes
        again = again and (self._snapshots > 0 or self._always_whole)
        self._snapshots += 1
        more = self._pool.expect(nbytes) if partial or again else False
        more = more or (again and self._snapshots == 2)  # what has found little room before
        return more or (partial and self._tier.kept > 0)

    def begin_ready(self) -> None:
        """``make_ready`` is about to be called, on another thread, and the first snapshot waits for it."""
        self._is_ready.clear()

    def end_ready(self) -> None:
        """``make_ready`` will not be called."""
        self._is_ready.set()

    def make_ready(self, share: Callable[[], int] | None) -> bool:
        """Prepare one of the buffers that the first snapshots of this life will need; False if there are enough.

        On another thread, which does not have to hurry.

        Args:
            share: Bytes of the first snapshot, roughly; None where nobody knows.
        """
        try:
            return self._pool.warm_up() or self._make_foreseen(share)
        except (OSError, RuntimeError) as error:
            log.info("no memory is made before the first snapshot: %s", error)
            return False
        finally:
            self._is_ready.set()

    def _make_foreseen(self, share: Callable[[], int] | None) -> bool:
        count = 2 if self._always_whole else 1  # as many as there are when the first one is given back
        if share is None or self._pool.free_count() >= count or not share():
            return False  # a rank that saves nothing needs no room, either
        beside = share() // _SLACK + min(_PLAIN_NBYTES, share() // 2)
        return self._pool.foresee(share(), share() + beside, count)

    def top_up(self) -> bool:
        """Make one of the buffers that the next snapshots will need; False if there are enough. On another thread."""
        try:
            early = self._tier.outlives_process and self._snapshots == 1  # from the second one on it is due
            return self._pool.top_up(self._buffers + self._tier.kept, early=early)
        except OSError as error:  # training makes it, at the expense of something, or says why it cannot
            log.info("no memory is made before it is needed: %s", error)
        except RuntimeError as error:
            log.warning("no further host buffer could be allocated in advance, snapshots will retry: %s", error)
        return False

    @property
    def _buffers(self) -> int:
        """Buffers in the steady state: those in flight, and the recovery buffer, or, of a sparse window, two windows'.

        Only memory that outlives the process keeps windows.
        """
        windows = 2 * (self._window_size - 1) if self._tier.outlives_process else 0
        return self._settings.max_in_flight + 1 + windows

    def _require_two(self, request: SnapshotRequest, nbytes: int) -> None:
        """Raises ``HostMemoryError`` if memory alone is to hold checkpoints, and has no room for two."""
        self._window_size = 1 if request.window is None else request.window.size
        needed = 2 * self._window_size * nbytes
        if request.stored or request.slot or request.survivors_of is not None or needed <= self._pool.budget_bytes:
            return
        what = "a sparse window" if self._window_size > 1 else "the checkpoint"
        raise HostMemoryError(
            needed,
            self._pool.budget_bytes,
            f"{what} of step {request.step}, of which memory must hold two, because not every checkpoint is written to "
            "storage,",
            f"Set {self._settings.budget_setting} to {needed + 2 * nbytes} or more, or "
            "Memory(storage_every_n_steps=1).",
            rank=self._rank,
        )

    def _too_small(self, request: SnapshotRequest, nbytes: int) -> HostMemoryError:
        """Returns the error for a snapshot that can never fit: names it, the budget, and the setting to change."""
        whole = len(request.operators) == self._operators
        what = f"the checkpoint of step {request.step}, which holds {'everything' if whole else 'a part of the model'},"
        free = "That is half of what was free at the start, divided among the ranks of this host. "
        advice = (
            f"{'' if self._settings.budget_is_given else free}Set {self._settings.budget_setting} to {nbytes} "
            f"or more; {self._buffers * nbytes} is enough to avoid waiting."
        )
        if whole:
            advice += " Every policy first saves everything, so no other one needs less; more ranks share it."
        else:
            advice += " A policy that saves fewer experts at once also needs less."
        return HostMemoryError(nbytes, self._pool.budget_bytes, what, advice, rank=self._rank)

    def _give_up_recovery(self, nbytes: int, *, chain: bool, last: bool) -> bool:
        """Give up what only a failure would need; True if there was something. chain, last: see ``BufferTier.drop``."""
        costs_tokens = self._tier.has_more
        dropped = self._tier.drop(chain=chain, last=last)
        if dropped and costs_tokens and not self._gave_up and self._buffers * nbytes > self._pool.budget_bytes:
            self._gave_up = True
            log.warning(
                "the budget of host memory on rank %d, %s bytes%s, holds no %d snapshots of %s bytes: the newest "
                "committed one is not kept in memory while others are under way, so a failure may cost more tokens. "
                "Set %s to %d or more",
                self._rank,
                f"{self._pool.budget_bytes:,}",
                "" if self._settings.budget_is_given else " (half of what was free at the start)",
                self._buffers,
                f"{nbytes:,}",
                self._settings.budget_setting,
                self._buffers * nbytes,
            )
        return dropped
