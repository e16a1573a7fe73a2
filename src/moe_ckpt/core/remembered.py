"""A cache of functions of tuples, keyed by the identity of the tuple.

The operators of a dense checkpoint are one tuple of thousands of ids, the same object at each step. A cache that goes
by what is in it looks at every id for each question; this one looks at none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Given = TypeVar("_Given", bound="tuple[Any, ...]")
_Found = TypeVar("_Found")


class Remembered(Generic[_Given, _Found]):
    """Caches a function of tuples by the identity of the tuples that it was called with lately.

    Args:
        find: A pure function.
        most: So many answers are kept, with the tuples.
    """

    def __init__(self, find: Callable[[_Given], _Found], most: int = 16) -> None:
        self._find = find
        self._most = most
        self._known: dict[int, tuple[_Given, _Found]] = {}

    def __call__(self, given: _Given) -> _Found:
        known = self._known.get(id(given))
        if known is not None and known[0] is given:
            return known[1]
        found = self._find(given)
        self.note(given, found)
        return found

    def note(self, given: _Given, found: _Found) -> None:
        """Stores a result for ``given`` that is known already."""
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[id(given)] = given, found
