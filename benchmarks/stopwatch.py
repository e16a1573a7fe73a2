"""Where the time of a call goes, by the functions it calls: exclusive of one another, and with next to no overhead.

cProfile charges every Python call about as much as many of them take; this charges the few that are named.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Watched = tuple[str, Any, str]
"""(what it is called in the table, its class or module, its name there)."""


@dataclass
class Stopwatch:
    """secs: label -> seconds on the thread that made this, less those of watched functions called meanwhile."""

    secs: dict[str, float] = field(default_factory=dict)
    _open: list[float] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)

    @contextmanager
    def watching(self, watched: Sequence[Watched]) -> Iterator[None]:
        """Time these functions until the block ends. Raises ``AttributeError`` for one that is not there."""
        originals = [(owner, name, getattr(owner, name)) for _, owner, name in watched]
        try:
            for label, owner, name in watched:
                setattr(owner, name, self._timed(label, getattr(owner, name)))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def take(self) -> dict[str, float]:
        """Seconds per label since the last call."""
        taken, self.secs = self.secs, {}
        return taken

    def _timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._open.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                inner = self._open.pop()
                if self._open:
                    self._open[-1] += took
                self.secs[label] = self.secs.get(label, 0.0) + took - inner

        return timed
