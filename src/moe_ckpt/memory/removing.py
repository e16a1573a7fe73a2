"""Deletes slots while the process goes on: to give their pages back takes the kernel a tenth of a second per GB."""

from __future__ import annotations

import contextlib
import threading

from moe_ckpt.memory.slot import Slot, remove_files


class SlotRemover:
    """On threads of its own, one for each call. ``remove`` is called on one thread at a time, ``wait`` on any."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def remove(self, slots: list[Slot]) -> None:
        """Delete slots. When this returns no later life comes back to them; their memory follows.

        Args:
            slots: Emptied. Who else knows one of them keeps its memory.
        """
        _unseal(slots)
        thread = threading.Thread(target=_remove, args=(slots,), name="moe_ckpt-remove", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        try:
            thread.start()
        except RuntimeError:  # no thread to be had
            _remove(slots)
        else:
            self._threads.append(thread)

    def wait(self) -> bool:
        """Until all is deleted; False if nothing was under way."""
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
