"""Reads what was copied, once: checksums of slices, and whether their values are finite.

By several threads, piece by piece as they arrive from the device, while the rest is still under way. Each piece is read
twice in a row, the second time out of the cache, by calls that run without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import starmap
from struct import iter_unpack
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from moe_ckpt.format.finite import all_finite, first_not_finite
from moe_ckpt.format.shard import Checksums
from moe_ckpt.memory.cgroups import cores
from moe_ckpt.slices.compiling import CompiledPart
from moe_ckpt.slices.cuts import Numbers
from moe_ckpt.threads import ThreadName, named_pool

_SMALL_NBYTES, _MANY = 512, 32
"""See ``_stretches``."""
_WARM_NBYTES = 4 << 20
"""Read twice in a row: a cache has so many, and to ask for each call takes little beside it."""
_TASK_NBYTES = 32 << 20
"""One thread takes at a time, or one slice that is larger."""
_CORES_PER_THREAD = 4

Judged = Callable[[str], bool]
"""Says of a slice's key whether its values count (``format.finite.judged_in``)."""


class CopiedPart(NamedTuple):
    """A part of a plan, and where its bytes arrive.

    Attributes:
        part: Which.
        memory: Its bytes, uint8.
        arrive: Returns when those up to a given one are there.
    """

    part: CompiledPart
    memory: torch.Tensor
    arrive: Callable[[int], None]


class Checker:
    """Checks parts, on at most so many threads.

    Args:
        threads: If it is one, the caller's.
    """

    def __init__(self, threads: int) -> None:
        self._pool = named_pool(ThreadName.CHECKSUM, threads) if threads > 1 else None

    def check(self, parts: Sequence[CopiedPart], judged: Judged) -> list[tuple[Checksums, str]]:
        """Returns of each part XXH3-64 of its slices, and the key of the first one with NaN or infinity, else "".

        Raises what a part's ``arrive`` raises.
        """
        checks = [[partial(_check, copied, *span, judged) for span in _spans(copied.part.ends)] for copied in parts]
        if self._pool is None:
            return [_joined([check() for check in of_part]) for of_part in checks]
        started: list[list[Future[_Checked]]] = [list(map(self._pool.submit, of_part)) for of_part in checks]
        return [_joined([check.result() for check in of_part]) for of_part in started]

    def close(self) -> None:
        """Ends the threads; from then on the caller checks."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


def checking_threads(local_ranks: int) -> int:
    """Returns how many threads check where nobody says: one for four of this rank's cores.

    Args:
        local_ranks: That share the cores of this process.
    """
    return max(1, cores() // max(1, local_ranks) // _CORES_PER_THREAD)


def checksums_of(part: CompiledPart, memory: torch.Tensor) -> Checksums:
    """XXH3-64 of each of the part's slices, whose bytes lie in ``memory`` (uint8, host)."""
    return _numbers(_digests(memory.numpy().data, part.ends, 0, len(part.ends)))


_Checked = tuple[bytes, str]
"""Digests of slices one after the other, and the key of the first with NaN or infinity."""


def _joined(checked: Sequence[_Checked]) -> tuple[Checksums, str]:
    return _numbers(b"".join(digests for digests, _ in checked)), next((key for _, key in checked if key), "")


def _numbers(digests: bytes) -> Checksums:
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def _spans(ends: Numbers, begin: int = 0, most: int = _TASK_NBYTES) -> Iterator[tuple[int, int]]:
    """(first, the one behind the last) of slices that together have at most so many bytes, or of one.

    Args:
        ends: Where each slice ends.
        begin: Where the first begins.
        most: See above.
    """
    first = 0
    while first < len(ends):
        stop = max(first + 1, int(np.searchsorted(ends, begin + most, side="right")))
        yield first, stop
        first, begin = stop, int(ends[stop - 1])


def _check(copied: CopiedPart, first: int, stop: int, judged: Judged) -> _Checked:
    """Checks slices of a part. On any thread."""
    part, ends, data = copied.part, copied.part.ends, copied.memory.numpy().data
    copied.arrive(int(ends[stop - 1]))
    digests, spoiled = bytearray(), ""
    for dtype, begin, end in _alike(part, first, stop):
        at_begin = int(ends[begin - 1]) if begin else 0
        for low, high in _spans(ends[begin:end], at_begin, _WARM_NBYTES):
            checked, is_finite = _check_warm(data, ends, begin + low, begin + high, dtype)
            digests += checked
            if not is_finite and not spoiled:
                numbers = part.slices.numbers[begin + low : begin + high].tolist()
                entries = [part.slices.entries[number] for number in numbers]
                spoiled = first_not_finite(entries, data, ends[begin + low : begin + high].tolist(), judged)
    return bytes(digests), spoiled


def _alike(part: CompiledPart, first: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """Yields (type, first, the one behind the last) of the slices in their order; no type where values do not count."""
    at = first
    for dtype, begin, end in part.stretches:
        begin, end = max(begin, at), min(end, stop)
        if begin < end:
            if at < begin:
                yield "", at, begin
            yield dtype, begin, end
            at = end
    if at < stop:
        yield "", at, stop


def _check_warm(data: memoryview, ends: Numbers, first: int, stop: int, dtype: str) -> tuple[bytes, bool]:
    """Returns digests of neighbouring slices of one type, and whether they are finite, or do not count (no type)."""
    begin, end = int(ends[first - 1]) if first else 0, int(ends[stop - 1])
    if end - begin <= _WARM_NBYTES:
        return _digests(data, ends, first, stop), not dtype or all_finite(data[begin:end], dtype)
    hasher, is_finite = xxhash.xxh3_64(), True
    for at in range(begin, end, _WARM_NBYTES):
        piece = data[at : min(at + _WARM_NBYTES, end)]
        hasher.update(piece)
        is_finite = is_finite and (not dtype or all_finite(piece, dtype))
    return hasher.digest(), is_finite


def _digests(data: memoryview, ends: Numbers, first: int, stop: int) -> bytes:
    """Digests of the slices from ``first`` to before ``stop``, one after the other."""
    digests = bytearray()
    for low, high, nbytes in _stretches(ends, first, stop):
        begin = int(ends[low - 1]) if low else 0
        if nbytes:
            pieces = iter_unpack(f"{nbytes}s", data[begin : int(ends[high - 1])])
            digests += b"".join(starmap(xxhash.xxh3_64_digest, pieces))
        else:
            bounds = ends[low:high].tolist()
            views = map(data.__getitem__, map(slice, [begin, *bounds], bounds))
            digests += b"".join(map(xxhash.xxh3_64_digest, views))
    return bytes(digests)


def _stretches(ends: Numbers, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(first slice, the one behind the last, size of each) of stretches of many small slices of one size, and with 0
    for the size what lies between. To take a small piece of memory as bytes is quicker than to take a view of it."""
    done = first
    if stop - first >= _MANY:
        sizes = np.diff(ends[first:stop], prepend=ends[first - 1] if first else 0)
        bounds = np.concatenate([[0], np.flatnonzero(sizes[1:] != sizes[:-1]) + 1, [len(sizes)]])
        for at in np.flatnonzero(np.diff(bounds) >= _MANY).tolist():
            low, high = bounds[at : at + 2].tolist()
            if 0 < sizes[low] <= _SMALL_NBYTES:
                if done < first + low:
                    yield done, first + low, 0
                yield first + low, first + high, int(sizes[low])
                done = first + high
    if done < stop:
        yield done, stop, 0
