"""The thread that makes host memory, and frees it: the kernel takes long to clear pages, and CUDA to page-lock them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from moe_ckpt.threads import ThreadName, named_thread

log = logging.getLogger("moe_ckpt")

T = TypeVar("T")


class WorkThread:
    """A background thread that exists only while there is work. ``start`` and ``close``: on the training thread."""

    def __init__(self) -> None:
        self._works: deque[Callable[[], bool]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Calls ``work`` once, after what was started before. On the calling thread if there is no other."""
        result: Future[T] = Future()

        def run() -> bool:
            try:
                result.set_result(work())
            except BaseException as error:  # it is the caller's
                result.set_exception(error)
            return False

        if not self.start(run):
            run()
        return result

    def start(self, work: Callable[[], bool]) -> bool:
        """Call ``work`` on the thread until it returns False, in turns with other work. Its errors are logged.

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
            thread = named_thread(ThreadName.MAKE, self._run, device)
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
                work = self._works.popleft()
            try:
                again = work()
            except Exception:  # whatever it is, the next snapshot asks again
                log.exception("memory could not be made ahead of time")
                again = False
            if again:
                self._works.append(work)

    def close(self) -> None:
        """Start no more work; return when the work in hand is done."""
        with self._lock:
            self._closing, thread = True, self._thread
        if thread is not None:
            thread.join()
