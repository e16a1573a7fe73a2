"""Reads which slices a peer's slot has, and reuses the result for its next slots.

Decoding a header takes 20 microseconds per slice, with the interpreter's lock held, so that training would feel it at
every step. But a shard's head is the same text at every step that saves the same slices, and only its seal differs: a
head that was decoded before is recognised by its bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from moe_ckpt.errors import DamagedError
from moe_ckpt.format.gathering import Numbers
from moe_ckpt.format.shard import Checksums, split_header
from moe_ckpt.format.slot import SlotHeader, SlotPart
from moe_ckpt.slices.mirroring import digests_of

_CACHED_NBYTES = 64 << 20
"""Of heads, for each source. A policy saves other slices at every step, but comes back to the first ones."""


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
    names: Numbers

    @property
    def nbytes(self) -> int:
        """Up to the end of the last slice."""
        return max(self.ends, default=0)


@dataclass(frozen=True, eq=False)
class _Layout:
    """The slices that a head names: ``[n]`` where each begins and ends in its part, and the digest of its name."""

    begins: Numbers
    ends: Numbers
    names: Numbers


class HeaderReader:
    """Reads the headers of one source, on one thread.

    Attributes:
        decoded: How many heads were no copy of one before.
    """

    def __init__(self) -> None:
        self._layouts: OrderedDict[bytes, _Layout] = OrderedDict()
        self.decoded = 0

    def extents(self, header: SlotHeader, path: str) -> Extents:
        """Returns all slices of a slot.

        Args:
            header: Of the slot.
            path: For messages.

        Raises:
            DamagedError: The header does not hold together.
        """
        begins, ends, names = [_EMPTY], [_EMPTY], [_EMPTY]
        checksums: list[Checksums] = [_EMPTY.astype(np.uint64)]
        for part in header.parts:
            layout, sums = self._layout(header, part, path)
            if part.begin + int(layout.ends.max(initial=0)) > header.nbytes:
                raise DamagedError(path, "a part ends beyond the slot", step=header.step, rank=header.rank)
            begins.append(layout.begins + part.begin)
            ends.append(layout.ends + part.begin)
            names.append(layout.names)
            checksums.append(sums)
        order = np.argsort(np.concatenate(begins), kind="stable")
        return Extents(
            begins=np.concatenate(begins)[order].tolist(),
            ends=np.concatenate(ends)[order].tolist(),
            checksums=np.concatenate(checksums)[order].tolist(),
            names=np.concatenate(names)[order],
        )

    def _layout(self, header: SlotHeader, part: SlotPart, path: str) -> tuple[_Layout, Checksums]:
        head, step, generation, checksums = split_header(part.raw, path)
        layout = self._layouts.get(head)
        is_of_slot = (step, generation) == (header.step, header.generation)  # its run and rank are in the head
        if layout is not None and is_of_slot and len(checksums) == len(layout.ends):
            self._layouts.move_to_end(head)
            return layout, checksums
        self.decoded += 1
        entries = header.slices(part, path)
        begins, ends = (
            np.array([getattr(entry, name) for entry in entries], dtype=np.int64) for name in ("begin", "end")
        )
        layout = self._layouts[head] = _Layout(begins, ends, digests_of([entry.name for entry in entries]))
        while len(self._layouts) > 1 and sum(map(len, self._layouts)) > _CACHED_NBYTES:
            self._layouts.popitem(last=False)
        return layout, checksums


_EMPTY = np.zeros(0, dtype=np.int64)
