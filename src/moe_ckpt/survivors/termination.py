"""Handles what ends a process: an uncaught exception, and SIGTERM.

Launchers send SIGTERM to ranks when another rank has failed, and schedulers when time is up. Unless other code handles
it, the newest step is sealed before the process ends as it would have. The handler runs on the training thread, between
two operations of Python. If that thread waits in a collective for a lost peer, it never reaches the handler; then a
thread that is woken by the signal itself seals the step, which nothing changes meanwhile. Under ``torchrun``, which
kills 30 s after the signal, the thread also does so if other code handles the signal (Lightning does), once the
training thread has made no progress for long.

A forked child (a pool's worker) inherits the handler, and the socket by which the signal wakes its parent's thread. It
drops both before it can get a signal, so that a signal to a child does not end training.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from moe_ckpt.memory.options import TORCHRUN_GRACE_SECS
from moe_ckpt.threads import ThreadName, named_thread

if TYPE_CHECKING:
    from moe_ckpt.survivors.stopping import Surviving

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

HANDLER_SECS = 1.0
"""Seconds for the training thread to reach the handler, and the end of a step under way."""
LAST_SECS = 2.0
"""Seconds before ``torchrun`` kills at which sealing must have ended."""
EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process whose training thread did not return."""

_watching: weakref.WeakSet[Termination] = weakref.WeakSet()
_forking = threading.local()
"""``mask``: The signals that a forking thread blocked before."""


class Termination:
    """Handles uncaught exceptions and SIGTERM from ``watch`` to ``unwatch``. All on the main thread.

    An existing handler of SIGTERM stays.

    Args:
        surviving: Seals the newest step.
        secs: Most seconds that this may take, and longest wait for a step under way.
    """

    def __init__(self, surviving: Surviving, secs: float) -> None:
        self._surviving, self._secs = surviving, secs
        self._came = threading.Event()
        self._handled = threading.Event()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._wakes = self._is_beside = False
        self._stream: torch.cuda.Stream | None = None
        self._previous: _ExceptHook = sys.__excepthook__
        self._ours: _ExceptHook | None = None

    def watch(self) -> None:
        """Begins to handle both. Does nothing on other threads than the main one, or if the signal has a handler."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._ours is None:
            self._previous, self._ours = sys.excepthook, self._uncaught
            sys.excepthook = self._ours
        if not is_main or self._sockets is not None:
            return
        handler = signal.getsignal(signal.SIGTERM)
        self._is_beside = callable(handler)
        if handler is not signal.SIG_DFL and not (self._is_beside and "TORCHELASTIC_RUN_ID" in os.environ):
            return
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._wakes = before == -1
        if not self._wakes:  # an event loop uses it: then there is only the handler
            signal.set_wakeup_fd(before)
        self._sockets = reader, writer
        _watching.add(self)  # before the handler is set, so that no child inherits only that
        if not self._is_beside:
            signal.signal(signal.SIGTERM, self._handle)
        named_thread(ThreadName.SIGTERM, self._wait, reader).start()

    def unwatch(self) -> None:
        """Restores what ``watch`` replaced. A forked child, which inherits it, does not affect its parent."""
        ours, self._ours = self._ours, None
        if ours is not None and sys.excepthook is ours:
            sys.excepthook = self._previous
        sockets, self._sockets = self._sockets, None
        if sockets is None:
            return
        _watching.discard(self)
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._wakes:
                signal.set_wakeup_fd(-1)
        if self._surviving.is_here:
            sockets[1].shutdown(socket.SHUT_RDWR)  # the thread reads an end, and closes its own
        else:
            sockets[0].close()  # the child's copy; the thread is its parent's
        sockets[1].close()

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Seals, unless ``unwatch`` was called, and calls the previous hook."""
        if self._ours is not None:
            self._surviving.survive(kind.__name__)
        self._previous(kind, error, trace)

    def settle(self) -> None:
        """Ends the process after a step during which the signal came. On the training thread."""
        if self._came.is_set():
            self._end()

    def _handle(self, number: int, frame: Any) -> None:
        if not self._surviving.is_here:  # called by an inherited handler of the user's
            self._die()
            return
        self._came.set()
        if not self._surviving.ends_soon:
            self._end()

    def _end(self) -> None:
        """Seals, and ends the process by the signal."""
        self._handled.set()
        self._surviving.survive("SIGTERM")
        self._die()

    def _die(self) -> None:
        self.unwatch()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    def _wait(self, reader: socket.socket) -> None:
        """Waits for the signal until the sockets are closed. On the thread."""
        with reader:
            while number := reader.recv(1):
                if number[0] == signal.SIGTERM:
                    self._act()

    def _act(self) -> None:
        """Seals after the signal if the training thread does not, because it waits for a lost peer."""
        is_beside = self._is_beside or signal.getsignal(signal.SIGTERM) != self._handle  # another handler came later
        if is_beside and not ("TORCHELASTIC_RUN_ID" in os.environ and self._stands_still()):
            return
        until = time.monotonic() + self._secs
        while not self._handled.wait(HANDLER_SECS):
            soon = self._surviving.ends_soon and not self._surviving.is_whole
            if soon and time.monotonic() < until:
                continue
            with torch.cuda.stream(self._stream):  # the stream of training's updates; each thread has its own default
                self._surviving.survive("SIGTERM")
            os._exit(EXIT_CODE)

    def _stands_still(self) -> bool:
        """Waits until the training thread has made no progress for long, or until ``torchrun`` is about to kill.

        The time leaves enough of ``torchrun``'s 30 s for sealing. Returns False once the step is sealed, or training is
        over.
        """
        since = time.monotonic()
        last = since + TORCHRUN_GRACE_SECS - LAST_SECS
        patience, frame, instruction = max(HANDLER_SECS, last - since - self._secs), None, -1
        while time.monotonic() < min(since + patience, last - HANDLER_SECS):
            time.sleep(HANDLER_SECS / 4)
            if self._sockets is None or self._surviving.is_over:
                return False
            # Frames are compared by identity, which is unique while the frame is referenced, and by instruction, which
            # a loop revisits.
            was, frame = frame, sys._current_frames().get(threading.main_thread().ident or 0)
            if frame is not was or frame is None or frame.f_lasti != instruction:
                since, instruction = time.monotonic(), -1 if frame is None else frame.f_lasti
        return True


def _before_fork() -> None:
    """Blocks SIGTERM during a fork: a child that still has the socket would wake its parent's thread."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]) if _watching else None


def _after_fork() -> None:
    mask, _forking.mask = _forking.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    for termination in list(_watching):
        termination.unwatch()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
