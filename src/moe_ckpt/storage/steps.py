"""The step directories of a store, as far as they lie in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import parse_step_dir
from moe_ckpt.storage.base import Storage

log = logging.getLogger("moe_ckpt")

Description = TypeVar("Description")
_warned_of: set[tuple[str, str]] = set()
"""(root, name) of the links that this process has warned of."""


def each_step(storage: Storage, look: Callable[[str], Description]) -> dict[str, Description]:
    """Step directory -> what ``look`` says of it, ordered by (generation, step).

    A symbolic link that is named like a step and leads out of the store is skipped, with one warning per process:
    whatever it leads to is not part of the store.

    Raises:
        OSError: the storage does not answer.
    """
    steps = {name: parsed for name in storage.list() if (parsed := parse_step_dir(name)) is not None}
    described: dict[str, Description] = {}
    for name in sorted(steps, key=lambda name: (steps[name][1], steps[name][0])):
        try:
            described[name] = look(name)
        except DamagedError as error:
            if (storage.root, name) not in _warned_of:
                _warned_of.add((storage.root, name))
                log.warning("%s/%s is skipped: it %s", storage.root, name, error.reason)
    return described
