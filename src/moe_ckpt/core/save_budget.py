"""How much one rank can save in the available time, and how many experts that allows, from measured times.

Whole numbers, and no state: ranks that start from the same measurements come to the same experts.

The last part tells what copying makes an iteration longer. Where a checkpoint begins at each step, no iteration is
without one to compare with. Iterations that had more to copy are then compared with their neighbours that had less: two
checkpoints of a kind in a row, of which the second counts, since beside the first some of what was copied before is
still written or sent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


def bytes_in_time(secs: float | None, bytes_per_sec: float | None, fraction: float = 1.0) -> int | None:
    """Most bytes that one rank can save in ``fraction`` of ``secs``; None where either is not known, or 0."""
    if not secs or not bytes_per_sec:
        return None
    return int(bytes_per_sec * secs * fraction)


def owned_total(capacity: int, owned: Collection[int]) -> int:
    """Experts that can be saved at once if no rank saves over ``capacity`` of those that it owns."""
    return sum(min(capacity, count) for count in owned)


def least_capacity(total: int, owned: Collection[int]) -> int:
    """The smallest capacity per rank with which ``total`` experts can be saved, or all if there are fewer."""
    target = min(total, sum(owned))
    low, high = 0, max(owned, default=0)
    while low < high:
        middle = (low + high) // 2
        if owned_total(middle, owned) >= target:
            high = middle
        else:
            low = middle + 1
    return low


def largest_k(sizes: Sequence[int], total: int) -> int:
    """The largest K with which K experts of every layer, or all of a smaller one, are ``total`` at most; 0 if none is.

    Args:
        sizes: Experts of each layer. Where all of them can be saved: the largest of ``sizes``.
    """
    low, high = 0, max(sizes, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(middle, size) for size in sizes) <= total:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class Load:
    """Bytes that the ranks of one pipeline stage have to save, and their division among the ranks.

    Attributes:
        ranks: Of the stage.
        owned: How many experts each owner has.
        by_owner: An owner's experts cannot be evened out with others'.
        divided: Ranks that share the bytes of each expert, beside their share of the rest; None where ranks are filled
            up evenly.
        shared_bytes: All gates and non-experts.
        expert_bytes: The largest expert.
    """

    ranks: int
    owned: tuple[int, ...]
    by_owner: bool
    divided: int | None
    shared_bytes: int
    expert_bytes: int

    def affordable(self, limit: int) -> tuple[int, int | None]:
        """(experts, most of them that one rank may own) with which no rank has over ``limit`` bytes to save.

        Three ways of division, as ``core.placement.Placement`` tells them:
        - expert parallelism: each rank has an even share of the rest, and what it owns: the rest must fit, and what
          remains buys the same number of experts for every owner;
        - plain data parallelism: the rest is dealt out around the experts, so all bytes together must fit all ranks
          together, and no rank may own more than fit it alone;
        - everything divided evenly (FSDP): all bytes together must fit all ranks together.
        """
        expert_bytes = max(self.expert_bytes, 1)
        if self.divided is not None:
            room = limit - -(-self.shared_bytes // self.ranks)
            capacity = max(0, room * self.divided // expert_bytes)
            return owned_total(capacity, self.owned), capacity
        together = min(max(0, limit * self.ranks - self.shared_bytes) // expert_bytes, sum(self.owned))
        if not self.by_owner:
            return together, None
        capacity = limit // expert_bytes
        return min(together, owned_total(capacity, self.owned)), capacity


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
