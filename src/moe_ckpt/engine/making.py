"""The thread that makes host memory ahead of time: the kernel takes long to clear pages, and no copy waits for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import torch

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
            except RuntimeError:  # training makes its own then
                self._works.clear()
                return False
            self._thread = thread
            return True

    def _run(self, device: int | None) -> None:
        if device is not None:  # else what is page-locked belongs to the first device, whichever this rank uses
            torch.cuda.set_device(device)
        while True:
            with self._lock:
                if self._closing or not self._works:
                    self._thread = None
                    return
                work = self._works[0]
            try:
                again = work()
            except Exception:
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
