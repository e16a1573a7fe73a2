"""Reads which slices a peer's slot has, and reuses the result for its next slots.

Decoding a header takes 20 microseconds per slice, with the interpreter's lock held, so that training would feel it at
every step. But from one step to the next little changes: the step's number and the checksums. So the text of a header
that was decoded is kept with these blanked, and another one that equals it, when blanked, has the same slices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.errors import DamagedError
from moe_ckpt.format.slot import SlotHeader, SlotPart
from moe_ckpt.slices.mirroring import digests_of

_KEPT_NBYTES = 64 << 20
"""Of texts, for each source. A policy saves other slices at every step, but comes back to the first ones."""
_DIGITS = np.dtype("V16")
_BLANK = np.frombuffer(b"0" * 16, dtype=_DIGITS)[0]
_STEP = b'\\"step\\":'

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Extents:
    """The slices of a slot, in the order of their bytes.

    Attributes:
        begins, ends: In the slot.
        checksums: XXH3-64.
        names: ``[n]`` digests of their names.
    """

    begins: list[int]
    ends: list[int]
    checksums: list[int]
    names: _Numbers

    @property
    def nbytes(self) -> int:
        """Up to the end of the last slice."""
        return max(self.ends, default=0)


@dataclass(frozen=True, eq=False)
class _Layout:
    """The header of a part, blanked. digits_at: where each slice's checksum stands in it."""

    text: npt.NDArray[np.uint8]
    step_at: slice
    digits_at: _Numbers
    begins: _Numbers
    ends: _Numbers
    names: _Numbers

    def checksums(self, raw: bytes, step: int) -> list[int] | None:
        """Those of the slices, if ``raw`` has the same ones and is of this step; else None."""
        if len(raw) != len(self.text) or raw[self.step_at] != str(step).encode():
            return None
        text = np.frombuffer(bytearray(raw), dtype=np.uint8)
        digits = _blank(text, self.step_at, self.digits_at)
        return _values(digits, len(self.digits_at)) if np.array_equal(text, self.text) else None


class HeaderReader:
    """Reads the headers of one source, on one thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Layout] = OrderedDict()
        self._numbers = 0
        self.decoded = 0

    def extents(self, header: SlotHeader, path: str) -> Extents:
        """All slices of a slot.

        Args:
            header: Of the slot.
            path: For messages.

        Raises:
            DamagedError: The header does not hold together.
        """
        begins, ends, names, checksums = _empty(), _empty(), _empty(), list[int]()
        for part in header.parts:
            layout, values = self._recognized(part, header.step) or self._decoded(header, part, path)
            if part.begin + int(layout.ends.max(initial=0)) > header.nbytes:
                raise DamagedError(path, "a part ends beyond the slot", step=header.step, rank=header.rank)
            begins = np.concatenate([begins, layout.begins + part.begin])
            ends = np.concatenate([ends, layout.ends + part.begin])
            names = np.concatenate([names, layout.names])
            checksums += values
        order = np.argsort(begins, kind="stable").tolist()
        listed = begins[order].tolist(), ends[order].tolist(), [checksums[at] for at in order]
        return Extents(*listed, names[order])

    def _recognized(self, part: SlotPart, step: int) -> tuple[_Layout, list[int]] | None:
        for number, layout in reversed(self._known.items()):
            checksums = layout.checksums(part.raw, step)
            if checksums is not None:
                self._known.move_to_end(number)
                return layout, checksums
        return None

    def _decoded(self, header: SlotHeader, part: SlotPart, path: str) -> tuple[_Layout, list[int]]:
        self.decoded += 1
        entries = header.slices(part, path)
        begins, ends = (_numbers(getattr(entry, name) for entry in entries) for name in ("begin", "end"))
        digits = [entry.checksum.encode() for entry in entries]
        checksums = _values(b"".join(digits), len(entries))
        digits_at, at = [], 0
        for digest_text in digits:
            at = part.raw.find(b'\\"%b\\"' % digest_text, at) + 2
            digits_at.append(at)
        begin = part.raw.find(_STEP) + len(_STEP)
        if checksums is None or 1 in digits_at or begin < len(_STEP) or {*map(len, digits)} - {16}:
            raise DamagedError(path, "a checksum is not 16 hex digits", step=header.step, rank=header.rank)
        text = np.frombuffer(bytearray(part.raw), dtype=np.uint8)
        names = digests_of([entry.name for entry in entries])
        layout = _Layout(text, slice(begin, begin + len(str(header.step))), _numbers(digits_at), begins, ends, names)
        _blank(text, layout.step_at, layout.digits_at)
        self._keep(layout)
        return layout, checksums

    def _keep(self, layout: _Layout) -> None:
        self._numbers += 1
        self._known[self._numbers] = layout
        while len(self._known) > 1 and sum(len(recent.text) for recent in self._known.values()) > _KEPT_NBYTES:
            self._known.popitem(last=False)


def _blank(text: npt.NDArray[np.uint8], step_at: slice, digits_at: _Numbers) -> bytes:
    """Blanks, in place, what changes from step to step. Returns the digits of all checksums."""
    text[step_at] = ord("0")
    if not len(digits_at):
        return b""
    windows = np.ndarray(len(text) - 15, _DIGITS, text, strides=(1,))
    digits = windows[digits_at].tobytes()
    windows[digits_at] = _BLANK
    return digits


def _values(digits: bytes, count: int) -> list[int] | None:
    """Of so many checksums; None if they are not just that."""
    try:
        raw = bytes.fromhex(digits.decode())
    except ValueError:
        return None
    if raw.hex().encode() != digits or len(raw) != 8 * count:
        return None
    values: list[int] = np.frombuffer(raw, dtype=">u8").tolist()
    return values


def _numbers(numbers: Iterable[int]) -> _Numbers:
    return np.fromiter(numbers, dtype=np.int64)


def _empty() -> _Numbers:
    return np.zeros(0, dtype=np.int64)
