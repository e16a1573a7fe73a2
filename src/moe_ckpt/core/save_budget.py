"""How much one rank can save in the available time, and how many experts that allows, from measured times.

Whole numbers, and no state: ranks that start from the same measurements come to the same experts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


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
"""Checkpoints of a kind in a row, so that ``run.meter`` can tell what copying makes an iteration longer."""


def is_small(number: int) -> bool:
    """Returns whether the checkpoint of this number is to be a small one, so that there is something to compare."""
    return number // BLOCK % 2 == 1
