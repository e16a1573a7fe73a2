"""Waiting for what must happen soon, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


def retry_until(condition: Callable[[], bool], secs: float = 120.0) -> bool:
    """Whether it became true within ``secs`` seconds."""
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
