"""One life of a training run, as checkpointing sees it: the part that every adapter drives.

Per optimizer step, on every rank and on the training thread:

    before_update()   just before the optimizer changes anything: joins the copy, receives what the ranks agreed on
    after_update()    when the step's state is final: plans, starts the next copy, begins to agree on the step

and once each: ``open`` before training, ``resume_from`` after a restore, ``finish`` or ``close`` at the end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.step import Fate, SnapshotPlan
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.errors import SaveFailedError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.policies.base import needs_of
from moe_ckpt.run.agreement import Deferred, StepConsensus, StepTokens
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.events import (
    Closed,
    Joined,
    Opened,
    Resumed,
    StepEnded,
    StepRecord,
    TrainingBegins,
    TrainingEnded,
)
from moe_ckpt.session.opening import open_pipeline
from moe_ckpt.session.snapshotting import Capture, Snapshotter
from moe_ckpt.slices.assignment import ComputeTypes
from moe_ckpt.slices.snapshot import Encode, plain_of
from moe_ckpt.stopwatch import Since, Stopwatch, timed
from moe_ckpt.tiers.memory_tier import MemoryTier

log = logging.getLogger("moe_ckpt")

_IDLE_SECS = 10.0
"""Longest wait for threads that have nothing to do."""


class NewestStep(Protocol):
    """Follows the newest step, to seal it when training stops. Called on the training thread."""

    def step_ends(self, step: int, plain: Encode, tokens: Deferred[StepTokens]) -> None:
        """The state of ``step`` is final.

        Args:
            plain: Returns the plain state as of its first call.
            tokens: Of this rank.
        """

    def keep_plain(self, *, described: bool) -> None:
        """The next step begins: random numbers and buffers are about to change.

        Args:
            described: A snapshot of the step began, so that its tensors are known.
        """

    def update_begins(self, now: float) -> None:
        """The update begins, after which a rank can return to the newest step only if that is sealed."""

    def close(self, timeout_secs: float) -> None:
        """Ends threads. A second call has no effect."""


_Follower = TypeVar("_Follower", bound=NewestStep)


class CheckpointSession:
    """Drives policy, ledger and pipeline of one rank. For the training thread only.

    Attributes:
        catalog: Of the model.
        comm: The ranks.
        run_ledger: Equal on every rank between two calls.
        stopwatch: Measures how long checkpointing keeps the training thread; adapters measure their hooks with it, too.
    """

    def __init__(self, run: RunContext, stopwatch: Stopwatch | None = None) -> None:
        run.policy.check(run.catalog)
        self.catalog = run.catalog
        self.comm = run.comm
        self.stopwatch = stopwatch or Stopwatch()
        self._run = run
        self._snapshots = Snapshotter(self._run)
        self._planner = self._snapshots.planner
        self._booking = self._snapshots.booking
        self.run_ledger = self._booking.run_ledger
        self._follower: NewestStep | None = None
        self._since_record, self._since_lap = Since(self.stopwatch), Since(self.stopwatch)
        self._agree_secs = 0.0
        self._newest_plan = SnapshotPlan(0)
        self._release = run.lock.release  # once

    # --- once, before training ---

    def open(self) -> None:
        """Takes possession of the store and starts the threads. Called by all ranks, before ``resume_from``.

        Raises:
            StoreError, ConfigError, OSError: as ``open_store``. After an error the store is unlocked, and no thread
                runs.
        """
        run = self._run
        try:
            self._snapshots.opened = pipeline = open_pipeline(run)
            budget = pipeline.snapshot_bytes * run.settings.max_in_flight
            run.tell(Opened(run, pipeline.tier.run_id, pipeline.generation, budget))
            needs = needs_of(run.policy)
            if needs.windows or needs.gradients or needs.sizes:  # minimum over ranks
                [least] = largest(self.comm, [-pipeline.snapshot_bytes])
                self._planner.room = -least
        except BaseException:
            with contextlib.suppress(OSError):  # the lock of a store that does not answer; the first error tells more
                self.close(_IDLE_SECS)
            raise

    def resume_from(
        self,
        manifest: Manifest,
        *,
        same_store: bool = True,
        tokens_from_host: Counts | None = None,
        beneath: Manifest | None = None,
        rebuilds: bool = False,
    ) -> FaultRecord:
        """Resumes from a restored checkpoint, and records the tokens that its experts lack.

        Called on every rank, after the state was restored and before the first step. From a checkpoint of another store
        the session takes the history, but no files: the next checkpoint is then dense.

        Args:
            manifest: Of the checkpoint.
            same_store: The checkpoint, or the one ``beneath``, is in the session's own store.
            tokens_from_host: ``[L, E]`` tokens of experts that were restored from host memory instead of from storage.
            beneath: For a checkpoint in memory, the one on storage that has the operators that memory lacks.
            rebuilds: Files are damaged on which a partial checkpoint would build: the next checkpoint has everything,
                whatever the policy. ``same_store`` is False then.
        """
        pipeline = self._snapshots.pipeline
        committer = pipeline.committer
        fault = self.run_ledger.resume_from(
            manifest, same_store=same_store, tokens_from_host=tokens_from_host, beneath=beneath
        )
        if committer is not None:
            committer.resume_from(self.run_ledger.ledger, (beneath or manifest) if same_store else None)
        if manifest.world_size == self.comm.world_size:
            self._booking.meter.resume(manifest.measured)
        if same_store:
            stored = beneath or manifest
            self._snapshots.live.note_layout(self._run.state.specs())
            self._snapshots.backlog.resumed(stored.step)
            self._booking.committed_directory = stored.directory
            if needs_of(self._run.policy).windows:
                dense_step = 0 if committer is None else committer.keeper.dense_step(stored)
                [self._planner.dense_step] = largest(self.comm, [dense_step])
        if rebuilds:
            self.run_ledger.forget()
        pipeline.room.training_begins(whole=self.run_ledger.needs_everything)
        self._run.tell(Resumed(manifest.step))
        self._since_record.take()  # a replay is no stall of the next step
        self._since_lap.take()
        return fault

    def continue_ledger(self, tokens: Mapping[str, Any], index: int) -> None:
        """Continues from a dense checkpoint in another format, in which no expert lacks tokens."""
        self.run_ledger.continue_from(tokens, index)
        committer = self._snapshots.pipeline.committer
        if committer is not None:
            committer.resume_from(self.run_ledger.ledger, None)

    def training_begins(self) -> None:
        """Notes that the state is complete and training enters its loop. No collective."""
        pipeline, ledger = self._snapshots.pipeline, self.run_ledger
        pipeline.tier.left_slots.training_begins()
        is_new = ledger.newest is None and ledger.committed_step is None
        pipeline.room.training_begins(whole=is_new or ledger.needs_everything)
        self._run.tell(TrainingBegins())
        self._since_record.take()
        self._since_lap.take()

    def begin_run(self, capture: Capture, step: int = 0, *, wait: bool = True) -> None:
        """Saves the state with which training begins, if the policy wants that, and waits for the commit.

        Called by the adapter instead of ``after_update``, before the first step of a run that does not resume.

        Args:
            capture: Returns the plain state.
            step: Optimizer steps done.
            wait: False if ranks arrive one after the other; ``drain`` before the first update waits for the commit.
        """
        plan = self._snapshots.plan(step)
        if plan:
            plain = plain_of(capture, self.comm.rank)
            self._snapshots.carry_out(plan, plain, StepConsensus(), step_is_agreed=True, before_training=True)
            if wait:
                self.drain(step)

    def set_compute_types(self, types: ComputeTypes) -> None:
        """Sets the types in which kernels read the parameters, equal on every rank; by default, their own types."""
        self._snapshots.live.set_compute_types(types)

    def follow(self, make: Callable[[RunContext, Snapshotter], _Follower]) -> _Follower:
        """Lets a guest follow the newest step. Called once, before training.

        Args:
            make: Makes the guest.

        Returns:
            The guest.
        """
        self._follower = follower = make(self._run, self._snapshots)
        return follower

    # --- what is known ---

    @property
    def generation(self) -> int:
        """Number of this life of the run."""
        return self._snapshots.pipeline.generation

    @property
    def is_open(self) -> bool:
        """True between ``open`` and ``finish`` or ``close``."""
        return self._snapshots.opened is not None

    @property
    def tier(self) -> MemoryTier:
        """Returns the tier in memory; it has checkpoints of an earlier session until the first one of this session."""
        return self._snapshots.pipeline.tier

    @property
    def committed_directory(self) -> str | None:
        """Directory of the newest checkpoint that this rank knows to be committed."""
        return self._booking.committed_directory

    # --- every optimizer step ---

    @timed
    def before_update(self, *, receive: bool = True, of_gradients: bool = False) -> None:
        """Joins the copy under way. Must return before anything changes weights or optimizer state.

        Args:
            receive: Also receive the agreement on the step before: the only wait for it in a step. False if something
                other than an update changes weights next.
            of_gradients: Join only a copy that reads gradients, which are about to be overwritten.

        Raises:
            RuntimeError: a peer is gone.
        """
        pipeline = self._snapshots.pipeline
        if of_gradients:
            pipeline.release()
        else:
            pipeline.join()
        if receive:
            self._receive()
            received = time.perf_counter()
            if self._run.gradients is not None and self._run.settings.when_busy == "wait":
                pipeline.wait_for_seal(self._run.settings.timeout_secs)
            if self._follower is not None:
                self._follower.update_begins(received)
            self._booking.meter.update_began = received
            self._run.tell(Joined(received))

    @timed
    def _receive(self) -> StepConsensus:
        """Books the agreement of the ranks. The wait for slower ranks does not count as a stall."""
        before = self._booking.agreement.waited_secs
        consensus = self._booking.receive(self._snapshots.pipeline)
        waited = self._booking.agreement.waited_secs - before
        self._agree_secs += waited
        self.stopwatch.leave_out(waited)
        return consensus

    @timed
    def after_update(
        self, step: int, tokens: Deferred[StepTokens], capture: Capture, *, updated: bool | None = True
    ) -> StepRecord:
        """Plans, and begins to copy, when the state after optimizer step ``step`` is final.

        Args:
            step: Optimizer steps done.
            tokens: Of this rank; a device may still be counting them.
            capture: Returns the plain state.
            updated: False if the step's update was left out, because gradients overflowed; None if nobody knows yet.

        Raises:
            RuntimeError: a peer is gone.
        """
        final_at = time.perf_counter()
        plain = plain_of(capture, self.comm.rank)
        if self._follower is not None:
            self._follower.step_ends(step, plain, tokens)
        self._snapshots.step_begins(updated=bool(updated))
        booking, pipeline = self._booking, self._snapshots.pipeline
        pipeline.tier.left_slots.step_ended()
        pipeline.raise_fatal()
        pipeline.join()
        loaded = bool(self.run_ledger.pending or self.run_ledger.sealing)
        booking.meter.lap(final_at, loaded=loaded, waited_secs=self._since_lap.take(final_at))
        edited = self._run.gradients is not None and self._run.gradients.edited(step)
        if not self.comm.agrees_late:
            booking.send(step, tokens, pipeline, edited=edited)
        consensus = self._receive()
        plan = self._snapshots.plan(step, consensus)
        record = StepRecord(step)
        if plan:
            self._newest_plan = plan
            record = self._snapshots.carry_out(plan, plain, consensus, step_is_agreed=not self.comm.agrees_late)
        if self._follower is not None:
            self._follower.keep_plain(described=record.begun)
        if self._run.gradients is not None:
            self._run.gradients.forget()
            if updated is not False and not record.begun:  # later gradients cannot be applied to earlier anchors
                booking.anchors.broken()
        if self.comm.agrees_late:
            booking.send(step, tokens, pipeline, edited=edited)
        if plan.wait and record.begun:
            self._receive()
            self.wait(step)
        if self._run.gate is not None:
            self._run.gate.step_begins()
        record = self.completed(replace(record, agree_secs=self._agree_secs))
        self._agree_secs = 0.0
        record = replace(record, stall_secs=self._since_record.take())
        self._run.tell(StepEnded(record, final_at, loaded, consensus.measured, self.run_ledger))
        return record

    def stops_after(self, step: int, tokens: Deferred[StepTokens], capture: Capture, *, updated: bool | None) -> None:
        """Notes the update of ``step``, right after which training stops: no snapshot is due, and no rank is asked.

        Args: as of ``after_update``.
        """
        self._snapshots.step_begins(updated=bool(updated))
        if self._follower is not None:
            self._follower.step_ends(step, plain_of(capture, self.comm.rank), tokens)

    # --- once, at the end ---

    def catch_up(self, record: StepRecord) -> StepRecord:
        """Waits for the last agreement when training has ended. Returns the newest record, completed.

        Raises: as ``after_update``.
        """
        self._receive()
        record = self.completed(record)
        self._run.tell(TrainingEnded(record, self.run_ledger))
        return record

    def completed(self, record: StepRecord) -> StepRecord:
        """Returns the record with the present numbers of the ledger, which are final after ``finish``."""
        ledger, tokens = self.run_ledger.ledger, self.run_ledger.tokens
        plan, snapshots = self._newest_plan, self._snapshots
        opened, gate = self._snapshots.opened, self._run.gate
        memory = None if opened is None else opened.memory
        replicator = None if memory is None else memory.replicator
        return replace(
            record,
            bubble_nbytes=0 if gate is None else gate.bubble_nbytes,
            beside_nbytes=0 if gate is None else gate.beside_nbytes,
            skips=snapshots.backlog.skips,
            waits=snapshots.backlog.waits,
            k=plan.k,
            plt_budget_left=None if plan.plt_budget is None else plan.plt_budget - tokens.plt,
            plt=tokens.plt,
            at_risk_plt=tokens.plt_after(ledger.at_risk.tokens),
            at_risk_mlt=ledger.at_risk.mlt,
            mlt_newest=tokens.faults[-1].mlt if tokens.faults else None,
            mlt_worst=max((fault.mlt for fault in tokens.faults), default=None),
            lost_tokens=tokens.lost_tokens,
            owed_tokens=None if self.run_ledger.deficit is None else int(self.run_ledger.deficit.sum()),
            routed_tokens=tokens.routed_tokens,
            committed_step=self.run_ledger.committed_step,
            failed_checkpoints=self._booking.failures.total,
            oldest_expert_steps=int(ledger.expert_ages(record.step).max(initial=0)),
            memory_step=None if memory is None else memory.complete_step,
            memory_nbytes=0 if memory is None else memory.nbytes,
            replica_lag_steps=0 if replicator is None else replicator.lag_steps,
            replica_sent_nbytes=0 if replicator is None else replicator.sent_bytes,
            replica_saved_nbytes=0 if replicator is None else replicator.saved_bytes,
        )

    def save_complete(self, step: int, capture: Capture, *, again: bool = True) -> None:
        """Begins a snapshot of everything, unless the newest one is that, and, if ``again``, has not failed. Called
        before other callbacks change the weights (averaging), and by ``finish``."""
        self._receive()
        self._snapshots.save_complete(step, capture, again=again)

    def drain(self, step: int, *, last: bool = False) -> Sequence[Fate]:
        """Waits until no snapshot is copied or written any more. Returns the fates of those that ended, newest last.

        Args:
            step: The newest one, for the message.
            last: The run ends: the time that its last snapshot has waited counts as well.

        Raises:
            SaveFailedError: Storage did not finish in time.
        """
        snapshots, timeout_secs = self._snapshots, self._run.settings.timeout_secs
        snapshots.pipeline.join()
        if not snapshots.pipeline.wait(snapshots.end_secs if last else timeout_secs):
            raise self._not_in_time(step, timeout_secs)
        return snapshots.pipeline.persister.fates(-1)

    def wait(self, step: int) -> None:
        """Waits as ``drain`` does, during training. If storage does not finish in time, that is a warning."""
        try:
            self.drain(step)
        except SaveFailedError as error:
            log.warning("%s. Training continues", error)

    def finish(
        self, step: int, capture: Capture, *, save_last: bool, note_end: Callable[[str], None] | None = None
    ) -> None:
        """Saves a complete checkpoint of the last state, waits for it, and closes. For training that ended well.

        Args:
            step: Optimizer steps done.
            capture: Returns the plain state.
            save_last: False to save no checkpoint.
            note_end: Called on rank 0 with the newest checkpoint's directory, before the store is released.

        Raises:
            SaveFailedError: The last checkpoint could not be committed, or not in time.
        """
        self._leave(self._run.settings.timeout_secs)
        self._receive()
        if save_last:
            # One that failed is not made again: by now a framework may have counted the epoch as done.
            self.save_complete(step, capture, again=False)
        try:
            ended = self.drain(step, last=True)
        except SaveFailedError:
            self.close(0.0)
            raise
        # No step follows whose agreement could book these, and none is needed: every rank has seen all.
        for fate in ended:
            if fate.number in self.run_ledger.pending:
                self._booking.book(fate.number, fate.committed)
        failed = bool(ended) and not ended[-1].committed
        if note_end is not None and not failed and self.comm.rank == 0 and self.committed_directory is not None:
            note_end(self.committed_directory)
        self._close(self._run.settings.timeout_secs, keep=failed)
        if failed:
            raise SaveFailedError(ended[-1].step, (ended[-1].cause or "unknown",))

    def close(self, timeout_secs: float | None = None) -> int | None:
        """Waits for snapshots under way, not too long, and ends the threads. A second call has no effect.

        Unless ``finish`` was called, training has failed: the recovery buffer stays in this process's memory for the
        next session on the same store (see ``tiers.host_memory``).

        Returns:
            The newest committed step that this rank knows of; None if it knows of none.
        """
        secs = self._run.settings.timeout_secs if timeout_secs is None else timeout_secs
        self._leave(secs)
        self._booking.give_up()
        opened, booked = self._snapshots.opened, self.run_ledger.committed_step
        self._close(secs, keep=True)
        fates = () if opened is None else opened.persister.fates(-1)
        ended = [self.run_ledger.pending.get(fate.number) for fate in fates if fate.committed]
        committed = [one.step for one in ended if one is not None and one.contents.is_checkpoint]
        return max(committed, default=booked)

    def _not_in_time(self, step: int, secs: float) -> SaveFailedError:
        """Returns the error for snapshots that did not end in so many seconds."""
        pipeline, newest = self._snapshots.pipeline, self.run_ledger.committed_step
        writing, root = pipeline.persister.writing, self._run.storage.root
        newest_text = (
            "no checkpoint is committed" if newest is None else f"the newest checkpoint is that of step {newest}"
        )
        if writing is None and pipeline.memory is not None:
            cause = f"earlier snapshots were still being copied, or sent to peers, after {secs:g} s (timeout_secs)"
            hint = "check whether this machine has memory left, and whether peers are slow"
            return SaveFailedError(step, (cause, f"{newest_text} on storage; {hint}, or raise timeout_secs"))
        cause = f"the storage of {root} did not finish within {secs:g} s (timeout_secs)"
        if writing is not None:
            cause += f", it has been writing the checkpoint of step {writing[0]} for {writing[1]:.0f} s"
        return SaveFailedError(step, (cause, f"{newest_text}; check whether that storage hangs, or raise timeout_secs"))

    def _close(self, timeout_secs: float, *, keep: bool) -> None:
        """Ends the threads, and releases the store, or has the thread that still writes release it.

        Args:
            timeout_secs: Longest wait for that thread.
            keep: Training failed: the recovery buffer stays in memory.
        """
        pipeline, self._snapshots.opened = self._snapshots.opened, None
        release, self._release = self._release, lambda: None
        try:
            self._run.tell(Closed(finished=not keep))
        finally:
            if pipeline is None:
                release()
            # A thread may write on: the next session in this process must not share the store with it.
            elif not pipeline.close(timeout_secs, keep=keep, afterwards=release):
                log.warning(
                    "a checkpoint is still being written; training does not wait for it, but the store stays "
                    "locked until it ends%s",
                    "" if self.comm.world_size == 1 else ". Ranks no longer wait for each other to commit it",
                )
            self.comm.close()

    def _leave(self, timeout_secs: float) -> None:
        if self._follower is not None:
            self._follower.close(timeout_secs)
