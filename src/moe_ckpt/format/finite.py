"""Tells whether stored values are finite: no training comes back from a weight that is NaN.

On the threads that take checksums, of bytes that pass there anyway, so in few passes over them.
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
"""Looked at by one call: what it makes of them stays in the cache, or, of sums, what was read before them."""
_SUMMED: Mapping[str, npt.DTypeLike] = {"F64": np.float64, "F32": np.float32, "C64": np.float32}
_BITS: Mapping[str, tuple[npt.DTypeLike, int, int]] = {
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E5M2": (np.uint8, 0x7F, 0x7C),
}
"""Of types that numpy lacks, or is slow with: as which integers they are read, all but the sign, and the least of these
that is no finite number."""
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
    """A sum of finite numbers may overflow, but none with NaN or infinity is finite; to add takes half the time."""
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
        data: In which they lie.
        ends: Where each ends there.
        judged: Says of a key whether the slice counts (``judged_in``).
    """
    for entry, end in zip(entries, ends, strict=True):
        if not all_finite(data[end - entry.nbytes : end], entry.dtype) and judged(entry.key):
            return entry.key
    return ""


def judged_in(state: Any) -> Callable[[str], bool]:
    """Returns what says of a slice's key whether training makes its values: those of parameters that are trained, of
    their optimizer state, and of the gradients that an update consumed.

    A parameter that requires no gradient may be infinite on purpose, as masks are, and gradients of an update that a
    loss scaler may have left out mean nothing.

    Args:
        state: A rank's plain state, encoded. Where it is no trainer's of ours, everything counts.
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
