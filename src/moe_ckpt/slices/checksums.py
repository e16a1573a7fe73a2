"""Reads what was copied, once: checksums of slices, and whether their values are finite, since no training recovers
from a weight that is NaN.

By several threads, piece by piece as they arrive from the device, while the rest is still under way. Each piece is read
twice in a row, the second time out of the cache, by calls that run without the interpreter lock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from moe_ckpt.format.sealed import Fragment
from moe_ckpt.format.shard import GRADIENT, REPLAY, Checksums, SliceEntry
from moe_ckpt.memory.limits import cores
from moe_ckpt.slices.cuts import Numbers
from moe_ckpt.threads import ThreadName, named_pool

if TYPE_CHECKING:
    from moe_ckpt.slices.compiling import CompiledPart
    from moe_ckpt.slices.snapshot import SnapshotPart

_WARM_NBYTES = 4 << 20
"""Read twice in a row: a cache has so many, and to ask for each call takes little beside it."""
_TASK_NBYTES = 32 << 20
"""One thread takes at a time, or one slice that is larger."""
_CORES_PER_THREAD = 4

Judged = Callable[[str], bool]
"""Says of a slice's key whether its values count (``judged_in``)."""
Arrive = Callable[[int, int], None]
"""Returns when the first bytes of a part, by its number and up to a given one, are in host memory."""


class Checker:
    """Checks parts, on at most so many threads.

    Args:
        threads: If it is one, the caller's.
    """

    def __init__(self, threads: int) -> None:
        self._pool = named_pool(ThreadName.CHECKSUM, threads) if threads > 1 else None

    def check(self, parts: Sequence[SnapshotPart], judged: Judged, arrive: Arrive) -> list[tuple[Checksums, str]]:
        """Returns of each part XXH3-64 of its slices, and the key of the first one with NaN or infinity, else "".

        Raises what ``arrive`` raises.
        """
        checks = [[partial(_check, part, pieces, judged, arrive) for pieces in part.compiled.pieces] for part in parts]
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
    return _numbers(_digests(memory.numpy().data, [0, *part.ends.tolist()]))


_Checked = tuple[bytes, str]
"""Digests of slices one after the other, and the key of the first with NaN or infinity."""


def _joined(checked: Sequence[_Checked]) -> tuple[Checksums, str]:
    return _numbers(b"".join(digests for digests, _ in checked)), next((key for _, key in checked if key), "")


def _numbers(digests: bytes) -> Checksums:
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


class Piece(NamedTuple):
    """Neighbouring slices of one type that a cache has room for, or one that is larger.

    Attributes:
        dtype: Their type; empty where values do not count.
        first: Which slice of the part is the first.
        bounds: Where it begins, and where each ends.
    """

    dtype: str
    first: int
    bounds: list[int]


def pieces_of(ends: Numbers, of_types: Sequence[tuple[str, int, int]]) -> list[list[Piece]]:
    """Divides a part into what one thread takes at a time, and that into pieces.

    Args:
        ends: Where each slice ends; the next begins there.
        of_types: See ``slices.cuts.stretches``.
    """
    bounds = np.concatenate([[0], ends])
    return [
        [
            Piece(dtype, low, bounds[low : high + 1].tolist())
            for dtype, begin, end in _alike(of_types, first, stop)
            for low, high in _spans(bounds, begin, end, _WARM_NBYTES)
        ]
        for first, stop in _spans(bounds, 0, len(ends), _TASK_NBYTES)
    ]


