"""Decides, equally on every rank, whether a snapshot that is due begins, and whether it goes to storage and to peers,
while storage or peers are behind with earlier ones."""

from __future__ import annotations

import logging
import time
from collections import deque

from moe_ckpt.comm.communicator import largest
from moe_ckpt.commit.pipeline import Pipeline
from moe_ckpt.core.plan import SnapshotPlan
from moe_ckpt.core.step import WindowPlace
from moe_ckpt.pace.cadence import StorageFacts, goes_to_peers
from moe_ckpt.policies.base import Measured
from moe_ckpt.ports import Communicator
from moe_ckpt.run.agreement import StepConsensus
from moe_ckpt.run.options import Settings
from moe_ckpt.run.run_ledger import RunLedger

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
        writing = pipeline.stages.persister.writing
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


class StorageFlush:
    """Decides which snapshots go to storage: all, unless memory outlives the process. For the training thread only.

    Args:
        settings: The user's.
        windows: The policy has sparse windows; of those all steps go, or none.
        rank: 0 tells the user.

    Attributes:
        skips: Snapshots that were due on storage, and stayed in memory because storage was behind.
    """

    def __init__(self, settings: Settings, *, windows: bool, rank: int) -> None:
        memory = settings.memory
        self.skips = 0
        self._cadence = None if memory is None else memory.cadence
        self._waits = settings.when_busy == "wait"
        self._windows = windows
        self._rank = rank
        self._last: tuple[int, float | None] | None = None
        self._window_start: int | None = None
        self._window_goes = True
        self._behind = self._tight = False

    def resumed(self, step: int) -> None:
        """The run resumed, and the newest checkpoint on storage is of ``step``: seconds count from the next step."""
        self._last = (step, None)

    def expects(self, step: int, consensus: StepConsensus, ledger: RunLedger) -> bool:
        """Tells whether a snapshot of ``step`` would go to storage, or the window that it begins, as far as that is
        known beforehand."""
        behind = consensus.storage_busy and not self._waits
        return self._cadence is None or (not behind and self._is_due_by_cadence(step, consensus, ledger))

    def goes(self, plan: SnapshotPlan, consensus: StepConsensus, ledger: RunLedger, *, tight: bool = False) -> bool:
        """Returns whether the snapshot of ``plan``, which begins now, goes to storage.

        Args:
            plan: Of the snapshot.
            consensus: Of the step.
            ledger: Of the run.
            tight: Memory has no room for two such.
        """
        if plan.gradients:  # which nothing but memory holds
            return False
        if self._cadence is None:
            return True
        if plan.slot:
            return self._window_goes
        goes = self._is_due(plan, consensus, ledger) or tight
        self._say_tight(plan.step, tight=tight)
        if goes and consensus.storage_busy and not (self._waits or plan.wait or plan.halt is not None):
            goes = False
            self.skips += 1
            self._say_behind(plan.step)
        elif goes:
            self._last, self._behind = (plan.step, consensus.secs), False
        self._window_start, self._window_goes = None if plan.window is None else plan.window.start, goes
        return goes

    def failed(self, step: int, window: WindowPlace | None) -> None:
        """A snapshot did not get to storage: the next one is due, and the rest of its window is of no use there."""
        if window is not None and window.start == self._window_start:
            self._window_goes = False
        start = step if window is None else window.start
        if self._last is not None and self._last[0] >= start:
            self._last = None

    def _is_due(self, plan: SnapshotPlan, consensus: StepConsensus, ledger: RunLedger) -> bool:
        if self._cadence is None or plan.wait or plan.halt is not None or ledger.needs_everything:
            return True
        if self._windows and plan.window is None:  # windows are built upon dense checkpoints, which are rare
            return True
        return self._is_due_by_cadence(plan.step, consensus, ledger)

    def _is_due_by_cadence(self, at: int, consensus: StepConsensus, ledger: RunLedger) -> bool:
        if self._cadence is None:
            return True
        measured = consensus.measured
        # Where memory takes a checkpoint at each step, no iteration is without one beside it.
        iteration_secs = measured.iteration_secs or measured.recent_iteration_secs
        step, secs = self._last or (None, None)
        if step is not None and secs is None:
            self._last = step, secs = step, consensus.secs
        return self._cadence.due(
            StorageFacts(
                step=at,
                last_step=step,
                secs_since=0.0 if secs is None or consensus.secs is None else consensus.secs - secs,
                flush_secs=measured.persist_secs,
                iteration_secs=iteration_secs,
                failures=len(ledger.tokens.faults),
                run_secs=at * (iteration_secs or 0.0),
            )
        )

    def _say_tight(self, step: int, *, tight: bool) -> None:
        if tight and not self._tight and self._rank == 0:
            log.warning(
                "step %d: memory has no room for two checkpoints, so each goes to storage too, from which the next one "
                "takes its place. To keep them in memory alone, raise host_memory_bytes",
                step,
            )
        self._tight = self._tight or tight

    def _say_behind(self, step: int) -> None:
        if not self._behind and self._rank == 0:
            log.warning(
                "step %d: storage is still writing earlier checkpoints, so this one stays in memory only. Training "
                "continues; storage gets the next one when it answers again",
                step,
            )
        self._behind = True


class PeerCopies:
    """Decides which snapshots go to peers, by the rule in ``pace.cadence``. For the training thread only.

    Args:
        settings: The user's.
        rank: 0 tells the user.
    """

    def __init__(self, settings: Settings, *, rank: int) -> None:
        self._waits = settings.when_busy == "wait"
        self._rank = rank
        self._window_goes = True
        self._said = False

    def go(self, plan: SnapshotPlan, consensus: StepConsensus) -> bool:
        """Returns whether the snapshot of ``plan``, which begins now, goes to peers. Of a window all do, or none."""
        if plan.slot:
            return self._window_goes
        self._window_goes = goes_to_peers(plan, behind=consensus.copies_behind, waits=self._waits)
        if not self._window_goes and not self._said and self._rank == 0:
            self._said = True
            log.warning(
                "step %d: peers have not taken the copies of earlier checkpoints, so this one gets none. A peer is "
                "paused, or the network between nodes is too slow for copies of every checkpoint. Training continues; "
                "moe_ckpt/replica_lag_steps shows how old the newest copies are",
                plan.step,
            )
        return self._window_goes
