"""Allocates host memory on a background thread, since the kernel takes long to clear pages and no copy should wait."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable

import torch

from moe_ckpt.engine.context import RunContext
from moe_ckpt.engine.room import Room
from moe_ckpt.slices.expected import ExpectedShare

log = logging.getLogger("moe_ckpt")


class WorkThread:
    """A background thread that exists only while there is work. ``start`` and ``close``: on the training thread."""

    def __init__(self) -> None:
        self._works: deque[Callable[[], bool]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lock = threading.Lock()

    def start(self, work: Callable[[], bool]) -> bool:
        """Call ``work`` on the thread until it returns False. Its errors are logged.

        Returns:
            False if that will not happen: no thread can be started, or this one is closed.
        """
        with self._lock:
            if self._closing:
                return False
            self._works.append(work)
            if self._thread is not None:
                return True
            is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device() if is_used else None
            thread = threading.Thread(target=self._run, args=(device,), name="moe_ckpt-make", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started
                self._works.clear()
                return False
            self._thread = thread
            return True

    def _run(self, device: int | None) -> None:
        if device is not None:  # else what is page-locked belongs to the first device, whichever this rank uses
            with contextlib.suppress(RuntimeError):  # training meets the same error, and says so
                torch.cuda.set_device(device)
        while True:
            with self._lock:
                if self._closing or not self._works:
                    self._thread = None
                    return
                work = self._works[0]
            try:
                again = work()
            except Exception:  # whatever it is, training allocates what it needs itself
                log.exception("memory could not be made ahead of time")
                again = False
            if not again:
                self._works.popleft()

    def close(self) -> None:
        """Start no more work; return when the work in hand is done."""
        with self._lock:
            self._closing, thread = True, self._thread
        if thread is not None:
            thread.join()


class Preallocator:
    """Allocates the buffers of a rank's next snapshots as soon as their size is known. For the training thread.

    Args:
        run: The session's.
        room: Of the buffers.
        is_wanted: Also for the first snapshots: memory that outlives the process takes long to allocate.
        always_whole: Each snapshot of the policy holds everything.
    """

    def __init__(self, run: RunContext, room: Room, *, is_wanted: bool, always_whole: bool) -> None:
        self._run, self._room, self._always_whole = run, room, always_whole
        self._is_due = is_wanted
        self._thread = WorkThread()

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
        self._room.begin_ready()
        if not self._thread.start(lambda: self._room.make_ready(share)):
            self._room.end_ready()

    def _share(self) -> Callable[[], int]:
        """Returns a function that estimates the bytes of a snapshot of everything. It is slow, and may run anywhere."""
        run = self._run
        tensors, specs = run.state.tensors(), run.state.specs()

        @functools.cache
        def share() -> int:
            expected = ExpectedShare(tensors, specs)
            return expected.nbytes(run.catalog, run.placement, run.settings.sharding, run.comm.rank)

        return share

    def top_up(self) -> None:
        """A snapshot began after which more are needed."""
        self._thread.start(self._room.top_up)

    def close(self) -> None:
        """As ``WorkThread.close``."""
        self._thread.close()
