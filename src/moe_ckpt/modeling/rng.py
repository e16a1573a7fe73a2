"""Random number generators of this process: Python, numpy, torch on the CPU and on the current GPU."""

from __future__ import annotations

import _random
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from moe_ckpt.format.gathering import Bytes, memory_at

_HEAD = object.__basicsize__
_WORDS = 624
_NBYTES = 4 * (1 + _WORDS)
"""Of a Mersenne twister in CPython: its place, and its words."""


class _PythonState:
    """``random.getstate()``, made of its 625 numbers anew only where one has changed, which they rarely do in training.

    In a process with millions of objects those that are made anew lie in as many different places. CPython keeps the
    numbers as one piece of memory; what lies there is compared with what Python says before it is relied on.
    """

    def __init__(self) -> None:
        self._known: tuple[object, object, bytes, Any] | None = None
        self._memory: tuple[object, Bytes | None] = None, None

    def read(self) -> Any:
        generator = getattr(random.getstate, "__self__", None)
        if generator is not self._memory[0]:
            self._memory = generator, _memory_of(generator)
        memory = self._memory[1]
        if memory is None or generator is None:
            return random.getstate()
        now, gauss = memory.tobytes(), generator.gauss_next
        known = self._known
        if known is not None and known[0] is generator and known[1] is gauss and known[2] == now:
            return known[3]
        state = random.getstate()
        then = np.array([state[1][-1], *state[1][:-1]], dtype=np.uint32).tobytes()
        self._known = (generator, gauss, now, state) if then == now else None
        return state


def _memory_of(generator: object) -> Bytes | None:
    """What a generator keeps besides ``gauss_next``; None where that is not known."""
    if type(generator) is not random.Random or sys.implementation.name != "cpython" or sys.byteorder != "little":
        return None
    if not _HEAD + _NBYTES <= _random.Random.__basicsize__ < _HEAD + _NBYTES + 8:
        return None
    return memory_at(id(generator) + _HEAD, _NBYTES)


_python = _PythonState()


def capture_rng() -> dict[str, Any]:
    """States as plain data and tensors, ready for the checkpoint's state tree."""
    state: dict[str, Any] = {
        "python": _python.read(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Inverse of ``capture_rng``. A GPU's state is left out where there is no GPU now."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
