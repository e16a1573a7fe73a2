"""Functions of others, called around until they are released: where a framework has no hook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any


class Wrapped:
    """A function that is wrapped until ``close``.

    If others have wrapped it since, theirs stays in place, and ours only calls the original. A copy of the owner has a
    function of its own, as its class defines it.

    Args:
        owner: The object, class or module that has the function.
        name: Name of the function.
        around: Called in its place, with the original and the arguments of the call.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        functools.update_wrapper(self, original)  # first, since it copies the attributes of a function that is wrapped
        self._owner, self._name, self._original, self._around = owner, name, original, around
        self._replaced = vars(owner).get(name)
        self._is_open = True
        setattr(owner, name, self)

    def wrapper(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_open:
            return self._around(self._original, *args, **kwargs)
        return self._original(*args, **kwargs)

    __call__ = wrapper

    def __get__(self, instance: Any, kind: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return _method_of, (self._owner, self._name)

    def close(self) -> None:
        """Removes the wrapper. May be called twice."""
        self._is_open = False
        if vars(self._owner).get(self._name) is not self:
            return
        if self._replaced is None:  # it is of the class
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._replaced)


def _method_of(owner: Any, name: str) -> Any:
    return getattr(type(owner), name).__get__(owner)
