"""Schedules the chunks of a copy: first in a pipeline's bubbles, and beside compute if they do not fit.

MoEtion, arXiv 2412.15411 v1, section 5.3 and Algorithm 4. The paper splits parameters in two, by the ratio of bubble
time to copy time, and starts the second part at once. Here bubbles are not known in advance but noticed when they come,
so only the time is computed at which the rest must begin: as late as the bubbles that are still expected allow, and
early enough to end before the next update even if none of them comes.

Times are seconds from the beginning of an iteration, at which the copy begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

BACKWARD = 2.0
"""Time of a backward pass over that of a forward pass: gradients of inputs, and gradients of weights."""
MARGIN = 0.8
"""Portion of the shortest recent iteration in which a copy must end, so that no join waits for it."""
CAUTION = 2.0
"""Factor by which a copy beside compute is assumed to be slower than measured."""


class Bubble(NamedTuple):
    """A time in which a rank is idle."""

    begin: float
    end: float

    @property
    def secs(self) -> float:
        return self.end - self.begin


def tail_secs(stage: int, stages: int, microbatches: int, secs: float) -> float:
    """Returns the seconds that a stage is idle under 1F1B between its last backward pass and that of the first stage.

    With a forward pass of 1, the pipeline takes ``(m + p - 1) * (1 + BACKWARD)``, and ends with one backward pass on
    each stage before this one.

    Args:
        stage: Number of the stage, from 0.
        stages: ``p``, at least 1.
        microbatches: ``m``, at least 1.
        secs: From the beginning of the iteration to the end of the stage's own last backward pass.
    """
    tail = stage * BACKWARD
    return secs * tail / ((microbatches + stages - 1) * (1 + BACKWARD) - tail)


def typical(seen: Sequence[Sequence[Bubble]]) -> tuple[Bubble, ...]:
    """Returns the expected bubbles of the next iteration, from those of recent ones.

    Args:
        seen: Per iteration, oldest first, all waits in their order. Only iterations with as many waits as the newest
            are used. Begin and length of each bubble are medians over these iterations.
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
        windows: Expected bubbles, disjoint and in order, none beyond the deadline.
        deadline: Time at which all bytes must have gone.
        bytes_per_sec: Rate without compute beside it; above 0.
    """

    windows: tuple[Bubble, ...]
    deadline: float
    bytes_per_sec: float

    @cached_property
    def _later_secs(self) -> tuple[float, ...]:
        """Bubble time from the beginning of each window on; 0 after the last."""
        sums = [0.0]
        for window in reversed(self.windows):
            sums.append(sums[-1] + window.secs)
        return tuple(reversed(sums))

    def beside_from(self, nbytes: int) -> float:
        """Returns the time from which the rest goes beside compute, if ``nbytes`` remain then.

        With ``r`` the time that the rest takes, ``B`` the bubble time still expected and ``C`` the other time left, the
        first moment with ``CAUTION * r >= 2 B + C``: never later than ``r`` before the deadline, bubbles or not.
        """
        needed = CAUTION * nbytes / self.bytes_per_sec

        def missing(number: int) -> float:
            """Returns 0 or more if the rest must begin before the end of a window."""
            return needed - self._later_secs[number + 1] - (self.deadline - self.windows[number].end)

        count = len(self.windows)
        number = bisect_left(range(count), 0.0, key=missing)
        later = self._later_secs[number]
        at = self.deadline + later - needed  # if that is before the window, no bubble passes until then
        if number < count and at > self.windows[number].begin:
            begin = self.windows[number].begin
            at = begin + (at - begin) / 2  # in a window, time and bubble time decrease together
        return at
