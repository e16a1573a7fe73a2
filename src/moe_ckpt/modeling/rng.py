"""Random number generators of this process: Python, numpy, torch on the CPU and on the current GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """Returns the states as plain data and tensors, ready for the checkpoint's state tree."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restores what ``capture_rng`` returned. A GPU's state is ignored if there is no GPU now."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class Generators:
    """The states of the random number generators: read with a checkpoint, restored when training begins.

    Data loaders and their iterators, which are built in between, may draw from the generators.

    Args:
        capture: Returns the states of this process.
        restore: Sets them.

    Attributes:
        state: After the newest step; None before training without a checkpoint.
        due: ``state`` is still to be restored.
    """

    def __init__(self, capture: Callable[[], Mapping[str, Any]], restore: Callable[[Mapping[str, Any]], None]) -> None:
        self.state: Mapping[str, Any] | None = None
        self.due = False
        self._capture, self._restore = capture, restore

    def schedule(self, state: Mapping[str, Any] | None = None) -> None:
        """Sets the state that ``restore_scheduled`` restores; None for the present one."""
        self.state, self.due = self._capture() if state is None else state, True

    def restore_scheduled(self) -> None:
        """Restores the state of ``schedule``, once. Called when training begins."""
        if self.due:
            self.restore_newest()
        self.due = False

    def restore_newest(self) -> None:
        """Restores the state after the newest step, if it is known."""
        if self.state is not None:
            self._restore(self.state)

    def record(self) -> None:
        """Records the state after a step."""
        self.state = self._capture()
