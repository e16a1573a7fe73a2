"""How long checkpointing keeps the training thread: one clock of a run, which every hook starts and stops."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """Adds up the time between ``with`` and its end. An entry within another one counts with that.

    Training's thread enters it, and autograd's threads do while that one waits for a backward pass: never two at once.
    """

    __slots__ = ("_began", "_depth", "_secs")

    def __init__(self) -> None:
        self._depth = 0
        self._began = self._secs = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._began = time.perf_counter()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._secs += time.perf_counter() - self._began

    def leave_out(self, secs: float) -> None:
        """Subtracts a part of the entry under way that is counted elsewhere."""
        self._secs -= secs

    def until(self, now: float) -> float:
        """Returns the seconds counted until ``now`` (``time.perf_counter``), those of an entry under way included."""
        return self._secs + (now - self._began if self._depth else 0.0)

    def around(self, call: Callable[P, R]) -> Callable[P, R]:
        """Returns ``call``, whose time is counted."""

        @functools.wraps(call)
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return call(*args, **kwargs)

        return counted


class Since:
    """The time that a stopwatch has counted since the last ``take``.

    Args:
        stopwatch: Whose.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._before = 0.0

    def take(self, now: float | None = None) -> float:
        """Returns the seconds counted since then, until ``now``."""
        before, self._before = self._before, self._stopwatch.until(time.perf_counter() if now is None else now)
        return self._before - before


def timed(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method of an object that has a ``stopwatch``: its time is counted."""

    @functools.wraps(method)
    def counted(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with owner.stopwatch:
            return method(*args, **kwargs)

    return counted
