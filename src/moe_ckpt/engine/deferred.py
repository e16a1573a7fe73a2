"""A value that may still be on its way from a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class DeviceEvent(Protocol):
    """A point in a device's work, such as ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Return when the device has come so far."""
        ...


class Deferred(Generic[T]):
    """A value to come. Reading it waits for the device; passing it on does not. May be used by several threads.

    Args:
        make: Gives the value. Called once, when all events have happened.
        events: None if the value needs no device.
    """

    def __init__(self, make: Callable[[], T], events: Sequence[DeviceEvent] = ()) -> None:
        self._make = make
        self._events = events
        self._values: list[T] = []
        self._lock = threading.Lock()

    def result(self) -> T:
        """The value. Not for the training thread, which would wait for the device."""
        with self._lock:
            if not self._values:
                for event in self._events:
                    event.synchronize()
                self._values.append(self._make())
            return self._values[0]

    def then(self, change: Callable[[T], U]) -> Deferred[U]:
        """Applies ``change`` to the value, when the result is read."""
        return Deferred(lambda: change(self.result()))
