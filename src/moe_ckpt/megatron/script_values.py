"""Values of Megatron-LM's training scripts: nested, and changed for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def flat(value: Any) -> Iterator[Any]:
    """Yields what lists and tuples hold, however deep."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    else:
        yield value


@contextmanager
def changed(target: Any, **values: Any) -> Iterator[None]:
    """Sets those attributes that ``target`` has to other values until the block ends."""
    old = {name: getattr(target, name) for name in values if hasattr(target, name)}
    for name in old:
        setattr(target, name, values[name])
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(target, name, value)
