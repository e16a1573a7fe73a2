"""Loads stored state into objects of other packages and of users: trainers, callbacks, schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_ckpt.errors import MoECheckpointError, state_refused

_REFUSALS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, AssertionError)


@contextmanager
def loading_state(what: str, path: str, advice: str = "") -> Iterator[None]:
    """The block calls ``load_state_dict`` of a foreign object: its errors become ``StoreError``. Ours pass.

    Args:
        what: Whose state it is.
        path: Of the state file.
        advice: What to do, if not to restore the run's configuration.
    """
    try:
        yield
    except _REFUSALS as error:
        if isinstance(error, MoECheckpointError):
            raise
        raise state_refused(path, what, f"{type(error).__name__}: {error}", advice) from error