def _spans(bounds: Numbers, first: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """(first, the one behind the last) of slices that together have at most so many bytes, or of one."""
    while first < stop:
        last = int(np.searchsorted(bounds, bounds[first] + most, side="right")) - 1
        last = min(stop, max(first + 1, last))
        yield first, last
        first = last


def _alike(of_types: Sequence[tuple[str, int, int]], first: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """Yields (type, first, the one behind the last) of the slices in their order; no type where values do not count."""
    at = first
    for dtype, begin, end in of_types:
        begin, end = max(begin, at), min(end, stop)
        if begin < end:
            if at < begin:
                yield "", at, begin
            yield dtype, begin, end
            at = end
    if at < stop:
        yield "", at, stop


def _check(part: SnapshotPart, pieces: Sequence[Piece], judged: Judged, arrive: Arrive) -> _Checked:
    """Checks slices of a part. On any thread."""
    data, compiled = part.memory.numpy().data, part.compiled
    arrive(part.number, pieces[-1].bounds[-1])
    digests, spoiled = bytearray(), ""
    for piece in pieces:
        checked, is_finite = _check_warm(data, piece)
        digests += checked
        if not is_finite and not spoiled:
            ends = piece.bounds[1:]
            numbers = compiled.slices[piece.first : piece.first + len(ends)].tolist()
            spoiled = first_not_finite([compiled.shelved[number] for number in numbers], data, ends, judged)
    return bytes(digests), spoiled


def _check_warm(data: memoryview, piece: Piece) -> tuple[bytes, bool]:
    """Returns digests of a piece's slices, and whether they are finite, or do not count (no type)."""
    dtype, begin, end = piece.dtype, piece.bounds[0], piece.bounds[-1]
    if end - begin <= _WARM_NBYTES:
        return _digests(data, piece.bounds), not dtype or all_finite(data[begin:end], dtype)
    hasher, is_finite = xxhash.xxh3_64(), True
    for at in range(begin, end, _WARM_NBYTES):
        chunk = data[at : min(at + _WARM_NBYTES, end)]
        hasher.update(chunk)
        is_finite = is_finite and (not dtype or all_finite(chunk, dtype))
    return hasher.digest(), is_finite


def _digests(data: memoryview, bounds: Sequence[int]) -> bytes:
    """Digests of slices, one after the other: no bytecode for each."""
    views = map(data.__getitem__, map(slice, bounds, bounds[1:]))
    return b"".join(map(xxhash.xxh3_64_digest, views))


def digests_of(names: Sequence[str]) -> Numbers:
    """Returns the XXH3-64 of each name. Equal digests do no harm: checksums tell slices apart."""
    digests = np.fromiter(
        (xxhash.xxh3_64_intdigest(name.encode()) for name in names), dtype=np.uint64, count=len(names)
    )
    return digests.astype(np.int64)


# --- finite values ---

_MASKED_NBYTES, _SUMMED_NBYTES = 1 << 20, 4 << 20
"""Bytes read by one call: for the first its result stays in the cache, for sums the bytes stay that were read
before."""
_SUMMED: Mapping[str, npt.DTypeLike] = {"F64": np.float64, "F32": np.float32, "C64": np.float32}
_BITS: Mapping[str, tuple[npt.DTypeLike, int, int]] = {
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E5M2": (np.uint8, 0x7F, 0x7C),
}
"""For types that numpy lacks, or reads slowly: the integers as which they are read, the bits without the sign, and the
least of these integers that is not a finite number."""
_OF_ALL = re.compile(r"\.experts\.\d+\.")


def all_finite(data: memoryview, dtype: str) -> bool:
    """Returns False if some value is NaN or infinite.

    Args:
        data: The values' bytes, one after the other.
        dtype: Their type, as named in headers. Whole numbers are finite.
    """
    if dtype in _SUMMED:
        return _are_finite(np.frombuffer(data, _SUMMED[dtype]))
    if dtype not in _BITS:
        return True
    kind, mask, least = _BITS[dtype]
    values = np.frombuffer(data, kind)
    chunk = _MASKED_NBYTES // values.itemsize
    pieces = (values[at : at + chunk] & values.dtype.type(mask) for at in range(0, len(values), chunk))
    return all(int(piece.max()) < least for piece in pieces)


def _are_finite(values: npt.NDArray[np.floating]) -> bool:
    """Returns whether all values are finite. A sum with NaN or infinity is never finite, and adding takes half the time
    of looking at each value; a sum of finite values may overflow, so that values are looked at then."""
    chunk = _SUMMED_NBYTES // values.itemsize
    with np.errstate(all="ignore"):
        for at in range(0, len(values), chunk):
            piece = values[at : at + chunk]
            if not np.isfinite(np.add.reduce(piece)) and not np.isfinite(piece).all():
                return False
    return True


def first_not_finite(entries: Sequence[SliceEntry], data: memoryview, ends: Sequence[int], judged: Judged) -> str:
    """Returns the key of the first slice with NaN or infinity; empty if there is none.

    Args:
        entries: Slices that follow one another.
        data: Bytes with the slices.
        ends: End of each in ``data``.
        judged: Returns whether the slice of a key counts (``judged_in``).
    """
    for entry, end in zip(entries, ends, strict=True):
        if not all_finite(data[end - entry.nbytes : end], entry.dtype) and judged(entry.key):
            return entry.key
    return ""


def judged_in(state: Any) -> Judged:
    """Returns a function that tells for a slice's key whether its values must be finite: those of trained parameters,
    of their optimizer state, and of consumed gradients.

    A parameter that requires no gradient may be infinite on purpose, as masks are. Gradients do not count if a loss
    scaler may have left the update out.

    Args:
        state: A rank's plain state, encoded. If it is of no trainer of this library, everything counts.
    """
    state = state if isinstance(state, Mapping) else {}
    plain, log = (value if isinstance(value := state.get(key), Mapping) else {} for key in ("plain", "gradient_log"))
    groups = (plain.get(key) for key in ("frozen", "resting"))
    lists = (group.value if isinstance(group, Fragment) else group for group in groups)
    at_rest = {name for names in lists if isinstance(names, list) for name in names}
    scaled = any(update.get("found_inf") is not None for update in log.get("updates", ()))

    def judged(key: str) -> bool:
        kind, _, name = key.removeprefix(REPLAY).partition("/")
        if scaled and key.startswith(GRADIENT):
            return False
        if kind in ("optim", "grad"):
            name = name.partition("/")[2]
        if kind == "optim":
            name = name.rpartition("/")[0]
        return not at_rest & {name, _OF_ALL.sub(".experts.*.", name)}

    return judged
