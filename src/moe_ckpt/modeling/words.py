"""What CPython notes in the objects themselves, read from there, many objects at a time.

To ask 25 000 modules for their type, attributes and tables takes five calls for each, and that is most of what a
checkpoint of few experts asks of the training thread. The answers are machine words at known places of objects that
are alive, so one operation of numpy reads those of all. What is read is compared with what Python answers when the
objects are first seen; where they are not the same, or in another Python, nobody reads here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from moe_ckpt.format.gathering import Values, Words

__all__ = ["Values", "Words", "types_and_attributes", "versions"]

_TYPE_AT, _VERSION_AT = 8, 24
"""Where an object has its type, and a dict its version, up to Python 3.11."""
_MANAGED_DICT, _MANAGED_AT = 1 << 4, -24
"""Flag of types that keep the pointer to an object's attributes in front of it, and where (Python 3.11)."""
_KNOWN = sys.implementation.name == "cpython" and sys.version_info < (3, 12) and sys.maxsize > 1 << 32


def versions(dicts: Sequence[dict[Any, Any]], version: Callable[[dict[Any, Any]], int]) -> Words | None:
    """The versions of dicts, which ``version`` tells; None where they cannot be read."""
    return _checked(dicts, [id(each) + _VERSION_AT for each in dicts], list(map(version, dicts)))


def types_and_attributes(objects: Sequence[object]) -> Words | None:
    """Which types objects have, and which dicts of attributes; None where that cannot be read."""
    places = [_attributes_at(type(each)) for each in objects]
    if not all(places):
        return None
    # Both words of an object after one another: the second is then in the processor's cache.
    both = [(id(each) + _TYPE_AT, id(each) + at) for each, at in zip(objects, places, strict=True)]
    expected = [(id(type(each)), id(vars(each))) for each in objects]
    return _checked(objects, list(chain.from_iterable(both)), list(chain.from_iterable(expected)))


def _attributes_at(kind: type) -> int:
    """Where objects of a type point to their attributes; 0 if that is not known."""
    if sys.version_info >= (3, 11) and kind.__flags__ & _MANAGED_DICT:
        return _MANAGED_AT
    return max(0, kind.__dictoffset__)


def _checked(objects: Sequence[object], addresses: Sequence[int], expected: Sequence[int]) -> Words | None:
    if not _KNOWN or not len(objects):
        return None
    words = Words(objects, np.array(addresses, dtype=np.int64))
    return words if words.are(np.array(expected, dtype=np.uint64)) else None
