"""Random number generators across a resume: read with the tensors, restored when training begins.

Data loaders and their iterators, which are built in between, may draw from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Generators:
    """The generators of one process, of which ``capture`` returns the states and ``restore`` sets them.

    Attributes:
        state: As of the newest step; None before training without a checkpoint.
        due: ``state`` is still to be restored.
    """

    def __init__(self, capture: Callable[[], Mapping[str, Any]], restore: Callable[[Mapping[str, Any]], None]) -> None:
        self.state: Mapping[str, Any] | None = None
        self.due = False
        self._capture, self._restore = capture, restore

    def take(self, state: Mapping[str, Any] | None = None) -> None:
        """Sets the state that training begins with; None for the present one."""
        self.state, self.due = self._capture() if state is None else state, True

    def put_back(self) -> None:
        """Restores the state that training begins with, once."""
        if self.due:
            self.go_back()
        self.due = False

    def go_back(self) -> None:
        """Restores the state after the newest step, if there was one."""
        if self.state is not None:
            self._restore(self.state)

    def note(self) -> None:
        """Records the state after a step."""
        self.state = self._capture()
