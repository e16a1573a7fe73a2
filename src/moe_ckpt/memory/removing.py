"""Deletes slots while the process goes on: to give their pages back takes the kernel a tenth of a second per GB."""

from __future__ import annotations

import contextlib
import threading

from moe_ckpt.memory.slot import Slot, remove_files
from moe_ckpt.threads import ThreadName, named_thread


class SlotRemover:
    """On threads of its own, one for each call that has something to delete. Any thread may call it."""

    def __init__(self) -> None:
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
        thread = named_thread(ThreadName.REMOVE, _remove, slots)
        try:
            with self._lock:
                thread.start()
                self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        except RuntimeError:  # no thread to be had
            _remove(slots)

    def wait(self) -> bool:
        """Until all is deleted; False if nothing was under way."""
        with self._lock:
            threads = [each for each in self._threads if each.is_alive()]
        for thread in threads:
            thread.join()
        return bool(threads)


def _unseal(slots: list[Slot]) -> None:
    for slot in slots:
        with contextlib.suppress(OSError):  # said when the rest cannot be removed either
            slot.unseal()


def _remove(slots: list[Slot]) -> None:
    """Unmapped first: so the kernel takes the pages back when the file goes, for which Python lets others run."""
    while slots:
        path = slots.pop().path
        remove_files(path)
