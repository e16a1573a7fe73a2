"""Which bytes of a range are free: rooms of any size are taken from it and given back."""

from __future__ import annotations

import sys
from bisect import bisect, insort
from collections.abc import Iterator, Sequence

ALIGNMENT = 64
"""Rooms begin at multiples of this, so that a tensor of any type can begin there."""
_STEPS_PER_DOUBLING = 64

Span = tuple[int, int]
"""First byte and end."""


class FreeSpace:
    """Rooms in a range of bytes that grows at its end. Rooms never overlap.

    A room is put where the first gap is that holds it. Not safe for use from several threads.

    Attributes:
        end: Rooms are taken below this byte.
    """

    def __init__(self) -> None:
        self.end = 0
        self._used: list[Span] = []

    def take(self, sizes: Sequence[int]) -> list[int] | None:
        """Take rooms of so many bytes, all or none; returns where they begin."""
        taken: list[Span] = []
        for nbytes in sizes:
            room = rounded(nbytes)
            begin = next((low for low, high in self.gaps() if high - low >= room), None)
            if begin is None:
                for span in taken:
                    self._used.remove(span)
                return None
            taken.append((begin, begin + room))
            insort(self._used, taken[-1])
        return [begin for begin, _ in taken]

    def end_for(self, sizes: Sequence[int]) -> int:
        """Returns where the range must end so that ``take`` finds rooms of these sizes."""
        taken: list[Span] = []
        end = self.end
        for nbytes in sizes:
            room = rounded(nbytes)
            begin = next(low for low, high in _gaps([*self._used, *taken], sys.maxsize) if high - low >= room)
            taken.append((begin, begin + room))
            end = max(end, begin + room)
        return end

    def adopt(self, begin: int, nbytes: int) -> None:
        """Mark a room that an earlier process has filled, below ``end`` or not.

        Raises:
            ValueError: Another room has some of its bytes, or it begins where none can.
        """
        span = begin, begin + rounded(nbytes)
        at = bisect(self._used, span)
        neighbours = self._used[max(0, at - 1) : at + 1]
        if begin < 0 or begin % ALIGNMENT or any(low < span[1] and begin < high for low, high in neighbours):
            raise ValueError(f"a room of {nbytes} bytes at {begin} overlaps another one, or begins at no room's place")
        self._used.insert(at, span)

    def free(self, begin: int, nbytes: int) -> None:
        """Give a room back. Raises ``ValueError``: nobody has taken it."""
        self._used.remove((begin, begin + rounded(nbytes)))

    def fits(self, nbytes: int) -> bool:
        """True if ``take`` finds a room of so many bytes."""
        return any(high - low >= rounded(nbytes) for low, high in self.gaps())

    @property
    def used_end(self) -> int:
        """End of the last room; 0 without any."""
        return self._used[-1][1] if self._used else 0

    def gaps(self) -> Iterator[Span]:
        """Yields the free spans below ``end``."""
        return _gaps(self._used, self.end)


def _gaps(used: Sequence[Span], end: int) -> Iterator[Span]:
    at = 0
    for low, high in sorted(used):
        if at < min(low, end):
            yield at, min(low, end)
        at = high
    if at < end:
        yield at, end


def rounded(nbytes: int) -> int:
    """Returns the bytes that a room of ``nbytes`` takes: at most a 64th more, so that snapshots whose sizes differ a
    little fit into each other's rooms."""
    grain = max(ALIGNMENT, (1 << max(1, nbytes).bit_length() - 1) // _STEPS_PER_DOUBLING)
    return -(-max(1, nbytes) // grain) * grain
