"""Giving stored state back to objects that are not ours: trainers, callbacks, schedulers, a user's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_ckpt.errors import MoECheckpointError, StateRefusedError

_REFUSALS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, AssertionError)


@contextmanager
def handing_back(what: str, path: str, advice: str = "") -> Iterator[None]:
    """Around ``load_state_dict`` and the like. what: whose state it is. path: of the state file.
    advice: what to do, where that is not to restore the configuration of the run.

    Raises:
        StateRefusedError: instead of what such an object raises for state that it cannot take. This package's own
            errors pass.
    """
    try:
        yield
    except _REFUSALS as error:
        if isinstance(error, MoECheckpointError):
            raise
        raise StateRefusedError(path, what, f"{type(error).__name__}: {error}", advice) from error
