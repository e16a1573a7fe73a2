"""Allocates host memory on a background thread, since the kernel takes long to clear pages and no copy should wait."""

from __future__ import annotations

import functools
from collections.abc import Callable

from moe_ckpt.commit.room import Room
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.expected import ExpectedShare
from moe_ckpt.tiers.work_thread import WorkThread


class Preallocator:
    """Allocates the buffers of a rank's next snapshots as soon as their size is known. For the training thread.

    Args:
        run: The session's.
        room: Of the buffers.
        thread: That makes them.
        is_wanted: Also for the first snapshots: memory that outlives the process takes long to allocate, and so does
            memory that is page-locked.
        always_whole: Each snapshot of the policy holds everything.
    """

    def __init__(self, run: RunContext, room: Room, thread: WorkThread, *, is_wanted: bool, always_whole: bool) -> None:
        self._run, self._room, self._always_whole = run, room, always_whole
        self._is_due = is_wanted
        self._thread = thread

    def training_begins(self, *, whole: bool) -> None:
        """Allocates for the first snapshots. The state is complete, except for optimizer state that does not exist yet.

        Does nothing the second time.

        Args:
            whole: The first snapshot will have everything, whatever the policy.
        """
        if not self._is_due:
            return
        self._is_due = False
        share = self._share() if whole or self._always_whole else None
        self._thread.start(lambda: self._room.make_ready(share))

    def least_nbytes(self) -> int:
        """Returns the least bytes of a complete snapshot: of what there is now, as far as no other rank shares it."""
        run = self._run
        tensors = [tensor for tensor in run.state.tensors() if not tensor.duplicate]
        alone = run.comm.world_size == 1
        return sum(tensor.local.nbytes for tensor in tensors if alone or not tensor.replicated)

    def _share(self) -> Callable[[], int]:
        """Returns a function that estimates the bytes of a snapshot of everything. It is slow, and may run anywhere."""
        run = self._run
        tensors, specs = run.state.tensors(), run.state.specs()

        @functools.cache
        def share() -> int:
            expected = ExpectedShare(tensors, specs)
            return expected.nbytes(run.catalog, run.placement, run.comm.rank)

        return share

    def top_up(self) -> None:
        """A snapshot began after which more are needed."""
        self._room.is_topping_up = True
        if not self._thread.start(self._room.top_up):
            self._room.is_topping_up = False

    def close(self) -> None:
        """Closes the thread as ``WorkThread.close`` does."""
        self._thread.close()
