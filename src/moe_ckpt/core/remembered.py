"""A cache of functions of tuples, keyed by the identity of the tuple.

The operators of a dense checkpoint are one tuple of thousands of ids, the same object at each step. A cache that goes
by what is in it looks at every id for each question; this one looks at none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Key = TypeVar("_Key", bound="tuple[Any, ...]")
_Result = TypeVar("_Result")


class Remembered(Generic[_Key, _Result]):
    """Caches a function of tuples by the identity of the tuples that it was called with lately.

    Args:
        find: A pure function.
        most: So many answers are kept, with the tuples.
    """

    def __init__(self, find: Callable[[_Key], _Result], most: int = 16) -> None:
        self._find = find
        self._most = most
        self._entries: dict[int, tuple[_Key, _Result]] = {}

    def __call__(self, key: _Key) -> _Result:
        entry = self._entries.get(id(key))
        if entry is not None and entry[0] is key:
            return entry[1]
        result = self._find(key)
        self.note(key, result)
        return result

    def note(self, key: _Key, result: _Result) -> None:
        """Stores a result for ``key`` that is known already."""
        if len(self._entries) >= self._most:
            self._entries.clear()
        self._entries[id(key)] = key, result
