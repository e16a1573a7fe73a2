"""What was worked out of tuples, remembered by which tuple it is.

The operators of a dense checkpoint are one tuple of thousands of ids, the same object at each step. A cache that goes
by what is in it looks at every id for each question; this one looks at none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Given = TypeVar("_Given", bound="tuple[Any, ...]")
_Found = TypeVar("_Found")


class Remembered(Generic[_Given, _Found]):
    """A function of tuples that answers at once for the very object that it was called with lately.

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
        """What is found for ``given`` is known already."""
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[id(given)] = given, found
