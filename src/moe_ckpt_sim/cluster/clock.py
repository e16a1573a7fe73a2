"""The clock of the simulation: seconds in whole parts, so that sums of them are exact.

A run that repeats itself is moved ahead by many rounds at once. That gives the very outcome of stepping through them
only if ten additions are one multiplication, to the last bit: in floats they are, where every addend is a whole number
of parts of a power of two and no sum needs more than 53 bits.
"""

from __future__ import annotations

from math import floor

_PARTS = float(1 << 28)
"""Of a second: 4 ns each."""

MOST_SECS = float(1 << 25)
"""388 days: up to there sums are exact."""


def on_clock(secs: float) -> float:
    """The nearest whole number of parts. What is beyond any run, infinity included, is left as it is."""
    return secs if secs > MOST_SECS else round(secs * _PARTS) / _PARTS


def down_to_clock(secs: float) -> float:
    """Not the nearest but the one below, so that as many iterations as ought to fit into a time do fit."""
    return secs if secs > MOST_SECS else floor(secs * _PARTS) / _PARTS
