"""Slots that are there before a snapshot needs them: what the start before left, and what is made ahead of time.

Only as long as as much again is free on their file system: where room is scarce, what earlier starts left, headers and
snapshots that are due come first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moe_ckpt.core.survivors import GRADIENTS
from moe_ckpt.engine.buffers import HostBufferPool
from moe_ckpt.engine.host_buffer import PIECES, WHOLE
from moe_ckpt.errors import MemoryFullError
from moe_ckpt.memory.files import FoundSlot, MemoryFiles
from moe_ckpt.memory.slot import Slot
from moe_ckpt.storage.local import free_bytes

log = logging.getLogger("moe_ckpt")

_KINDS = {"": WHOLE, GRADIENTS: PIECES}
"""What is in a slot, as its header says -> what a buffer of its size is for."""


class EarlySlots:
    """Of one rank.

    Args:
        rank: This one.
        files: Where they lie.
        pool: That lends them.
    """

    def __init__(self, rank: int, files: MemoryFiles, pool: HostBufferPool) -> None:
        self._rank, self._files, self._pool = rank, files, pool

    def make(self, nbytes: int) -> Slot:
        """A new slot, at the expense of nothing. On any thread.

        Raises:
            MemoryFullError: There is little room.
            OSError: It cannot be made.
        """
        free = free_bytes(str(self._files.path))
        if free < 2 * nbytes:
            raise MemoryFullError(str(self._files.path), 2 * nbytes, free)
        return self._files.make(nbytes)

    def take_over(self, over: Sequence[FoundSlot]) -> list[FoundSlot]:
        """Makes buffers of this rank's own slots, whose pages the kernel need not clear; returns the others."""
        return [found for found in over if not self._take(found)]

    def _take(self, found: FoundSlot) -> bool:
        """Makes a buffer of a slot; False if it is not this rank's, does not fit, or cannot be taken over."""
        kind, slot, nbytes = _KINDS.get(found.header.only), found.slot, found.slot.memory.numel()
        left = self._pool.budget_bytes - self._pool.held_bytes
        if found.header.rank != self._rank or kind is None or nbytes > left:
            return False
        try:
            if free_bytes(str(self._files.path)) < nbytes:
                return False
            self._files.take_over(slot)
        except OSError as error:
            log.info("the memory slot %s is deleted, and not used again: %s", slot.path, error)
            return False
        self._pool.add(slot, kind)
        return True
