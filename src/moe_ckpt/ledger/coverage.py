"""Two proofs that the boxes of a checkpoint tile every tensor exactly once: box by box, and by a sum.

``prove_cover`` compares boxes, and says what is wrong. It is used when a checkpoint is loaded, and where sums differ.

``cover_sum`` lets each rank prove its share alone. Every element of every tensor has a weight, a number modulo a prime
that its tensor's key and its coordinates give. A box's weight is the sum of its elements', in closed form (a product of
geometric series, one per dimension), so that it costs the same whatever the box's size. Two multisets of elements have
the same sum if they are equal. If they are not, their sums agree with a probability below ``2**-80``: the difference is
a polynomial in the fixed random numbers below that is not zero (Schwartz 1980, Zippel 1979). Its degree is at most the
sum of the dimensions, less than ``2**45``, and the prime is about ``2**127``. A rank subtracts what the plan wants from
what it writes. The differences of all ranks are added, in any order, and the plan is tiled exactly once if the result
is 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from moe_ckpt.errors import CoverageError


@dataclass(frozen=True, order=True)
class Box:
    """An axis-aligned block of one tensor: where it starts and how large it is, in elements."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """The common block, or None when there is none. 0-d boxes overlap always."""
        if self.offsets == other.offsets and self.shape == other.shape:  # what a rank reads of its own, mostly
            return None if 0 in self.shape else self
        starts, shape = [], []
        for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            starts.append(start)
            shape.append(stop - start)
        return Box(tuple(starts), tuple(shape))


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins half-open ranges, given in ascending order, that touch or overlap. Empty ranges are left out."""
    joined: list[tuple[int, int]] = []
    for first, end in ranges:
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif first < end:
            joined.append((first, end))
    return joined


def prove_cover(where: str, targets_of: Mapping[str, Sequence[Box]], written: Iterable[tuple[str, Box]]) -> None:
    """Prove that the ``written`` boxes tile the ``targets_of`` boxes of every tensor key exactly once.

    The wanted boxes of one key must not overlap each other.

    Raises:
        CoverageError: names each key that is missing in part, doubled, or not wanted at all.
    """
    boxes: dict[str, list[Box]] = {key: [] for key in targets_of}
    problems: list[str] = []
    for key, box in written:
        if key in boxes:
            boxes[key].append(box)
        else:
            problems.append(f"{key} at {list(box.offsets)} is written, but no operator of this plan holds it")
    for key, targets in targets_of.items():
        problems.extend(_untiled(key, sorted(targets), sorted(boxes[key])))
    if problems:
        raise CoverageError(where, tuple(problems))


def _untiled(key: str, targets: list[Box], boxes: list[Box]) -> list[str]:
    """Sentences on what keeps ``boxes`` from tiling ``targets``; both sorted by offsets."""
    dims = {len(target.shape) for target in targets}
    strange = {len(box.shape) for box in boxes} - dims
    if dims and strange:
        return [f"{key} has {min(dims)} dimensions, but is written with {min(strange)}"]
    problems = []
    for first, second in _overlapping(boxes):
        problems.append(f"{key} is written twice, at {list(first.offsets)} and at {list(second.offsets)}")
    covered = 0
    for target in targets:
        filled = sum(common.volume for box in boxes if (common := target.overlap(box)) is not None)
        covered += filled
        if filled < target.volume:
            problems.append(
                f"{key} at {list(target.offsets)}: {target.volume - filled} of {target.volume} elements are missing"
            )
    if not problems and covered < sum(box.volume for box in boxes):
        problems.append(f"{key}: elements outside the plan are written")
    return problems


def _overlapping(boxes: list[Box]) -> list[tuple[Box, Box]]:
    """Pairs that overlap. Boxes sorted by offsets; the sweep along dim 0 keeps it near linear."""
    pairs: list[tuple[Box, Box]] = []
    open_boxes: list[Box] = []
    for box in boxes:
        if box.shape and box.volume == 0:
            continue
        start = box.offsets[0] if box.offsets else 0
        open_boxes = [b for b in open_boxes if not b.offsets or b.offsets[0] + b.shape[0] > start]
        pairs.extend((b, box) for b in open_boxes if b.overlap(box) is not None)
        open_boxes.append(box)
    return pairs


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
