"""Tells whether stored values are finite: no training recovers from a weight that is NaN.

Runs on the threads that compute checksums, and reads the bytes while they are in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ckpt.format.sealed import Fragment
from moe_ckpt.format.shard import GRADIENT, REPLAY, SliceEntry

_CHUNK_NBYTES, _SUMMED_NBYTES = 1 << 20, 4 << 20
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
    chunk = _CHUNK_NBYTES // values.itemsize
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


def first_not_finite(
    entries: Sequence[SliceEntry], data: memoryview, ends: Sequence[int], judged: Callable[[str], bool]
) -> str:
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


def judged_in(state: Any) -> Callable[[str], bool]:
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
