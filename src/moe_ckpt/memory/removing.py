"""Deletes slots while the process goes on: to give their pages back takes the kernel a tenth of a second per GB."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from moe_ckpt.memory.slot import Slot
from moe_ckpt.threads import ThreadName, named_thread


class SlotRemover:
    """Removes slots on threads of its own, one for each call that has something to delete. Any thread may call it.

    Args:
        afterwards: Called on such a thread when the slots of a call are deleted.
    """

    def __init__(self, afterwards: Callable[[], None] = lambda: None) -> None:
        self._afterwards = afterwards
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def remove(self, slots: list[Slot]) -> None:
        """Delete slots. When this returns no later life comes back to them; their memory follows.

        Args:
            slots: Emptied. Who else knows one of them keeps its memory.
        """
        if not slots:
            return
        _unseal(slots)
        thread = named_thread(ThreadName.REMOVE, self._remove, slots)
        try:
            with self._lock:
                thread.start()
                self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        except RuntimeError:  # no thread to be had
            self._remove(slots)

    def _remove(self, slots: list[Slot]) -> None:
        while slots:
            slots.pop().remove()
        self._afterwards()

    def wait(self) -> bool:
        """Waits until all is deleted; False if nothing was under way."""
        with self._lock:
            threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in threads:
            thread.join()
        return bool(threads)


def _unseal(slots: list[Slot]) -> None:
    for slot in slots:
        with contextlib.suppress(OSError):  # said when the rest cannot be removed either
            slot.unseal()
