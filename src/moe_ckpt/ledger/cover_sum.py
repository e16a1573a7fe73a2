"""A sum over boxes that tells whether two sets of boxes hold the same elements, each equally often.

Every element of every tensor has a weight, a number modulo a prime that its tensor's key and its coordinates give. A
box's weight is the sum of its elements', in closed form (a product of geometric series, one per dimension), so that it
costs the same whatever the box's size. Two multisets of elements have the same sum if they are equal. If they are not,
their sums agree with a probability below ``2**-80``: the difference is a polynomial in the fixed random numbers below
that is not zero (Schwartz 1980, Zippel 1979). Its degree is at most the sum of the dimensions, less than ``2**45``, and
the prime is about ``2**127``.

So a rank can prove its share of a checkpoint alone: it subtracts what the plan wants from what it writes. The
differences of all ranks are added, in any order, and the plan is tiled exactly once if the result is 0.
``ledger.coverage`` says what is wrong where it is not, and proves everything box by box when a checkpoint is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from moe_ckpt.ledger.coverage import Box

PRIME = (1 << 127) - 1
"""A Mersenne prime: sums of weights are numbers below it."""


def _drawn(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little") % PRIME


_BASES = tuple(_drawn(f"moe_ckpt cover sum, dimension {dim}") for dim in range(32))
"""One random number per dimension of a tensor; fixed, so that all ranks use the same."""


def cover_sum(boxes: Iterable[tuple[str, Box]]) -> int:
    """The sum of the weights of all elements of ``(key, box)`` pairs, modulo ``PRIME``."""
    return sum(_key_weight(key) * _box_weight(box.offsets, box.shape) for key, box in boxes) % PRIME


@lru_cache(maxsize=1 << 17)
def _key_weight(key: str) -> int:
    return _drawn(f"key {key}")


@lru_cache(maxsize=1 << 14)
def _box_weight(offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    weight = 1
    for dim, (start, length) in enumerate(zip(offsets, shape, strict=True)):
        weight = weight * _series(dim, start, length) % PRIME
    return weight


@lru_cache(maxsize=1 << 14)
def _series(dim: int, start: int, length: int) -> int:
    """``base**start + ... + base**(start + length - 1)``."""
    base = _BASES[dim]
    return pow(base, start, PRIME) * (pow(base, length, PRIME) - 1) * pow(base - 1, -1, PRIME) % PRIME
