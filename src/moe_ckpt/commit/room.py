"""Finds host memory for the next snapshot: waits if there is none, or drops a snapshot that is kept for recovery."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTimeError
from functools import partial

from moe_ckpt.commit.persisting import SnapshotThread
from moe_ckpt.core.cadence import are_behind
from moe_ckpt.core.step import Contents, Step
from moe_ckpt.errors import HostMemoryError
from moe_ckpt.memory.arena import Buffer
from moe_ckpt.memory.limits import requires_room
from moe_ckpt.policies.base import needs_of
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.local_state import ExpectedShare
from moe_ckpt.tiers.buffers import WorkThread
from moe_ckpt.tiers.memory_tier import MemoryTier

log = logging.getLogger("moe_ckpt")

_MAKING_SECS = 0.001
_QUICK_NBYTES, _QUICK_SECS = 64 << 20, 1.0
"""Training waits, up to so many seconds on a busy machine, for memory of at most so many bytes, which is made in
milliseconds. It does not wait for more: page-locking takes 0.4 s for each GB."""
_SLACK, _PLAIN_NBYTES = 64, 64 << 10
"""Room beyond the tensors that exist before the first snapshot: a 64th, and plain state, up to half as much."""


class Room:
    """Gives the training thread buffers for snapshots.

    The kernel takes long to clear pages. So a thread of its own makes memory as soon as the size of the next snapshots
    is known, and frees it; the training thread never does.

    Args:
        run: The session's context.
        tier: Lends the buffers, and keeps snapshots in them.
        first: The background thread that gets each snapshot first: it seals it, or writes it without memory.
        persister: The thread that writes to storage.

    Attributes:
        trouble: Why ``find`` returned no buffers; empty if the budget is used up.
        require: Raises ``MemoryFullError`` if the machine has no room for so many bytes that survivors of a failure
            need (``memory.limits.requires_room``); None for private memory.
    """

    def __init__(self, run: RunContext, tier: MemoryTier, first: SnapshotThread, persister: SnapshotThread) -> None:
        self._run, self._settings, needs = run, run.settings, needs_of(run.policy)
        self._pool, self._tier = tier.pool, tier
        self.require = requires_room(tier.files.path, run.settings.local_ranks) if tier.outlives_process else None
        self._first, self._persister = first, persister
        self._always_whole = not (needs.partial or needs.windows or needs.gradients)
        self._takes_long = tier.outlives_process or run.settings.pinned  # else the copying thread makes the pages
        self._maker = WorkThread()
        self._asked: Future[list[Buffer] | None] | None = None
        self._window_size, self._snapshot_count = 1, 0
        # Bytes of the newest snapshot, of the largest partial one, and of the largest of all.
        self._last_nbytes = self._partial_nbytes = self._most_nbytes = 0
        # Bytes for which memory is made: the next snapshot, one of a steady run, and two checkpoints.
        self._next_nbytes = self._usual_nbytes = self._two_nbytes = 0
        self._first_nbytes: Callable[[], int] = lambda: 0  # about how many bytes the first snapshot has; 0 if unknown
        self._has_begun = self._is_topping_up = self._gave_up = self._said = False
        self.trouble = ""

    @property
    def is_short(self) -> bool:
        """True if another snapshot, as large as the last one or as the largest partial one, would have to wait for an
        earlier snapshot or for memory that is being made."""
        if self._first.in_flight >= self._settings.max_in_flight or self.is_unmade:
            return True
        return not self._fits(max(self._last_nbytes, self._partial_nbytes))

    def _fits(self, nbytes: int) -> bool:
        """True if the budget has room, or gets it by what the tier can do without, which takes longer to work out."""
        return self._pool.fits(nbytes) or self._pool.fits(nbytes, self._tier.droppable_bytes)

    @property
    def is_unmade(self) -> bool:
        """True if memory for another snapshot is not made yet, and making it takes long.

        For a sparse window, which must have no gap, it is true until all memory that the window needs is made.
        """
        if self._next_nbytes <= _QUICK_NBYTES or not self._takes_long:
            return False
        return (self._is_topping_up and self._window_size > 1) or not self._pool.has_ready(self._next_nbytes)

    def ask(self) -> None:
        """Has memory made for the next snapshot, if it ``is_unmade``."""
        if self.is_unmade and (self._asked is None or self._asked.done()):
            self._asked = self._maker.submit(partial(self._pool.acquire, [self._next_nbytes]))
            self._asked.add_done_callback(self._give_back)

    def _give_back(self, made: Future[list[Buffer] | None]) -> None:
        """Returns buffers that nobody waited for to the pool, for the next snapshot. On any thread."""
        if made.exception() is not None:
            log.info("no memory is made for snapshots: %s", made.exception())
            return
        for buffer in made.result() or ():
            with contextlib.suppress(ValueError):  # the pool has retired
                self._pool.give_back(buffer)

    @property
    def is_used_up(self) -> bool:
        """True if a snapshot as large as the largest so far would find no buffer even while no other is under way."""
        return not self._fits(self._most_nbytes)

    @property
    def is_tight(self) -> bool:
        """True if there is no room for two checkpoints as the newest one."""
        return self._two_nbytes > self._pool.budget_bytes

    @property
    def copies_behind(self) -> bool:
        """True if peers have to take so many copies that the copies of another checkpoint would only wait."""
        replicator = self._tier.replicator
        return replicator is not None and are_behind(
            replicator.in_flight, self._settings.max_in_flight, self._window_size
        )

    def find(
        self,
        identity: Step,
        contents: Contents,
        sizes: Sequence[int],
        patience_secs: float,
        *,
        last: bool = False,
        waits: bool = True,
        skips: bool = False,
        starts: bool = False,
    ) -> tuple[list[Buffer] | None, bool]:
        """Takes buffers for a snapshot. Unless it ``skips``, it waits for storage even if ``when_busy="skip"``, since
        peers may have begun the snapshot.

        Args:
            identity: Of the snapshot.
            contents: Of the snapshot.
            sizes: Bytes of each buffer (``BufferPool.take``).
            patience_secs: Longest wait.
            last: The snapshot is the run's last one, for which memory drops more (``MemoryTier.drop``).
            waits: It also waits for memory that is being made.
            skips: The ranks agree whether the snapshot begins: it is in ``trouble`` if only storage could make room.
            starts: The run has just started, so that a lack of room raises an error instead of leaving checkpoints out.

        Returns:
            The buffers, or None if there were none in time; and whether it waited for earlier snapshots.

        Raises:
            HostMemoryError: If ``starts``: there can never be room.
            RuntimeError: If ``starts``: the machine has no memory.
            OSError: There is no memory for what survivors seal.
        """
        nbytes, self.trouble = sum(sizes), ""
        if nbytes > self._pool.budget_bytes:
            error = self._too_small(identity.step, nbytes, whole=contents.is_complete(self._run.catalog.everything))
            if starts:
                raise error
            self._say(identity.step, str(error))
            return None, False
        window = contents.window
        if not identity.parting and (window is not None or self._window_size == 1):
            self._window_size = 1 if window is None else window.size
            before = nbytes if window is not None else max(nbytes, self._most_nbytes)
            self._two_nbytes = self._window_size * (before + nbytes)
        until = time.monotonic() + patience_secs
        most = self._settings.max_in_flight - 1
        waited = False
        while True:
            waited = waited or self._first.in_flight > most
            if self._first.in_flight > most and not self._first.wait(most, max(0.0, until - time.monotonic())):
                return None, waited
            buffers = self._acquire(identity, sizes, until, waits=waits, starts=starts)
            if buffers is not None or self.trouble:
                return buffers, waited
            if self._give_up_recovery(nbytes, contents, last=last):
                continue
            is_sealed = self._tier.outlives_process and not self._first.in_flight
            if skips and (is_sealed or not self._tier.outlives_process):
                self.trouble = "earlier ones are still being written"
                return None, waited
            if is_sealed:
                logged = contents.since is not None and not self._pool.making  # a full snapshot takes its place
                if logged or not self._comes_back(until):
                    return None, waited
            most = max(0, min(most, self._first.in_flight) - 1)

    def _acquire(
        self, identity: Step, sizes: Sequence[int], until: float, *, waits: bool, starts: bool
    ) -> list[Buffer] | None:
        """Returns buffers of the pool; None if something must be given up first, or if there is ``trouble``."""
        nbytes = sum(sizes)
        buffers = self._pool.take(sizes)
        if buffers is not None or not self._pool.fits(nbytes):
            return buffers
        require = self.require if identity.parting else None
        made = self._maker.submit(partial(self._pool.acquire, sizes, require))
        secs = max(0.0, until - time.monotonic())
        if not waits and self._takes_long:
            secs = min(secs, _QUICK_SECS if nbytes <= _QUICK_NBYTES else 0.0)
        try:
            return made.result(secs)
        except NotInTimeError:
            made.add_done_callback(self._give_back)
            self.trouble = f"memory for it, {nbytes:,} bytes, is still being made"
        except RuntimeError as error:  # the budget has room, but the machine no memory: what is only kept must go first
            if not self._tier.droppable_bytes:
                if starts:
                    raise
                self._say(identity.step, f"{type(error).__name__}: {error}")
        return None

    def _say(self, step: int, trouble: str) -> None:
        """Notes a trouble that the next steps will probably have too, and warns of the first."""
        self.trouble = trouble
        if not self._said:
            log.warning("step %d: no checkpoint, and training continues: %s", step, trouble)
        self._said = True

    def _comes_back(self, until: float) -> bool:
        """Waits a little for a buffer that storage reads, or that is being made; False if none will come in time."""
        if self._pool.making and time.monotonic() < until:
            time.sleep(_MAKING_SECS)
            return True
        in_flight = self._persister.in_flight
        return bool(in_flight) and self._persister.wait(in_flight - 1, max(0.0, until - time.monotonic()))

    def wait(self, timeout_secs: float) -> bool:
        """Waits until there is room for another snapshot (not ``is_short``).

        Returns:
            False if that took longer than ``timeout_secs``, or memory is being made, which nobody waits for.

        Raises:
            RuntimeError: A peer is gone.
        """
        if self._run.gate is not None:
            self._run.gate.release()  # training waits: nothing is held back until the next iteration begins
        until = time.monotonic() + timeout_secs
        while self.is_short and self._first.in_flight and not self.is_unmade:
            fewer = min(self._first.in_flight, self._settings.max_in_flight) - 1
            if not self._first.wait(max(0, fewer), max(0.0, until - time.monotonic())):
                return False
        return not self.is_unmade

    def note_use(self, contents: Contents, sizes: Sequence[int]) -> None:
        """Notes the sizes of a snapshot's buffers, and has memory made ahead of time if the next ones need more."""
        nbytes, total = sizes[0], sum(sizes)
        partial = contents.window is None and len(contents.full) < len(self._run.catalog.operators)
        self._last_nbytes, self._most_nbytes = total, max(self._most_nbytes, total)
        self._partial_nbytes = max(self._partial_nbytes, total if partial else 0)
        # The first snapshot is full, whatever the policy. If the second is full too, all are. Private memory keeps a
        # full one only while nothing else needs the room, so that no third is made ahead of time.
        again = self._tier.outlives_process and not self._partial_nbytes
        again = again and (self._snapshot_count > 0 or self._always_whole)
        self._snapshot_count += 1
        if partial or again or self._always_whole or self._window_size > 1:
            self._next_nbytes = max(nbytes, self._next_nbytes if partial else 0)
        more = again and self._snapshot_count == 2  # memory made early may have found too little room
        if partial or again:
            more |= nbytes > self._usual_nbytes
            self._usual_nbytes = max(nbytes, self._usual_nbytes)
        if more or (partial and self._tier.retained_count > 0):
            self._is_topping_up = True  # the thread may end, and say so, before ``start`` returns
            if not self._maker.start(self._make_ahead):
                self._is_topping_up = False

    def _make_ahead(self) -> bool:
        """Makes memory for one of the next snapshots; returns False if there is enough. On the making thread."""
        is_first, more = not self._snapshot_count, False
        # As many as there are when the first snapshot is given back, and later as many as a steady run has.
        count = 1 + self._always_whole if is_first else self._buffers + self._tier.retained_count
        # From the second one on it is due.
        early = is_first or (self._tier.outlives_process and self._snapshot_count == 1)
        try:
            nbytes = self._first_nbytes() if is_first else self._usual_nbytes  # a rank that saves nothing needs no room
            more = nbytes > 0 and self._pool.make_ahead(nbytes, count, early=early)
            return more or self._pool.warm_up()
        except OSError as error:  # the snapshot that needs it makes it, giving something up, or says why it cannot
            log.info("no memory is made before it is needed: %s", error)
        except RuntimeError as error:
            log.warning("no further host memory could be made in advance, snapshots will retry: %s", error)
        finally:
            if not is_first:
                self._is_topping_up = more
        return False

    def training_begins(self, *, whole: bool) -> None:
        """Has memory made for the first snapshots, once, if that takes long: outliving the process, or page-locked.

        The training state is complete, except for optimizer state that the first update creates.

        Args:
            whole: The first snapshot will have everything, whatever the policy.

        Raises:
            HostMemoryError: The state that there is now does not fit the budget, so that no checkpoint ever would.
        """
        run, whole = self._run, whole or self._always_whole
        every, specs = run.state.tensors(), run.state.specs()

        @functools.cache
        def share() -> int:
            """Returns about how many bytes the first snapshot has; 0 if this rank saves nothing. It takes long."""
            nbytes = ExpectedShare(every, specs, self._tier.sources).nbytes(run.catalog, run.placement, run.comm.rank)
            return nbytes and nbytes + nbytes // _SLACK + min(_PLAIN_NBYTES, nbytes // 2)

        if whole:  # it has at least the tensors that no other rank holds
            tensors = [tensor for tensor in every if not tensor.duplicate]
            alone = run.comm.world_size == 1
            least = sum(tensor.local.nbytes for tensor in tensors if alone or not tensor.replicated)
            if least > self._pool.budget_bytes:
                raise self._too_small(None, max(least, share()), whole=True)
        if self._has_begun or not self._takes_long:
            return
        self._has_begun = True
        self._first_nbytes = share if whole else lambda: 0
        self._maker.start(self._make_ahead)

    def close(self) -> None:
        """Ends the thread, as ``WorkThread.close`` does."""
        self._maker.close()

    @property
    def _buffers(self) -> int:
        """Returns how many buffers a steady run uses: those in flight, and one that is kept for recovery.

        Memory that outlives the process keeps a sparse window whole, beside the window under way.
        """
        windows = 2 * (self._window_size - 1) if self._tier.outlives_process else 0
        return self._settings.max_in_flight + 1 + windows

    def _too_small(self, step: int | None, nbytes: int, *, whole: bool) -> HostMemoryError:
        """Returns the error for a snapshot that can never fit, which names the budget and the setting to change."""
        which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        what = f"{which}, which holds {'everything' if whole else 'a part of the model'},"
        free = "That is half of what was free at the start, divided among the ranks of this host. "
        advice = (
            f"{'' if self._settings.host_memory_bytes is not None else free}Set host_memory_bytes to {nbytes} "
            f"or more; {self._buffers * nbytes} is enough to avoid waiting."
        )
        if whole:
            advice += " Every policy first saves everything, so no other one needs less; more ranks share it."
        else:
            advice += " A policy that saves fewer experts at once also needs less."
        return HostMemoryError(nbytes, self._pool.budget_bytes, what, advice, rank=self._run.comm.rank)

    def _give_up_recovery(self, nbytes: int, contents: Contents, *, last: bool) -> bool:
        """Gives up a snapshot that is kept for a failure; True if there was one. See ``MemoryTier.drop``."""
        costs_tokens = self._tier.has_more
        dropped = self._tier.drop(chain=not contents.gradients, last=last, of=contents)
        if dropped and costs_tokens and not self._gave_up and self._buffers * nbytes > self._pool.budget_bytes:
            self._gave_up = True
            log.warning(
                "the budget of host memory on rank %d, %s bytes%s, holds no %d snapshots of %s bytes: the newest "
                "committed one is not kept in memory while others are under way, so a failure may cost more tokens. "
                "Set host_memory_bytes to %d or more",
                self._run.comm.rank,
                f"{self._pool.budget_bytes:,}",
                "" if self._settings.host_memory_bytes is not None else " (half of what was free at the start)",
                self._buffers,
                f"{nbytes:,}",
                self._buffers * nbytes,
            )
        return dropped
