"""The clock of the simulation: seconds in whole parts, so that sums of them are exact.

A run that repeats itself is moved ahead by many rounds at once. That equals stepping through them only if ten additions
equal one multiplication to the last bit. Floats guarantee it if every addend is a whole number of parts of a power of
two and no sum needs more than 53 bits.
"""

from __future__ import annotations

from math import floor

_PARTS = float(1 << 28)
"""Parts of a second: 4 ns each."""

MOST_SECS = float(1 << 25)
"""388 days: sums up to it are exact."""


def on_clock(secs: float) -> float:
    """Round to the nearest whole number of parts. Times beyond any run, infinity included, stay as they are."""
    return secs if secs > MOST_SECS else round(secs * _PARTS) / _PARTS


def down_to_clock(secs: float) -> float:
    """Round down to a whole number of parts, so that as many iterations fit into a time as should."""
    return secs if secs > MOST_SECS else floor(secs * _PARTS) / _PARTS
