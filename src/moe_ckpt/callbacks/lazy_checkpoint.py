"""The checkpoint dict that hooks get, whose ``state_dict`` is made when a hook reads it.

Few hooks do, and with thousands of modules making it takes longer at each step than the rest of the checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

_KEY = "state_dict"
_NOT_YET = object()


class LazyCheckpoint(dict[str, Any]):
    """A dict whose ``state_dict`` is ``make()`` once it is read.

    It has an ``__iter__`` because Python's own functions that copy a dict bypass the methods of a subclass without one.
    """

    def __init__(self, content: Mapping[str, Any], make: Callable[[], Any]) -> None:
        super().__init__({**content, _KEY: _NOT_YET})
        self._make = make
        self._made: Any = _NOT_YET

    def marked(self, mark: str) -> dict[str, Any]:
        """Returns the content with ``mark`` in place of the model's ``state_dict``, made or not."""
        return {k: mark if v is self._made or v is _NOT_YET else v for k, v in super().items()}

    def _made_whole(self) -> LazyCheckpoint:
        if super().get(_KEY) is _NOT_YET:
            self._made = self._make()
            self[_KEY] = self._made
        return self

    def __getitem__(self, key: str) -> Any:
        return super(LazyCheckpoint, self._made_whole() if key == _KEY else self).__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return super(LazyCheckpoint, self._made_whole() if key == _KEY else self).get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        return super(LazyCheckpoint, self._made_whole() if key == _KEY else self).pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return super(LazyCheckpoint, self._made_whole() if key == _KEY else self).setdefault(key, default)

    def popitem(self) -> tuple[str, Any]:
        return super(LazyCheckpoint, self._made_whole()).popitem()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return super(LazyCheckpoint, self._made_whole()).values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return super(LazyCheckpoint, self._made_whole()).items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    def __ne__(self, other: object) -> bool:
        return self.copy() != other

    __hash__ = None

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # a class that torch.load knows
