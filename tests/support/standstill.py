"""The training thread waits for what will not come, where no handler of Python's runs."""

from __future__ import annotations

import ctypes


def never_returns() -> None:
    """As a collective without its peers does."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)
