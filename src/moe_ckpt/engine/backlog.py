"""The handling of a checkpoint that is due while storage is behind with earlier ones."""

from __future__ import annotations

import logging
import time
from collections import deque

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.plan import SnapshotPlan
from moe_ckpt.engine.pipeline import Pipeline
from moe_ckpt.engine.settings import Settings
from moe_ckpt.policies.base import Measured
from moe_ckpt.ports import Communicator

log = logging.getLogger("moe_ckpt")

_LEAST_PATIENCE_SECS = 5.0
_TIMES_AS_LONG = 5.0
_WARN_AFTER_SECS = 60.0
_WAITS = 8
_NOTABLE = 0.2


class _Pace:
    """Notices that storage sets the pace of training, and says so once."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque(maxlen=_WAITS)
        self._said = False

    def note(self, began: float, ended: float, measured: Measured) -> None:
        """Training waited for storage.

        Args:
            began: When (``time.monotonic``).
            ended: Likewise.
            measured: Times so far.
        """
        self._waits.append((began, ended))
        first, secs = self._waits[0][0], sum(end - begin for begin, end in self._waits)
        if self._said or len(self._waits) < _WAITS or secs < _NOTABLE * (ended - first):
            return
        self._said = True
        log.warning(
            "training waits for storage, %.0f %% of its time lately: a sparse window saves a part of the state at each "
            "step, and storage takes %.2f s for a part. Keep checkpoints in memory (memory=moe_ckpt.Memory()), use "
            "faster storage, or a policy that skips checkpoints while storage is busy, such as Dense",
            100 * secs / (ended - first),
            measured.persist_secs or secs / _WAITS,
        )


class Backlog:
    """Decides, equally on every rank, whether a snapshot begins. For the training thread only.

    ``when_busy="wait"``: always; it waits for the others, up to ``timeout_secs``. ``when_busy="skip"``: not while the
    pipeline is busy. The later slots of a sparse window are worth a wait, because leaving one out gives the window up:
    five times as long as a snapshot usually takes to be committed, but at least 5 s and at most ``timeout_secs``.

    Attributes:
        skips: Snapshots that were due and did not begin.
        waits: Snapshots that training waited for others for, on this rank.
    """

    def __init__(self, settings: Settings, comm: Communicator) -> None:
        self.skips = 0
        self.waits = 0
        self._settings = settings
        self._comm = comm
        self._warned_of: int | None = None
        self._pace = _Pace()

    def admits(self, plan: SnapshotPlan, pipeline: Pipeline, *, busy: bool, measured: Measured) -> bool:
        """Returns whether the snapshot of ``plan`` begins now. A collective where a window's later slot finds no room.

        Args:
            busy: Some rank cannot take another snapshot now; equal on every rank.
            measured: Alike on every rank.
        """
        last = plan.halt is not None  # nothing comes after it that could make up for it
        if not busy or plan.wait or last or self._settings.when_busy == "wait":
            return True
        if plan.slot and self._room_in_time(pipeline, measured):
            return True
        if pipeline.room.is_unmade:
            pipeline.room.ask()
            self.leave_out(plan, "memory for it is still being made")
        else:
            self.leave_out(plan, "earlier ones are still being written")
            self._say_hung(plan, pipeline)
        return False

    def leave_out(self, plan: SnapshotPlan, why: str) -> None:
        """Counts a snapshot that does not begin on any rank.

        Args:
            plan: Of the snapshot.
            why: It does not on this one; empty if only another lacks something.
        """
        self.skips += 1
        log.info("step %d: no checkpoint, %s", plan.step, why or "another rank has no memory for it")

    def _room_in_time(self, pipeline: Pipeline, measured: Measured) -> bool:
        began = time.monotonic()
        in_time = pipeline.wait_for_room(self.patience_secs(measured))
        if self._comm.rank == 0 and self._settings.memory is None:
            self._pace.note(began, time.monotonic(), measured)
        [late] = largest(self._comm, [int(not in_time)])
        return not late

    def patience_secs(self, measured: Measured) -> float:
        """Longest wait before a window is given up."""
        if measured.persist_secs is None:
            return self._settings.timeout_secs
        return min(self._settings.timeout_secs, max(_LEAST_PATIENCE_SECS, _TIMES_AS_LONG * measured.persist_secs))

    def _say_hung(self, plan: SnapshotPlan, pipeline: Pipeline) -> None:
        """Warn once of each snapshot that storage does not finish, and of each window that is given up for it."""
        if self._comm.rank:
            return
        writing = pipeline.stages.writing
        step, secs = (None, 0.0) if writing is None else writing
        if plan.window is not None and plan.slot:
            log.warning(
                "step %d: storage has not taken the snapshots before this one (that of step %s for %.1f s now), so the "
                "sparse window that began at step %d is given up. Training continues; a new window starts when storage "
                "answers again",
                plan.step,
                step,
                secs,
                plan.window.start,
            )
        elif secs > min(_WARN_AFTER_SECS, self._settings.timeout_secs) and self._warned_of != step:
            log.warning(
                "step %d: storage has been writing the checkpoint of step %s for %.0f s. Training continues without "
                "new checkpoints until it answers again",
                plan.step,
                step,
                secs,
            )
        else:
            return
        self._warned_of = step
