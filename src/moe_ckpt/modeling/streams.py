"""Positions of streamed data sets of Hugging Face's ``datasets``, which tell a wrong one right after a restart."""

from __future__ import annotations

import functools
import sys
from typing import Any


def tell_loaded_positions() -> None:
    """Makes streamed data sets tell the position that was loaded, until they are iterated.

    By themselves they tell their beginning then: also one in a worker of a loader that has not made a batch yet, so
    that a second restart would train the first samples again.
    """
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    if kind is not None:
        _tell_loaded_position(kind)


@functools.cache
def _tell_loaded_position(kind: Any) -> None:
    load = kind.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        self._state_dict = state_dict  # which the first iteration replaces

    kind.load_state_dict = load_state_dict
