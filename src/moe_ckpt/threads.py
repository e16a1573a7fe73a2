"""The threads that the library starts, each under a name of this table; docs/scale.md says what they do.

A stack dump or a profiler shows the names. They may run while the training thread captures CUDA graphs.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from itertools import chain, islice
from typing import Any, TypeVar

log = logging.getLogger("moe_ckpt")

S = TypeVar("S")
T = TypeVar("T")


class ThreadName(Enum):
    """Names of threads; several threads with one name have a suffix."""

    AGREE = "moe_ckpt-agree"
    CHECK = "moe_ckpt-check"
    CHECKSUM = "moe_ckpt-checksum"
    COPY = "moe_ckpt-copy"
    HEADERS = "moe_ckpt-headers"
    LEASE = "moe_ckpt-lease"
    LIST = "moe_ckpt-list"
    MAKE = "moe_ckpt-make"
    MESSAGES = "moe_ckpt-messages"
    PARTS = "moe_ckpt-parts"
    PERSIST = "moe_ckpt-persist"
    PROFILE = "moe_ckpt-profile"
    READ = "moe_ckpt-read"
    REMOVE = "moe_ckpt-remove"
    REPLICATE = "moe_ckpt-replicate"
    SEAL = "moe_ckpt-seal"
    SIGTERM = "moe_ckpt-sigterm"
    STATE = "moe_ckpt-state"
    UPSTREAM = "moe_ckpt-upstream"
    VERIFY = "moe_ckpt-verify"


_OWN_CAPTURES = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``."""


def _disturb_no_capture() -> None:
    """Lets the calling thread use CUDA while another one captures a graph.

    While a thread captures in CUDA's "global" mode, as torch and Megatron-Core do, a call that waits for an event, or
    locks or frees memory, fails on all threads and ends the capture (``cudaErrorStreamCaptureUnsafe``), except on
    threads whose own mode says that captures of other threads do not concern them. The mode is the driver's, so this
    makes no context on any device.
    """
    with contextlib.suppress(OSError, AttributeError):  # this process has not loaded the driver
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_OWN_CAPTURES)))


def named_thread(name: ThreadName, work: Callable[..., Any], *args: Any, suffix: str = "") -> threading.Thread:
    """Returns a thread that is not started yet: a daemon, since what hangs must not keep the process from ending."""

    def run() -> None:
        _disturb_no_capture()
        work(*args)

    return threading.Thread(target=run, name=name.value + suffix, daemon=True)


def named_pool(name: ThreadName, most: int = 1) -> ThreadPoolExecutor:
    """Returns a pool of at most so many threads, each of which starts when there is work for it.

    Python waits for them when the process ends.
    """
    return ThreadPoolExecutor(most, thread_name_prefix=name.value, initializer=_disturb_no_capture)


def map_ahead(name: ThreadName, threads: int, work: Callable[[S], T], tasks: Iterable[S]) -> Iterator[T]:
    """Yields what ``work`` makes of each task, in order; threads are at work on the next ones meanwhile.

    With one thread, or for a single task, the caller works by itself.

    Args:
        name: Of the threads.
        threads: So many tasks are under way at once, and one more waits to be taken.
        work: Called on any of the threads.
        tasks: They are taken one by one.
    """
    remaining = iter(tasks)
    first = list(islice(remaining, 2))
    if threads == 1 or len(first) < 2:
        yield from map(work, chain(first, remaining))
        return
    with named_pool(name, threads) as pool:
        under_way: deque[Future[T]] = deque()
        try:
            for task in chain(first, remaining):
                under_way.append(pool.submit(work, task))
                if len(under_way) > threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class TaskThread:
    """Carries out tasks in order, on a daemon thread that starts at once.

    Args:
        name: Of the thread.
        failed: Called on the thread with what a task raised, which is logged by default; the next one follows all the
            same.
    """

    def __init__(self, name: ThreadName, failed: Callable[[Exception], None] = log.exception) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._failed = failed
        self._thread = named_thread(name, self._run)
        self._thread.start()

    def put(self, task: Callable[[], object] | None) -> None:
        """Returns at once; ``task`` runs when those before it are done. None ends the thread then."""
        self._tasks.put(task)

    def close(self, timeout_secs: float | None = None) -> bool:
        """Waits for the tasks that were put; returns False if they took longer. Twice does no harm."""
        self._tasks.put(None)
        self._thread.join(timeout_secs)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # a thread's edge
                self._failed(error)
            del task  # what it refers to may take memory, or be a process group, which must end with its owners
