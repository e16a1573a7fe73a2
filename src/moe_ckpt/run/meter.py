"""Iteration time and checkpoint cost, from laps of the training loop.

If a checkpoint begins at each step, there is no iteration without one to compare with. Then iterations that copied more
are compared with neighbours that copied less. There are two checkpoints of a size in a row (``core.cadence``), of
which the second counts: beside the first one, a larger or smaller one before is still written or sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from moe_ckpt.core.step import Fate
from moe_ckpt.policies.base import Measured

_RECENT_LAPS = 50
_RECENT_CHECKPOINTS = 5
_OF_LAPS = ("iteration_secs", "recent_iteration_secs", "update_secs")
_OF_CHECKPOINTS = ("checkpoint_cost_secs", "persist_secs", "copy_bytes_per_sec", "persist_bytes_per_sec")
"""Fields of ``Measured`` that are medians of recent laps, or of recent checkpoints."""
_KNOWN_LAPS = 10
"""Weight of a measurement from before a restart, in laps: the first laps after a restart are slow."""
_COMPARED_LAPS = 128
"""Laps that are compared, every ``_LOOK_LAPS`` laps."""
_LOOK_LAPS = 8

COMPARED = 16
"""Comparisons that are needed: of 36 checkpoints, if half of them are small."""
_ALIKE, _APART = 0.9, 0.75
"""Portions of the larger of two sizes: from the first on the sizes are alike, up to the second they can be compared."""
_SURE = 0.75
"""Portion of the comparisons that must say that iterations with more to copy are longer."""


class Lap(NamedTuple):
    """An iteration: its time without waits for checkpointing, and the bytes that this rank began to copy in it."""

    secs: float
    nbytes: int


class Meter:
    """Measures iterations, once per optimizer step, with and without a checkpoint beside them.

    The cost of a checkpoint is the time by which its iterations are longer than clean ones, which covers stalls and the
    slowdown of compute (CheckFreq, section 4.1). ``secs_per_byte`` is the part that copying adds.

    Attributes:
        copied_nbytes: Bytes that are copied in the present lap.
        send_bytes_per_sec: Rate of sends to peers; None as long as it is not known.
        update_began: Time of the join before the update in the present lap; None before the join.
    """

    def __init__(self) -> None:
        self.copied_nbytes = 0
        self.send_bytes_per_sec: float | None = None
        self._recent: dict[str, deque[float]] = {
            **{name: deque(maxlen=_RECENT_LAPS) for name in _OF_LAPS},
            **{name: deque(maxlen=_RECENT_CHECKPOINTS) for name in _OF_CHECKPOINTS},
        }
        self._last: float | None = None
        self._extra = 0.0
        self._moved = -1
        self.update_began: float | None = None
        self._laps: deque[Lap] = deque(maxlen=_COMPARED_LAPS)
        self._counted = 0
        self._secs_per_byte: float | None = None
        self._interference_secs: float | None = None

    def lap(self, now: float, *, loaded: bool, waited_secs: float = 0.0) -> None:
        """Records the end of a step.

        Args:
            now: Time of the end, in seconds.
            loaded: A checkpoint was in flight during the step.
            waited_secs: Time in the step for which training waited for checkpointing.
        """
        if self._last is not None:
            took, clean = now - self._last, self._recent["iteration_secs"]
            alone = max(0.0, took - waited_secs)
            self._recent["recent_iteration_secs"].append(alone)
            self._laps.append(Lap(alone, self.copied_nbytes))
            self._counted += 1
            if self._counted % _LOOK_LAPS == 0:
                slope = secs_per_byte(self._laps)
                self._secs_per_byte = self._secs_per_byte if slope is None else slope
            if self._secs_per_byte is not None:
                nbytes = median(sample.nbytes for sample in list(self._laps)[-_RECENT_LAPS:])
                self._interference_secs = self._secs_per_byte * nbytes
            if not loaded:
                clean.append(took)
            elif clean:
                self._extra += max(0.0, took - median(clean))
        if self.update_began is not None:
            self._recent["update_secs"].append(now - self.update_began)
        self._last, self.update_began, self.copied_nbytes = now, None, 0

    def resolved(self, persist_secs: float) -> None:
        """Records that a checkpoint ended, ``persist_secs`` after its beginning."""
        self._recent["persist_secs"].append(persist_secs)
        if self._recent["iteration_secs"]:
            self._recent["checkpoint_cost_secs"].append(self._extra)
        self._extra = 0.0

    def record_transfers(self, ended: Sequence[Fate]) -> None:
        """Records the rates of this rank's snapshots that ended, each once."""
        for fate in ended:
            if fate.number > self._moved and fate.committed and fate.rates:
                self._moved = fate.number
                for name, rate in fate.rates.items():
                    self._recent[name].append(rate)

    def resume(self, before: Mapping[str, float]) -> None:
        """Begins with ``Manifest.measured``, from before the restart."""
        for name, history in self._recent.items():
            if name in before:
                history.extend([before[name]] * (_KNOWN_LAPS if name in _OF_LAPS else 1))
        self.send_bytes_per_sec = before.get("send_bytes_per_sec")
        self._interference_secs = before.get("copy_interference_secs")

    @property
    def measurements(self) -> dict[str, float]:
        """Returns the present measurements, for ``Manifest.measured``."""
        return {name: value for name, value in vars(self.measured()).items() if value is not None}

    def measured(self) -> Measured:
        return Measured(
            **{name: median(history) for name, history in self._recent.items() if history},
            send_bytes_per_sec=self.send_bytes_per_sec,
            copy_interference_secs=self._interference_secs,
        )


def secs_per_byte(iterations: Sequence[Lap]) -> float | None:
    """Returns the time that each byte copied beside an iteration adds to it; None if there are too few comparisons.

    A comparison is between an iteration and the mean of the ones before and after it that copied another amount, so
    that steady changes during training cancel out. The median of all comparisons counts; 0 if a quarter of them or more
    show no longer iterations, which may be chance.

    Args:
        iterations: In their order.
    """
    # The last iteration of each block of two or more that copied the same amount.
    are_alike = [_alike(one.nbytes, other.nbytes) for one, other in pairwise(iterations)]
    ends = [at for at in range(1, len(iterations)) if are_alike[at - 1] and (at == len(are_alike) or not are_alike[at])]
    blocks = [iterations[at] for at in ends]
    slopes = []
    for before, this, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        sizes = sorted((this.nbytes, (before.nbytes + after.nbytes) // 2))
        if _alike(before.nbytes, after.nbytes) and sizes[0] <= _APART * sizes[1] and sizes[1]:
            secs = this.secs - (before.secs + after.secs) / 2
            slopes.append(secs / (this.nbytes - (before.nbytes + after.nbytes) / 2))
    if len(slopes) < COMPARED:
        return None
    return median(slopes) if sum(slope > 0 for slope in slopes) > _SURE * len(slopes) else 0.0


def _alike(one: int, other: int) -> bool:
    return min(one, other) >= _ALIKE * max(one, other)
