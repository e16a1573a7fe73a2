"""A clock that goes only when a test says so: how long a thing takes is then the same on a busy machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Clock:
    """To stand where a module has ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        self.now += secs

    def slow(self, owner: Any, name: str, called: Callable[[], None], setattr: Callable[..., None] = setattr) -> None:
        """From here on each call of the method ``name`` of the class ``owner`` takes a second, and is told of."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def slower(*args: Any, **kwargs: Any) -> Any:
            self.now += 1
            called()
            return original(*args, **kwargs)

        setattr(owner, name, slower)
