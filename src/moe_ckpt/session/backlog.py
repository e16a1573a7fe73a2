"""Decides, equally on every rank, whether a snapshot that is due begins, and whether it goes to storage and to peers,
while storage or peers are behind with earlier ones."""

from __future__ import annotations

import logging
import time
from collections import deque

from moe_ckpt.comm.communicator import largest
from moe_ckpt.commit.pipeline import Pipeline
from moe_ckpt.core.cadence import StorageCadence, StorageFacts, goes_to_peers
from moe_ckpt.core.step import SnapshotPlan, WindowPlace
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


class Backlog:
    """Decides, equally on every rank, whether a snapshot begins, and where it goes. For the training thread only.

    With ``when_busy="wait"`` a snapshot always begins, and waits for earlier ones, up to ``timeout_secs``. With
    ``when_busy="skip"`` it does not begin while the pipeline is busy. A later slot of a sparse window is worth a wait,
    since leaving one out gives the window up: five times as long as a snapshot usually takes to be committed, but at
    least 5 s and at most ``timeout_secs``. All snapshots go to storage unless memory outlives the process; the steps of
    a window all go to storage, or none do, and likewise to peers.

    Args:
        settings: The user's.
        comm: The ranks, of which rank 0 logs warnings.
        windows: The policy has sparse windows.

    Attributes:
        skips: Checkpoints that were due and did not begin, or that stayed in memory because storage was behind.
        waits: Snapshots for which training on this rank waited for earlier ones.
    """

    def __init__(self, settings: Settings, comm: Communicator, *, windows: bool) -> None:
        self.skips = self.waits = 0
        self._settings, self._comm, self._windows = settings, comm, windows
        self._waits_if_busy = settings.when_busy == "wait"
        self._cadence = None if settings.memory is None else settings.memory.cadence
        self._last_stored: tuple[int, float | None] | None = None
        self._window_start: int | None = None
        self._window_to_storage = self._window_to_peers = True
        self._storage_waits: deque[tuple[float, float]] = deque(maxlen=_WAITS)
        self._said: set[str] = set()

    def begins(self, plan: SnapshotPlan, pipeline: Pipeline, consensus: StepConsensus) -> bool:
        """Returns whether the snapshot of ``plan`` begins now. A collective where a window's later slot finds no room.

        Args:
            plan: Of the snapshot.
            pipeline: Of the session.
            consensus: Of the step.
        """
        if not consensus.busy or plan.wait or self._waits_if_busy:
            return True
        if plan.slot and self._room_in_time(pipeline, consensus.measured):
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
            why: The reason on this rank; empty if only another rank has one.
        """
        self.skips += 1
        log.debug("step %d: no checkpoint, %s", plan.step, why or "another rank has no memory for it")

    def _room_in_time(self, pipeline: Pipeline, measured: Measured) -> bool:
        began, secs = time.monotonic(), self._settings.timeout_secs
        if measured.persist_secs is not None:
            secs = min(secs, max(_LEAST_PATIENCE_SECS, _TIMES_AS_LONG * measured.persist_secs))
        in_time = pipeline.room.wait(secs)
        if self._settings.memory is None:
            self.note_wait(began, time.monotonic(), measured)
        [late] = largest(self._comm, [int(not in_time)])
        return not late

    def note_wait(self, began: float, ended: float, measured: Measured) -> None:
        """Notes that training waited for storage. If such waits set the pace of training, the user is warned, once.

        Args:
            began, ended: ``time.monotonic`` of the wait.
            measured: Times so far.
        """
        waits = self._storage_waits
        waits.append((began, ended))
        secs = sum(end - begin for begin, end in waits)
        if len(waits) < _WAITS or secs < _NOTABLE * (ended - waits[0][0]):
            return
        self._say(
            "pace",
            "training waits for storage, %.0f %% of its time lately: a sparse window saves a part of the state at each "
            "step, and storage takes %.2f s for a part. Keep checkpoints in memory (memory=moe_ckpt.Memory()), use "
            "faster storage, or a policy that skips checkpoints while storage is busy, such as Dense",
            100 * secs / (ended - waits[0][0]),
            measured.persist_secs or secs / _WAITS,
        )

    def _say_hung(self, plan: SnapshotPlan, pipeline: Pipeline) -> None:
        """Warns once of each snapshot that storage does not finish, and of each window given up because of that."""
        step, secs = pipeline.persister.writing or (None, 0.0)
        if plan.window is not None and plan.slot:
            self._said.add(f"hung {step}")
            self._say(
                f"window {plan.window.start}",
                "step %d: storage has not taken the snapshots before this one (that of step %s for %.1f s now), so the "
                "sparse window that began at step %d is given up. Training continues; a new window starts when storage "
                "answers again",
                plan.step,
                step,
                secs,
                plan.window.start,
            )
        elif secs > min(_WARN_AFTER_SECS, self._settings.timeout_secs):
            self._say(
                f"hung {step}",
                "step %d: storage has been writing the checkpoint of step %s for %.0f s. Training continues without "
                "new checkpoints until it answers again",
                plan.step,
                step,
                secs,
            )

    def _say(self, about: str, text: str, *values: object) -> None:
        """Logs a warning on rank 0, once for each ``about``."""
        if about not in self._said and self._comm.rank == 0:
            log.warning(text, *values)
        self._said.add(about)

    def resumed(self, step: int) -> None:
        """Notes the step of the newest checkpoint on storage, after a resume; seconds count from the next step."""
        self._last_stored = (step, None)

    def expects_storage(self, step: int, consensus: StepConsensus, ledger: RunLedger) -> bool:
        """Returns whether a snapshot of ``step``, or the window that it begins, would go to storage, as far as that is
        known before the plan."""
        behind = consensus.storage_busy and not self._waits_if_busy
        return self._cadence is None or (not behind and self._is_due(self._cadence, step, consensus, ledger))

    def to_storage(
        self, plan: SnapshotPlan, consensus: StepConsensus, ledger: RunLedger, *, tight: bool = False
    ) -> bool:
        """Returns whether the snapshot of ``plan``, which begins now, goes to storage.

        Args:
            plan: Of the snapshot.
            consensus: Of the step.
            ledger: Of the run.
            tight: Memory has no room for two such snapshots: one that storage does not get is left out.
        """
        if self._cadence is None or plan.gradients:  # gradients are in memory only
            return not plan.gradients
        if plan.slot:
            return self._window_to_storage
        goes = (
            tight
            or plan.wait
            or ledger.needs_everything
            or (self._windows and plan.window is None)  # windows are built upon dense checkpoints, which are rare
            or self._is_due(self._cadence, plan.step, consensus, ledger)
        )
        if tight:
            self._say(
                "tight",
                "step %d: memory has no room for two checkpoints, so each goes to storage too, from which the next one "
                "takes its place. To keep them in memory alone, raise host_memory_bytes",
                plan.step,
            )
        if goes and consensus.storage_busy and not (self._waits_if_busy or plan.wait):
            goes = False
            self.skips += not tight  # else the caller leaves it out, and counts that
            self._say(
                "behind",
                "step %d: storage is still writing earlier checkpoints, so this one %s. Training continues; storage "
                "gets the next one when it answers again",
                plan.step,
                "is left out: memory has no room for two" if tight else "stays in memory only",
            )
        elif goes:
            self._last_stored = plan.step, consensus.secs
            self._said.discard("behind")
        self._window_start, self._window_to_storage = None if plan.window is None else plan.window.start, goes
        return goes

    def failed(self, step: int, window: WindowPlace | None) -> None:
        """Notes that storage does not get a snapshot: the next one is due, and the rest of its window does not go
        there."""
        if window is not None and window.start == self._window_start:
            self._window_to_storage = False
        start = step if window is None else window.start
        if self._last_stored is not None and self._last_stored[0] >= start:
            self._last_stored = None

    def _is_due(self, cadence: StorageCadence, at: int, consensus: StepConsensus, ledger: RunLedger) -> bool:
        measured = consensus.measured
        # Where memory takes a checkpoint at each step, no iteration is without one beside it.
        iteration_secs = measured.iteration_secs or measured.recent_iteration_secs
        step, secs = self._last_stored or (None, None)
        if step is not None and secs is None:
            self._last_stored = step, secs = step, consensus.secs
        return cadence.due(
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

    def to_peers(self, plan: SnapshotPlan, consensus: StepConsensus) -> bool:
        """Returns whether the snapshot of ``plan``, which begins now, goes to peers (``core.cadence``)."""
        if not plan.slot:
            self._window_to_peers = goes_to_peers(plan, behind=consensus.copies_behind, waits=self._waits_if_busy)
            if not self._window_to_peers:
                self._say(
                    "peers",
                    "step %d: peers have not taken the copies of earlier checkpoints, so this one gets none. A peer is "
                    "paused, or the network between nodes is too slow for copies of every checkpoint. Training "
                    "continues; moe_ckpt/replica_lag_steps shows how old the newest copies are",
                    plan.step,
                )
        return self._window_to_peers
