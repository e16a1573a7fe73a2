"""The thread that makes host memory ahead of time: the kernel takes long to clear pages, and no copy waits for it."""

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


class MakerThread:
    """Exists while there is something to make. ``start`` and ``close`` are called on the training thread."""

    def __init__(self) -> None:
        self._works: deque[Callable[[], bool]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lock = threading.Lock()

    def start(self, work: Callable[[], bool]) -> bool:
        """Call ``work`` on the thread, again and again, until it returns False. Its errors are logged.

        Returns:
            False if that will not happen: there is no thread to be had, or it is closed.
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
            except RuntimeError:  # no thread to be had
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
            except Exception:  # whatever it is, training makes its own then
                log.exception("memory could not be made ahead of time")
                again = False
            if not again:
                self._works.popleft()

    def close(self) -> None:
        """No more is made; returns when what is in hand is."""
        with self._lock:
            self._closing, thread = True, self._thread
        if thread is not None:
            thread.join()


class AheadOfTime:
    """Has made what the next snapshots of a rank need, as far as it is known before. For the training thread.

    Args:
        run: The session's.
        room: Of the buffers.
        is_wanted: Of the first snapshots, too: memory that outlives the process takes long to make.
        always_whole: Each snapshot of the policy holds everything.
    """

    def __init__(self, run: RunContext, room: Room, *, is_wanted: bool, always_whole: bool) -> None:
        self._run, self._room, self._always_whole = run, room, always_whole
        self._waits = is_wanted
        self._thread = MakerThread()

    def training_begins(self, *, whole: bool) -> None:
        """The state is as it will be, but for what the optimizer has yet to make. Counts once.

        Args:
            whole: The first snapshot will have everything, whatever the policy.
        """
        if not self._waits:
            return
        self._waits = False
        share = self._share() if whole or self._always_whole else None
        self._room.begin_ready()
        if not self._thread.start(lambda: self._room.make_ready(share)):
            self._room.end_ready()

    def _share(self) -> Callable[[], int]:
        """Returns what says how many bytes a snapshot of everything has, on any thread: it may take a while."""
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
        """As ``MakerThread.close``."""
        self._thread.close()
