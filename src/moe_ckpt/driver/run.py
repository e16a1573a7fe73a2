"""One life of a run, as every adapter drives it: open, resume, begin, step or replay, finish.

An adapter turns its framework's hooks into calls of a ``Driver``, and provides a ``Host``, which reads and restores the
framework's own state. ``driver.states`` has the order in which calls are allowed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from moe_ckpt.core.operators import Catalog, missed_steps
from moe_ckpt.core.placement import Placement, everywhere
from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.driver.changes import warn_of_changes
from moe_ckpt.driver.host import CapacityBoost, GradientLogging, Host, LocalizedRecovery, SealingSurvivors
from moe_ckpt.driver.messages import Messages
from moe_ckpt.driver.states import Action, Advice, Lifecycle, Moment, State
from moe_ckpt.errors import ReplayDivergedError, SaveFailedError
from moe_ckpt.format.manifest import Manifest, parse_step_dir
from moe_ckpt.modeling.streams import tell_loaded_positions
from moe_ckpt.ports import Communicator, TrainingState, TransferGate
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.recovery.executing import Restored, versions_of
from moe_ckpt.recovery.replay import StepReplay
from moe_ckpt.recovery.resume import other_ranks, resume_newest
from moe_ckpt.run.agreement import Deferred, StepTokens, Updated
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.documents import read_finished, write_finished
from moe_ckpt.run.events import Loaded, Observer, StepRecord, StepReplayed
from moe_ckpt.run.options import Options
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.stopwatch import Stopwatch
from moe_ckpt.storage import Storage, StoreLock, open_storage
from moe_ckpt.storage.lock import job_name

on_phase: Callable[[str], None] | None = None
"""Called with "copy", "write", "fsync", "rename", "manifest" or "gc" when a run of this process comes to that phase.
For tests that kill processes: see ``testing.watch_phases``."""

CLOSE_SECS = 10.0
"""Longest wait for checkpoints under way, after a failure of training."""


class Driver:
    """Drives one ``CheckpointSession``.

    Args:
        host: The adapter.
        options: The user's.
        advice: The adapter's advice for calls out of order.
        stopwatch: Measures the stall; None: a new one.

    Attributes:
        last: The record of the newest step; None before the first.
        restored_step: Step of the checkpoint that training resumed from; of a sparse window, its last one.
        restored: That checkpoint, as this rank sees it, without its plain state once a step was done; None if the
            framework loaded it.
        replaying: The replay of a sparse window, until it is done.
        boost: Gives stale experts more tokens; None if the policy asks for none.
        localized: Lets only some pipeline stages go back; None if all do.
        gradients: Logs gradients; None if the policy does not.
        survivors: Seals the newest step when training stops at a failure; set by ``open``, None if nothing does.
        say: Messages to the user; set by ``open``.
        storage: Of the store; set by ``open``, so that another working directory later does not matter.
        stopwatch: Measures the stall of all hooks of the adapter and the session.
    """

    def __init__(self, host: Host, options: Options, advice: Advice, stopwatch: Stopwatch | None = None) -> None:
        self.options = options
        self.stopwatch = stopwatch or Stopwatch()
        self.last: StepRecord | None = None
        self.restored_step: int | None = None
        self.restored: Restored | None = None
        self.replaying: StepReplay | None = None
        self.boost: CapacityBoost | None = None
        self.localized: LocalizedRecovery | None = None
        self.gradients: GradientLogging | None = None
        self.lifecycle = Lifecycle(advice)
        self.session: CheckpointSession
        self.survivors: SealingSurvivors | None = None
        self.say: Messages
        self.storage: Storage
        self._host = host
        self._undrained = False

    @property
    def comm(self) -> Communicator:
        """The communicator of all ranks."""
        return self.session.comm

    @property
    def is_localized(self) -> bool:
        """True if only some pipeline stages went back at this start."""
        return self.restored is not None and self.restored.joined is not None

    # --- once, before training ---

    def open(
        self,
        comm: Communicator,
        catalog: Catalog,
        state: TrainingState,
        *,
        placement: Placement | None = None,
        aliases: Mapping[str, str] | None = None,
        observers: Sequence[Observer] = (),
        boost: CapacityBoost | None = None,
        gate: TransferGate | None = None,
        localized: LocalizedRecovery | None = None,
        open_log: Callable[[], GradientLogging] | None = None,
        **machine: Any,
    ) -> None:
        """Opens the store. Errors: see ``CheckpointSession.open``.

        Args:
            comm: Of all ranks.
            catalog: Of the model.
            state: Of the model and its optimizers.
            placement: Which ranks hold and write what; None: every rank holds everything.
            aliases: Further name of a tied parameter -> its name.
            observers: Get the session's events.
            boost: See the class.
            gate: Lets copies run in bubbles of a pipeline.
            localized: See the class.
            open_log: Makes the gradient log: now if the policy has one, else when the run returns to a step of a log.
            **machine: Fields of ``run.options.Settings`` that the adapter sets: ``pinned``, ``local_ranks``.
        """
        storage = open_storage(self.options.dirpath, on_phase, access=self.options.access)
        if self.options.profile is not None and comm.rank == 0:
            from moe_ckpt_sim.planner.recorder import profile_observer

            observers = [profile_observer(self.options.profile), *observers]
        if open_log is not None and self.options.needs.gradients:
            self.gradients = open_log()
        run = RunContext(
            storage=storage,
            policy=self.options.policy,
            catalog=catalog,
            state=state,
            comm=comm,
            settings=replace(self.options, **machine),
            placement=placement or everywhere(catalog.layers, comm.world_size),
            aliases=aliases or {},
            lock=StoreLock(storage, job_name(), access=self.options.access),
            on_phase=on_phase,
            observers=observers,
            gate=gate,
            gradients=self.gradients,
        )
        session, self._tell = CheckpointSession(run, self.stopwatch), run.tell
        session.open()
        self.session, self.storage, self._open_log = session, storage, open_log
        self.boost, self.localized = boost, localized
        self.say = Messages(self._host.unit, self.options.dirpath, comm.rank)
        tensors = state.tensors()  # before specs(), which are of the same moment
        self.say.setup(self.options, catalog, state.specs(), tensors, comm.world_size)
        self._resume = functools.partial(resume_newest, storage, comm, state)
        if self.options.memory is not None and self.options.memory.sealing_secs:
            from moe_ckpt.survivors.newest_step import Survivor
            from moe_ckpt.survivors.stopping import Surviving

            secs = self.options.memory.sealing_secs
            self.survivors = Surviving(session.follow(Survivor), comm.rank, self._host, secs, localized)
        tell_loaded_positions()
        self.lifecycle.move(Action.OPEN, "open()")
        if localized is not None:
            localized.open(session)

    def resume(self, otherwise: Callable[[], object] | None = None) -> None:
        """Resumes from the newest good checkpoint, or begins a new run, and says which.

        Args:
            otherwise: Loads what a new run begins with; None to begin with the model as it is.

        Raises:
            NoCheckpointError, ConfigError: Training cannot resume from the store.
        """
        self.lifecycle.require(Action.RESUME, "resume()")
        options, open_log = self.options, self._open_log
        if options.resume != "never":
            restored = self._resume(
                self.session.tier,
                self._admits,
                open_log=None if open_log is None else lambda *log: (self.gradients or open_log()).along(*log),
                in_part=None if self.localized is None else self.localized.attempt,
                on_read_error=options.on_read_error,
            )
            if restored is not None:
                self._tell(Loaded(restored.planned_unix_secs))
                self._continue(restored)
                return
        if otherwise is not None:
            otherwise()
        if options.state_from is not None:
            self._take_over(options.state_from)
            return
        if options.weights_from is not None:
            self.say.weights(self._host.load_weights(options.weights_from, self.comm))
        elif otherwise is None:
            self.say.new_run(options.resume, self.session.generation)
        self.lifecycle.move(Action.RESUME, "resume()")

    def _take_over(self, path: str) -> None:
        """Begins a new run with the state of another host's run."""
        experts = [layer.experts for layer in self.session.catalog.layers]
        handover, changes = self._host.load_state(path, self.comm, experts)
        self.lifecycle.move(Action.RESUME, "resume()")
        self.resume_loaded(handover.reader, handover.manifest, handover.plain, same_store=False)
        self.say.handed_over(handover)
        self.say.inexact(other_ranks(handover.manifest, self.comm.world_size))
        warn_of_changes(changes, self.comm.rank)

    def resume_by_framework(self) -> None:
        """Notes that the framework itself loads the state with which training begins."""
        self.lifecycle.move(Action.RESUME, "resume()")

    def resume_loaded(
        self, reader: StoreReader, manifest: Manifest, plain: Mapping[str, Any], *, same_store: bool
    ) -> None:
        """Continues from a checkpoint that the user named, and that the framework or the host has loaded.

        Args:
            reader: Of its store.
            manifest: Of the checkpoint.
            plain: This rank's plain state in it.
            same_store: The checkpoint is in this run's own store.
        """
        self._host.advance_counts(missed_steps(self.session.catalog, manifest.step, versions_of(manifest)))
        fault = self.session.resume_from(manifest, same_store=same_store)
        plt, root = self.session.run_ledger.tokens.plt, reader.storage.root
        self.say.resumed(manifest.step, manifest.directory, fault, plt, dirpath=root)
        self.begin_boost(plain, fault, manifest, reader)
        self.restored_step = manifest.step

    def begin_boost(
        self, plain: Mapping[str, Any], fault: FaultRecord, manifest: Manifest, reader: StoreReader | None
    ) -> None:
        """Begins the boost of experts that came back stale, after ``resume_from`` of the session. A collective.

        Args:
            plain: This rank's plain state in the checkpoint.
            fault: The lost tokens that the session booked.
            manifest: Of the checkpoint.
            reader: Of its store; None if storage does not have the checkpoint.
        """
        if self.boost is not None:
            self.boost.begin(plain, fault, self.session.run_ledger, manifest, reader)

    def _admits(self, manifest: Manifest, plain: Mapping[str, Any]) -> None:
        self.session.run_ledger.check(manifest)
        self._host.admits(manifest, plain)

    def _continue(self, restored: Restored) -> None:
        """Restores everything but the tensors, which are loaded already."""
        manifest = restored.manifest
        changes, inexact = self._host.load(restored)
        if restored.replay is None:
            self._host.advance_counts(missed_steps(self.session.catalog, manifest.step, restored.versions))
        self.restored_step, self.restored = manifest.step, restored
        if restored.joined is not None and self.localized is not None:
            self.localized.rejoin(restored.joined)
            self.restored_step = restored.joined.manifest.step
        if restored.replay is not None:
            self.replaying = restored.replay
            changed = "; ".join(map(str, changes))
            self.replaying.resume(restored.plain, self._host.repeated, until=self.restored_step, changed=changed)
            self.lifecycle.move(Action.RESUME_WINDOW, "resume()")
        if restored.joined is not None:
            if restored.replay is None:
                self.lifecycle.move(Action.RESUME, "resume()")
        elif self.replaying is not None:
            self.say.replayed(self.replaying.steps[0], manifest.step, restored.origin)
            self.say.left_behind(manifest.step, restored.left_behind)
        else:
            finished = read_finished(self.storage, self.comm, manifest)
            fault = self.session.resume_from(manifest, **restored.going_on)
            self.lifecycle.move(Action.RESUME, "resume()")
            plt, goes_on, besides = self.session.run_ledger.tokens.plt, True, ""
            if finished is not None:
                goes_on, besides = self._host.continue_finished(manifest, finished, changes, plt)
            if not goes_on:
                self.session.tier.left_slots.remove()  # of a rank that died after the end had been noted
                return
            self.say.resumed(manifest.step, restored.origin, fault, plt, besides)
            if finished is None:
                self.say.left_behind(manifest.step, restored.left_behind)
            reader = None if restored.from_memory else StoreReader(self.storage)
            self.begin_boost(restored.plain, fault, manifest, reader)
        self.say.inexact(inexact)
        warn_of_changes(changes, self.comm.rank)

    def begin(self, *, new: bool, wait: bool = True, over: bool = False) -> None:
        """Begins training. Saves the initial state of a new run first, if the policy has windows.

        Args:
            new: Nothing was restored.
            wait: Wait until the initial state is committed; False if ranks arrive here one after the other.
            over: Nothing is left to train: saves the checkpoint that ``finish`` would, before anything changes weights.
        """
        self.lifecycle.move(Action.BEGIN, "begin_training()")
        if new and self.options.needs.windows:
            self.session.begin_run(self._capture, self._host.step, wait=wait)
            self._undrained = not wait
        self.session.training_begins()
        if self.localized is None and self.session.tier.outlives_process:
            self.session.tier.files.remove_logs()
        if over and self.options.save_last and self.restored is not None and self.restored.is_unsaved:
            self.session.save_complete(self._host.step, self._capture_of(self.restored))
            self.session.before_update(receive=False)
        if self.survivors is not None:
            self.survivors.begin()
        if self.gradients is not None:
            self.gradients.begin()

    # --- every step ---

    def before_update(self, *, receive: bool = True) -> None:
        """Joins the copy under way, before anything changes weights.

        Args:
            receive: As of ``CheckpointSession.before_update``.
        """
        self.lifecycle.require(Action.JOIN, "before_update()")
        update = receive and self.lifecycle.state is State.TRAINING
        with nullcontext() if self.survivors is None else self.survivors.joining(update=update):
            self.session.before_update(receive=receive)
            if self._undrained:
                self.session.wait(self._host.step)
                self._undrained = False

    def release_gradients(self) -> None:
        """Waits until the copy under way, if any, has read the gradients, which are about to be overwritten."""
        if self.session.is_open:
            self.session.before_update(receive=False, of_gradients=True)

    def after_update(self, tokens: Deferred[StepTokens], *, updated: Updated = True) -> StepRecord:
        """Books the tokens of the newest step, which is final, and begins a checkpoint; or continues the replay.

        Args:
            tokens: As of ``CheckpointSession.after_update``.
            updated: Whether weights changed.

        Raises:
            ReplayDivergedError: The replayed step differs from the recorded one.
        """
        self.lifecycle.move(Action.STEP, "after_update()")
        step = self._host.step
        tokens, changed = self._final(tokens, updated=updated)
        if self.restored is not None and self.restored.plain:
            self.restored = replace(self.restored, plain={})
        if self.replaying is not None:
            return self._replayed(self.replaying, step, tokens)
        with nullcontext() if self.survivors is None else self.survivors.booking():
            capture = functools.partial(self._capture, described=True)
            self.last = self.session.after_update(step, tokens, capture, updated=changed)
        return self.last

    def count(self, tokens: Deferred[StepTokens], *, updated: Updated) -> None:
        """Counts the newest step, after whose update training stops, so that ``survive`` can seal it."""
        tokens, changed = self._final(tokens, updated=updated)
        self.session.stops_after(self._host.step, tokens, self._capture, updated=changed)

    def _final(self, tokens: Deferred[StepTokens], *, updated: Updated) -> tuple[Deferred[StepTokens], bool | None]:
        """Returns the tokens of a step that ended, with those still to make up, and none applied without an update; and
        whether weights changed, None if a device has still to tell."""
        if self.boost is not None:
            tokens = self.boost.step_ends(tokens, updated=updated)
        if isinstance(updated, Deferred):
            return tokens.then(lambda routed: routed if updated.result() else routed.left_out()), None
        return tokens if updated else tokens.then(StepTokens.left_out), updated

    def _capture(self, *, described: bool = False) -> Mapping[str, Any]:
        """Returns the plain state: that of ``Host.capture``, with entries of guests."""
        captured = self._host.capture(described=described)
        return captured if self.boost is None else {**self.boost.captured(), **captured}

    def _replayed(self, replaying: StepReplay, step: int, tokens: Deferred[StepTokens]) -> StepRecord:
        """Compares a replayed step; after the last one the session resumes from the window."""
        equal = False
        try:
            replaying.compare(step, self._capture())
            if self.localized is not None:
                self.localized.step_computed()
            equal = True
        finally:
            self.session.tier.left_slots.step_replayed(equal=equal)
            if self.localized is not None and not equal:
                self.localized.diverged()
        local = self.localized if self.is_localized else None
        replaying.count(tokens)
        if replaying.done:
            if local is None and not replaying.routes_alike(self.comm):
                self.say.routed_otherwise(*replaying.steps)
            self.replaying = None
            if self.restored is not None:  # the reader of the window holds memory
                self.restored = replace(self.restored, replay=None)
            self.lifecycle.move(Action.REPLAYED, "replay")
        if local is not None:
            local.step_replayed(tokens, last=replaying.done)
        elif replaying.done and self.restored is not None:
            self.session.resume_from(replaying.manifest, **self.restored.going_on)
        self.last = StepRecord(step, replayed=True, committed_step=replaying.manifest.step)
        self._tell(StepReplayed(self.last, self.session.run_ledger))
        if self.gradients is not None:  # a step that is computed again is not logged
            self.gradients.forget()
        return self.last

    def require_skipped(self, step: int) -> None:
        """Raises ``ReplayDivergedError`` if ``step``, which the loop skips, was computed the first time."""
        if self.replaying is None:
            return
        try:
            self.replaying.skip(step)
        except ReplayDivergedError:
            if self.localized is not None:
                self.localized.diverged()
            raise

    def _capture_of(self, restored: Restored) -> Callable[[], Mapping[str, Any]]:
        """Returns a function that captures the restored plain state, for a run that trains no more.

        The framework's own loops may not have started, and would capture another state.
        """
        plain = restored.plain
        return (lambda: plain) if restored.manifest.world_size == self.comm.world_size else self._capture

    def save(self, *, wait: bool) -> bool:
        """Saves a complete checkpoint of the newest step, whatever the policy, unless there is one.

        Args:
            wait: Wait until it is committed.

        Returns:
            Whether there is one; False in a replay, and right after a replay of some stages only.

        Raises:
            SaveFailedError: It could not be committed, or not in time.
        """
        if self.replaying is not None or (self.is_localized and self.restored_step == self._host.step):
            return False  # ranks that kept that step make no such call
        self.lifecycle.require(Action.SAVE, "save()")
        with nullcontext() if self.survivors is None else self.survivors.booking(ended=False):
            self.session.save_complete(self._host.step, self._capture)
        ended = self.session.drain(self._host.step) if wait else ()
        if ended and not ended[-1].committed:
            raise SaveFailedError(ended[-1].step, (ended[-1].cause or "unknown",))
        return True

    # --- once, at the end ---

    def catch_up(self) -> None:
        """Receives the last agreement of the ranks, when training ended, and completes ``last``."""
        self.lifecycle.require(Action.FINISH, "finish()")
        with nullcontext() if self.survivors is None else self.survivors.booking(ended=False):
            self.last = self.last and self.session.catch_up(self.last)

    def finish(self, *, moved: bool, ended: bool = True, save: bool = True) -> None:
        """Saves a complete last checkpoint after training ended without an error, and waits for it.

        A run that resumed at its last step and did not train further saves that state, too, if storage lacks it: it
        came from memory, which is released at the end; or some experts are older, and no checkpoint records their lost
        tokens.

        Args:
            moved: Steps were done in this process.
            ended: The run may be finished; the host says whether and how.
            save: False if the newest step's state is gone, so that no checkpoint can be made.

        Raises:
            SaveFailedError: The checkpoint could not be committed.
        """
        self.lifecycle.move(Action.FINISH, "finish()")
        if self.survivors is not None:
            self.survivors.enter(Moment.UNKNOWN)
            self.survivors.end()
        window = self.replaying  # then the model holds no complete state of the run
        unsaved = moved or self.is_localized  # no checkpoint holds what ranks reached apart
        capture: Callable[[], Mapping[str, Any]] = self._capture
        if not unsaved and self.restored is not None and self.restored.is_unsaved:
            unsaved, capture = True, self._capture_of(self.restored)
        self._close_guests()
        if window is not None:
            self.say.unfinished(self._host.step, window.steps)
        self.session.finish(
            self._host.step,
            capture,
            save_last=self.options.save_last and save and unsaved and window is None,
            note_end=self._note_end if ended and window is None else None,
        )
        self.last = self.last and self.session.completed(self.last)

    def _note_end(self, newest: str) -> None:
        """Records that the run is finished, if its newest checkpoint is of its last step. On rank 0, lock held."""
        end, parsed = self._host.end(), parse_step_dir(newest)
        if end is not None and parsed is not None and parsed[0] == self._host.step:
            write_finished(self.storage, newest, *end)

    def survive(self, why: BaseException | str) -> None:
        """Seals the newest step in memory that outlives the process, after a failure of training, before ``close``.

        Does nothing without such memory, in the middle of an update, in a replay, or a second time. Never raises.

        Args:
            why: The error, or a text for messages.
        """
        if self.survivors is not None and self.lifecycle.state is State.TRAINING:
            self.survivors.survive(why if isinstance(why, str) else type(why).__name__)

    def note(self, moment: Moment) -> None:
        """Sets the moment of the iteration, if the adapter knows more than ``before_update`` and ``after_update``."""
        if self.survivors is not None and self.lifecycle.state is State.TRAINING:
            self.survivors.enter(moment)

    def close(self, timeout_secs: float | None = None) -> None:
        """Releases threads and lock. Safe to call twice, and after ``finish``."""
        fails = self.lifecycle.state is State.TRAINING
        self.lifecycle.move(Action.CLOSE, "close()")
        if self.lifecycle.state is State.NEW:
            return
        if self.survivors is not None:
            self.survivors.end()
        self._close_guests()
        self.last = self.last and self.session.completed(self.last)  # with failures up to the end of training
        committed = self.session.close(timeout_secs)
        if fails and self.survivors is None:  # they have said what they saved
            self.say.stopped(self._host.step, committed)

    def _close_guests(self) -> None:
        """Removes the hooks of guests. Safe to call twice."""
        for guest in (self.boost, self.gradients):
            if guest is not None:
                guest.close()


def close_guarded(
    guard: Callable[[], AbstractContextManager[Any]],
    close: Callable[[float, BaseException], object],
    error: BaseException,
) -> None:
    """Closes a checkpoint after a failure, while the monitor of an in-process restart may interrupt this thread.

    The monitor may be faster than the guard. It interrupts only once within its soft_timeout, so a second attempt
    succeeds.

    Args:
        guard: Keeps the monitor from interrupting a block.
        close: Of the checkpoint.
        error: The one that ended training.
    """
    try:
        with guard():
            close(CLOSE_SECS, error)
    except BaseException:
        close(CLOSE_SECS, error)
        raise
