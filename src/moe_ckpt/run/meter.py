"""Iteration time and checkpoint cost, from laps of the training loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from moe_ckpt.core.step import Fate
from moe_ckpt.pace.interference import Lap, secs_per_byte
from moe_ckpt.policies.base import Measured

_RECENT_LAPS = 50
_RECENT_CHECKPOINTS = 5
_OF_LAPS = ("iteration_secs", "recent_iteration_secs", "update_secs")
_OF_CHECKPOINTS = ("checkpoint_cost_secs", "persist_secs", "copy_bytes_per_sec", "persist_bytes_per_sec")
"""Fields of ``Measured`` that are medians of recent laps, or of recent checkpoints."""
_TICK_SECS = 1e-6
_KNOWN_LAPS = 10
"""The laps that measurements from before a restart count as: the first laps after it are slow."""
_COMPARED_LAPS = 128
"""Looked at for what copying makes a lap longer, every ``_LOOK_LAPS`` laps."""
_LOOK_LAPS = 8


class _Copying:
    """What copying makes a lap longer (``pace.interference``).

    Attributes:
        nbytes: Copied beside the lap under way.
        secs: What that makes recent laps longer; None until known.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.secs: float | None = None
        self._beside: deque[Lap] = deque(maxlen=_COMPARED_LAPS)
        self._laps = 0
        self._per_byte: float | None = None

    def lap(self, secs: float) -> None:
        """One ended that took ``secs``, without waits."""
        self._beside.append(Lap(secs, self.nbytes))
        self._laps += 1
        if self._laps % _LOOK_LAPS == 0:
            slope = secs_per_byte(self._beside)
            self._per_byte = self._per_byte if slope is None else slope
        if self._per_byte is not None:
            self.secs = self._per_byte * median(sample.nbytes for sample in list(self._beside)[-_RECENT_LAPS:])


class Meter:
    """Fed once per optimizer step; tells clean iterations from those that ran beside a checkpoint.

    The cost of a checkpoint is what its iterations took longer than a clean one: that covers stalls and
    the slowdown of compute alike (CheckFreq, section 4.1).
    """

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {
            **{name: deque(maxlen=_RECENT_LAPS) for name in _OF_LAPS},
            **{name: deque(maxlen=_RECENT_CHECKPOINTS) for name in _OF_CHECKPOINTS},
        }
        self._last: float | None = None
        self._waited = 0.0
        self._extra = 0.0
        self._moved = -1
        self._update_began: float | None = None
        self._sent: float | None = None
        self._copying = _Copying()

    def lap(self, now: float, *, loaded: bool) -> None:
        """One step ended at ``now`` (seconds); ``loaded`` if a checkpoint was in flight during it."""
        if self._last is not None:
            took, clean = now - self._last, self._recent["iteration_secs"]
            alone = max(0.0, took - self._waited)
            self._recent["recent_iteration_secs"].append(alone)
            self._copying.lap(alone)
            if not loaded:
                clean.append(took)
            elif clean:
                self._extra += max(0.0, took - median(clean))
        if self._update_began is not None:
            self._recent["update_secs"].append(now - self._update_began)
        self._last, self._waited, self._update_began = now, 0.0, None
        self._copying.nbytes = 0

    def update_begins(self, now: float) -> None:
        """Notes that copies are joined at ``now``, and that the update of the lap under way may change it."""
        self._update_began = now

    def copies(self, nbytes: int) -> None:
        """Notes that so many bytes are copied beside the lap that begins."""
        self._copying.nbytes = nbytes

    def waited(self, secs: float) -> None:
        """Training waited for checkpointing in the lap under way."""
        self._waited += secs

    def resolved(self, persist_secs: float) -> None:
        """A checkpoint left the pipeline ``persist_secs`` after it began."""
        self._recent["persist_secs"].append(persist_secs)
        if self._recent["iteration_secs"]:
            self._recent["checkpoint_cost_secs"].append(self._extra)
        self._extra = 0.0

    def record_transfers(self, ended: Sequence[Fate]) -> None:
        """Records this rank's snapshots that ended. Snapshots that are known already are skipped."""
        for fate in ended:
            if fate.number > self._moved and fate.committed and fate.nbytes:
                self._moved = fate.number
                self._recent["copy_bytes_per_sec"].append(fate.nbytes / max(fate.copy_secs, _TICK_SECS))
                self._recent["persist_bytes_per_sec"].append(fate.nbytes / max(fate.write_secs, _TICK_SECS))

    def sends(self, bytes_per_sec: float | None) -> None:
        """Sets the send rate of peers; None keeps the known one."""
        self._sent = bytes_per_sec or self._sent

    def resume(self, before: Mapping[str, float]) -> None:
        """Begin with what ``Manifest.measured`` tells of the run before it was restarted."""
        for name, history in self._recent.items():
            if name in before:
                history.extend([before[name]] * (_KNOWN_LAPS if name in _OF_LAPS else 1))
        self.sends(before.get("send_bytes_per_sec"))
        self._copying.secs = before.get("copy_interference_secs")

    @property
    def measurements(self) -> dict[str, float]:
        """Returns the measurements by now, for ``Manifest.measured``."""
        return {name: value for name, value in vars(self.measured()).items() if value is not None}

    def measured(self) -> Measured:
        return Measured(
            **{name: median(history) for name, history in self._recent.items() if history},
            send_bytes_per_sec=self._sent,
            copy_interference_secs=self._copying.secs,
        )
