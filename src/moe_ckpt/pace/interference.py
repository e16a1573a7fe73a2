"""What copying makes an iteration longer, from iterations beside small and beside large checkpoints.

Where a checkpoint begins at each step, no iteration is without one to compare with. Iterations that had more to copy
are then compared with their neighbours that had less: two checkpoints of a kind in a row, of which the second counts,
since beside the first some of what was copied before is still written or sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

BLOCK = 2
"""Checkpoints of a kind in a row."""
COMPARED = 16
"""Comparisons that are needed: of 36 checkpoints, if half of them are small."""
_ALIKE, _APART = 0.9, 0.75
"""Portions of the larger one from which on two sizes count as alike, and up to which they can be compared."""
_SURE = 0.75
"""Portion of the comparisons that must say that iterations with more to copy are longer."""


class Lap(NamedTuple):
    """An iteration without what training waited, and the bytes that this rank began to copy with it."""

    secs: float
    nbytes: int


def is_small(number: int) -> bool:
    """Returns whether the checkpoint of this number is to be a small one, so that there is something to compare."""
    return number // BLOCK % 2 == 1


def secs_per_byte(iterations: Sequence[Lap]) -> float | None:
    """Returns how much longer an iteration gets per byte that is copied beside it; None if that cannot be told.

    Each comparison is of an iteration with the mean of the ones before and behind it that had another amount to copy,
    so that what changes steadily while a run trains cancels out. The median of them counts; 0 if a quarter of them or
    more say that copying makes iterations no longer, for then it is not to be told from chance.

    Args:
        iterations: One after the other, the newest last.
    """
    slopes = _slopes(_blocks(iterations))
    if len(slopes) < COMPARED:
        return None
    return median(slopes) if sum(slope > 0 for slope in slopes) > _SURE * len(slopes) else 0.0


def _blocks(iterations: Sequence[Lap]) -> list[Lap]:
    """The last iteration of each block: one whose former one had as much to copy, and whose next one has not."""
    blocks: list[Lap] = []
    for at in range(1, len(iterations)):
        before, this = iterations[at - 1], iterations[at]
        if not _alike(before.nbytes, this.nbytes):
            continue
        if at + 1 == len(iterations) or not _alike(this.nbytes, iterations[at + 1].nbytes):
            blocks.append(this)
    return blocks


def _slopes(blocks: Sequence[Lap]) -> list[float]:
    slopes = []
    for before, this, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        sizes = sorted((this.nbytes, (before.nbytes + after.nbytes) // 2))
        if _alike(before.nbytes, after.nbytes) and sizes[0] <= _APART * sizes[1] and sizes[1]:
            secs = this.secs - (before.secs + after.secs) / 2
            slopes.append(secs / (this.nbytes - (before.nbytes + after.nbytes) / 2))
    return slopes


def _alike(one: int, other: int) -> bool:
    return min(one, other) >= _ALIKE * max(one, other)
