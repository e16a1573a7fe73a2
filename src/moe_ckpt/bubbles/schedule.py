"""Schedule of the chunks of a copy: first in a pipeline's bubbles, then beside compute what does not fit.

MoEtion, arXiv 2412.15411 v1, section 5.3 and Algorithm 4. The paper splits parameters in two, by the ratio of bubble
time to copy time, and starts the second part at once. Here bubbles are not known in advance but seen when they come, so
what is decided beforehand is only when the rest must begin: as late as bubbles that are still expected allow, and early
enough to end before the next update even if none of them comes.

Times are seconds from the beginning of an iteration, of which the copy's beginning is the first moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

BACKWARD = 2.0
"""A backward pass over a forward pass, in time: gradients of inputs, and gradients of weights."""
MARGIN = 0.8
"""Portion of the shortest recent iteration in which a copy ends: iterations differ, and no join may wait for it."""
CAUTION = 2.0
"""Beside compute a copy is assumed to be slower than measured by this factor."""


class Bubble(NamedTuple):
    """A time in which a rank is idle."""

    begin: float
    end: float

    @property
    def secs(self) -> float:
        return self.end - self.begin


def tail_secs(stage: int, stages: int, microbatches: int, secs: float) -> float:
    """Returns how long a stage is idle under 1F1B between its own last backward pass and that of the first stage.

    With a forward pass of 1, the pipeline takes ``(m + p - 1) * (1 + BACKWARD)``, and ends with one backward pass on
    each stage before this one.

    Args:
        stage: From 0.
        stages: ``p``, at least 1.
        microbatches: ``m``, at least 1.
        secs: From the beginning of the iteration to the end of the stage's own last backward pass.
    """
    tail = stage * BACKWARD
    return secs * tail / ((microbatches + stages - 1) * (1 + BACKWARD) - tail)


def typical(seen: Sequence[Sequence[Bubble]]) -> tuple[Bubble, ...]:
    """Returns the expected bubbles of the next iteration, from those of recent ones.

    Args:
        seen: Of each iteration, oldest first, every wait in its order. Those with as many as the newest count, one wait
            beside another: begin and length are medians.
    """
    if not seen:
        return ()
    alike = [waits_of_iteration for waits_of_iteration in seen if len(waits_of_iteration) == len(seen[-1])]
    bubbles, at = [], 0.0
    for waits in zip(*alike, strict=True):
        begin = max(at, median(wait.begin for wait in waits))
        at = begin + median(wait.secs for wait in waits)
        bubbles.append(Bubble(begin, at))
    return tuple(bubbles)


def clipped(windows: Sequence[Bubble], begin: float, end: float) -> tuple[Bubble, ...]:
    """Returns the parts of disjoint windows that lie in ``[begin, end)``."""
    inside = (Bubble(max(begin, window.begin), min(end, window.end)) for window in windows)
    return tuple(window for window in inside if window.secs > 0)


@dataclass(frozen=True)
class Pace:
    """Spreads one copy or one send over the time until its deadline.

    Attributes:
        windows: Bubbles that are expected, disjoint and in order, none beyond the deadline.
        deadline: When all must be through.
        bytes_per_sec: At which it goes, alone; above 0.
    """

    windows: tuple[Bubble, ...]
    deadline: float
    bytes_per_sec: float

    @cached_property
    def _later_secs(self) -> tuple[float, ...]:
        """Bubble time from each window's beginning on; 0 behind the last."""
        sums = [0.0]
        for window in reversed(self.windows):
            sums.append(sums[-1] + window.secs)
        return tuple(reversed(sums))

    def beside_from(self, nbytes: int) -> float:
        """Returns the time from which the rest goes beside compute, if ``nbytes`` are left then.

        With ``r`` the time that the rest takes, ``B`` the bubble time still expected and ``C`` the other time left, the
        first moment with ``CAUTION * r >= 2 B + C``: never later than ``r`` before the deadline, bubbles or not.
        """
        needed = CAUTION * nbytes / self.bytes_per_sec

        def missing(number: int) -> float:
            """At the end of a window: 0 or more if what is left must begin by then."""
            return needed - self._later_secs[number + 1] - (self.deadline - self.windows[number].end)

        count = len(self.windows)
        number = bisect_left(range(count), 0.0, key=missing)
        later = self._later_secs[number]
        at = self.deadline + later - needed  # if that lies before the window: no bubble passes until then
        if number < count and at > self.windows[number].begin:
            begin = self.windows[number].begin
            at = begin + (at - begin) / 2  # in a window two things run out: time, and bubble time
        return at
