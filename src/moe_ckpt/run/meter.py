"""Iteration time and checkpoint cost, from laps of the training loop.

Where a checkpoint begins at each step, no iteration is without one to compare with. Iterations that had more to copy
are then compared with their neighbours that had less: two checkpoints of a kind in a row (``core.save_budget``), of
which the second counts, since beside the first some of what was copied before is still written or sent.
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
"""The laps that measurements from before a restart count as: the first laps after it are slow."""
_COMPARED_LAPS = 128
"""Looked at for what copying makes a lap longer, every ``_LOOK_LAPS`` laps."""
_LOOK_LAPS = 8

COMPARED = 16
"""Comparisons that are needed: of 36 checkpoints, if half of them are small."""
_ALIKE, _APART = 0.9, 0.75
"""Portions of the larger one from which on two sizes count as alike, and up to which they can be compared."""
_SURE = 0.75
"""Portion of the comparisons that must say that iterations with more to copy are longer."""


class Lap(NamedTuple):
    """An iteration without what training waited, and the bytes that this rank began to copy with it."""

    secs: float
    nbytes: int


class Meter:
    """Fed once per optimizer step; tells clean iterations from those that ran beside a checkpoint.

    The cost of a checkpoint is what its iterations took longer than a clean one: that covers stalls and
    the slowdown of compute alike (CheckFreq, section 4.1). What copying alone adds to a lap: ``secs_per_byte``.

    Attributes:
        copied_nbytes: Copied beside the lap under way.
        send_bytes_per_sec: To peers; None as long as it is not known.
        update_began: When copies were joined in the lap under way, so that an update may follow; None before.
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
        """One step ended.

        Args:
            now: Then, in seconds.
            loaded: A checkpoint was in flight during it.
            waited_secs: That training waited for checkpointing in it.
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
        """A checkpoint left the pipeline ``persist_secs`` after it began."""
        self._recent["persist_secs"].append(persist_secs)
        if self._recent["iteration_secs"]:
            self._recent["checkpoint_cost_secs"].append(self._extra)
        self._extra = 0.0

    def record_transfers(self, ended: Sequence[Fate]) -> None:
        """Records this rank's snapshots that ended. Snapshots that are known already are skipped."""
        for fate in ended:
            if fate.number > self._moved and fate.committed and fate.rates:
                self._moved = fate.number
                for name, rate in fate.rates.items():
                    self._recent[name].append(rate)

    def resume(self, before: Mapping[str, float]) -> None:
        """Begin with what ``Manifest.measured`` tells of the run before it was restarted."""
        for name, history in self._recent.items():
            if name in before:
                history.extend([before[name]] * (_KNOWN_LAPS if name in _OF_LAPS else 1))
        self.send_bytes_per_sec = before.get("send_bytes_per_sec")
        self._interference_secs = before.get("copy_interference_secs")

    @property
    def measurements(self) -> dict[str, float]:
        """Returns the measurements by now, for ``Manifest.measured``."""
        return {name: value for name, value in vars(self.measured()).items() if value is not None}

    def measured(self) -> Measured:
        return Measured(
            **{name: median(history) for name, history in self._recent.items() if history},
            send_bytes_per_sec=self.send_bytes_per_sec,
            copy_interference_secs=self._interference_secs,
        )


def secs_per_byte(iterations: Sequence[Lap]) -> float | None:
    """Returns how much longer an iteration gets per byte that is copied beside it; None if that cannot be told.

    Each comparison is of an iteration with the mean of the ones before and behind it that had another amount to copy,
    so that what changes steadily while a run trains cancels out. The median of them counts; 0 if a quarter of them or
    more say that copying makes iterations no longer, for then it is not to be told from chance.

    Args:
        iterations: One after the other, the newest last.
    """
    # Of each block of iterations that had as much to copy the last one, unless the block is of one alone.
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
