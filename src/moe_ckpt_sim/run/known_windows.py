"""A cache of a policy's windows: the policy is asked once for each pattern of its inputs."""

from __future__ import annotations

from moe_ckpt.core.window import Window

_WINDOWS_KEPT = 128


class KnownWindows:
    """The newest windows, each keyed by its policy's inputs."""

    def __init__(self) -> None:
        self._windows: dict[bytes, Window] = {}
        self._ordered: tuple[Window, int] | None = None

    def find(self, key: bytes) -> Window | None:
        """Returns the window that the policy made from the same inputs; None if there is none."""
        return self._windows.get(key)

    def keep(self, key: bytes, window: Window) -> None:
        """Store the window, and drop the oldest if there are too many."""
        if len(self._windows) >= _WINDOWS_KEPT:
            self._windows.pop(next(iter(self._windows)))
        self._windows[key] = window

    def order_of(self, window: Window) -> int:
        """A hash that is equal for windows with the same slots and frequencies, within one process."""
        slots, frequencies = window.slots, window.frequencies
        if self._ordered is not None:
            last, order = self._ordered
            if last.slots is slots and last.frequencies is frequencies:  # a moved window, most of the time
                return order
        order = hash((slots, None if frequencies is None else tuple(frequencies.items())))
        self._ordered = window, order
        return order
