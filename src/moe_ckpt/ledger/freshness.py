"""Tells whether a snapshot is fresh: after an update, checksums of optimizer state or weights must have changed. Pure.

A checkpoint can be intact and yet stale: if the optimizer no longer writes into the tensors that are saved, every
checkpoint is the same, and nobody notices until one is needed. Optimizer state changes with every update, whatever the
learning rate. So a snapshot is refused if updates were made since its slices were sealed before, and no slice of any
rank has another checksum than then. One changed slice on any rank is enough, since an expert without tokens, or a row
of an embedding that no token used, does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import EXPERT

UNKNOWN, STALE, FRESH = 0, 1, 2
"""What the checksums of one rank show; the maximum is true of all ranks. ``UNKNOWN``: there is nothing to compare."""
CAUSE = (
    "the snapshot is stale: updates were made since the previous one, but neither the copied weights nor the optimizer "
    "state have changed on any rank. Either training changes other tensors than those that are checkpointed (the model "
    "or the optimizer was built again after training began), or its updates run without gradients"
)
NEITHER, WEIGHT, MOMENT = 0, 1, 2
"""Kinds of slices: what no update changes, such as buffers; what an update need not change; optimizer state that each
update changes."""
_NEVER = -1


def kind_of_slice(key: str, operator: str) -> int:
    """``MOMENT`` for a key below ``optim/``, ``WEIGHT`` below ``model/`` and for experts, which may get no tokens."""
    if not key.startswith(("optim/", "model/")):
        return NEITHER
    return WEIGHT if key.startswith("model/") or operator.startswith(EXPERT) else MOMENT


def combined_freshness(seen: Iterable[int]) -> int:
    """Combines the findings of all ranks."""
    return max(seen, default=UNKNOWN)


class LastChecksums:
    """Remembers the checksum of each slice when it was sealed last, and the number of updates made by then.

    Slices are known by their numbers in a list, which only grows. With a new list, everything is forgotten.
    """

    def __init__(self) -> None:
        self._slices: Sequence[Any] = ()
        self._forget()

    def _forget(self) -> None:
        self._kinds = np.zeros(0, dtype=np.int8)
        self._updates = np.zeros(0, dtype=np.int64)
        self._digests = np.zeros(0, dtype=np.uint64)

    def seal(
        self, slices: Sequence[Any], numbers: npt.NDArray[np.int64], digests: npt.NDArray[np.uint64], updates: int
    ) -> int:
        """Records the checksums of slices after so many updates. Returns ``FRESH``, ``STALE`` or ``UNKNOWN``.

        Args:
            slices: All that have a number, each with ``key`` and ``operator``.
            numbers: ``[n]`` those that are sealed.
            digests: ``[n]`` their checksums.
            updates: Made in this process so far.
        """
        if slices is not self._slices:
            self._slices = slices
            self._forget()
        new = [kind_of_slice(one.key, one.operator) for one in slices[len(self._kinds) :]]
        if new:
            self._kinds = np.concatenate([self._kinds, np.array(new, dtype=np.int8)])
            self._updates = np.concatenate([self._updates, np.full(len(new), _NEVER)])
            self._digests = np.concatenate([self._digests, np.zeros(len(new), dtype=np.uint64)])
        kinds, before = self._kinds[numbers], self._updates[numbers]
        judged = (kinds != NEITHER) & (before != _NEVER) & (before < updates)
        moved = judged & (self._digests[numbers] != digests)
        self._updates[numbers], self._digests[numbers] = updates, digests
        if moved.any():
            return FRESH
        return STALE if (judged & (kinds == MOMENT)).any() else UNKNOWN
