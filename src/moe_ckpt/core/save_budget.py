"""Computes from measured times how many bytes one rank can save, and how many experts these are.

All results are whole numbers, so that every rank comes to the same experts from the same measurements.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass


def bytes_in_time(secs: float | None, bytes_per_sec: float | None, fraction: float = 1.0) -> int | None:
    """Returns the most bytes that one rank saves in ``fraction`` of ``secs``; None if time or rate is unknown or 0."""
    if not secs or not bytes_per_sec:
        return None
    return int(bytes_per_sec * secs * fraction)


def owned_total(capacity: int, owned: Collection[int]) -> int:
    """Returns how many experts are saved if each rank saves at most ``capacity`` of the experts that it owns."""
    return sum(min(capacity, count) for count in owned)


def least_capacity(total: int, owned: Collection[int]) -> int:
    """Returns the smallest capacity per rank with which ``total`` experts, or all if there are fewer, can be saved."""
    capacities = range(max(owned, default=0))
    return bisect_left(capacities, min(total, sum(owned)), key=lambda capacity: owned_total(capacity, owned))


def largest_k(sizes: Sequence[int], total: int) -> int:
    """Returns the largest K so that K experts of every layer, or all of a smaller layer, are at most ``total``.

    Args:
        sizes: Number of experts of each layer. If all can be saved, K is the largest of ``sizes``.
        total: Number of experts that can be saved.
    """
    return bisect_right(range(1, max(sizes, default=0) + 1), total, key=lambda k: owned_total(k, sizes))


@dataclass(frozen=True)
class Division:
    """The division of saved bytes among the ranks of one pipeline stage.

    Attributes:
        ranks: Number of ranks of the stage.
        owned: Number of experts of each owner.
        by_owner: True if each expert is saved by its owner, so that other ranks cannot take over a part of it.
        divided: Number of ranks that share the bytes of each expert, on top of an even share of the rest; None if ranks
            are filled up evenly.
    """

    ranks: int
    owned: tuple[int, ...]
    by_owner: bool
    divided: int | None

    def affordable(self, limit: int, shared_bytes: int, expert_bytes: int) -> tuple[int, int | None]:
        """Returns how many experts can be saved if no rank saves more than ``limit`` bytes.

        There are three kinds of division (``core.placement.Placement``):
        - expert parallelism: each rank has an even share of the rest, and the experts that it owns. The rest must fit,
          and what remains buys the same number of experts for every owner;
        - plain data parallelism: the rest is dealt out around the experts, so all bytes together must fit all ranks
          together, and no rank may own more experts than fit it alone;
        - everything divided evenly (FSDP): all bytes together must fit all ranks together.

        Args:
            limit: Bytes of one rank.
            shared_bytes: Bytes of all gates and non-experts.
            expert_bytes: Bytes of the largest expert.

        Returns:
            The number of experts; and how many of them one rank may own, None if that does not matter.
        """
        expert_bytes = max(expert_bytes, 1)
        if self.divided is not None:
            room = limit - -(-shared_bytes // self.ranks)
            capacity = max(0, room * self.divided // expert_bytes)
            return owned_total(capacity, self.owned), capacity
        together = min(max(0, limit * self.ranks - shared_bytes) // expert_bytes, sum(self.owned))
        if not self.by_owner:
            return together, None
        capacity = limit // expert_bytes
        return min(together, owned_total(capacity, self.owned)), capacity


BLOCK = 2
"""Number of large, then of small checkpoints in a row, from which ``run.meter`` measures what copying costs."""


def is_small(number: int) -> bool:
    """Returns whether the checkpoint of this number is a small one while a run probes (``BLOCK``)."""
    return number // BLOCK % 2 == 1
