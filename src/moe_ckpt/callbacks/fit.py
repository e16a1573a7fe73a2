"""One ``Trainer.fit``: its driver, its token counter, and what each Lightning hook does, in order."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from moe_ckpt.callbacks.compat import NAMES
from moe_ckpt.callbacks.data_position import DataPosition
from moe_ckpt.callbacks.finished import will_stop
from moe_ckpt.callbacks.host import LightningHost
from moe_ckpt.callbacks.lightning_state import go_on_finetuning, validation_due
from moe_ckpt.callbacks.loop_position import end_whole_epoch, forget_broken_fit, go_on_accumulating
from moe_ckpt.callbacks.step_log import StepLog
from moe_ckpt.callbacks.support import boost_refusal, buckets_of, inexact, require_restartable, warn_of_timers
from moe_ckpt.callbacks.update_watch import UpdateWatch
from moe_ckpt.driver.host import GradientLogging
from moe_ckpt.driver.run import CLOSE_SECS, Driver
from moe_ckpt.driver.states import Action, Moment, State
from moe_ckpt.driver.torch_model import open_torch
from moe_ckpt.errors import ConfigError
from moe_ckpt.reading.reader import open_step
from moe_ckpt.recovery.resume import other_ranks
from moe_ckpt.run.documents import read_finished
from moe_ckpt.run.options import Options
from moe_ckpt.stopwatch import Stopwatch, timed
from moe_ckpt.storage import open_storage

log = logging.getLogger("moe_ckpt")

_WITHOUT_START = "MoECheckpoint: training started without on_train_start; do not call its hooks by hand"
_OVER = "MoECheckpoint: training continues after it ended; do not call its hooks by hand"
_ADVICE = {
    **dict.fromkeys((State.NEW, State.OPEN, State.READY, State.WINDOW), _WITHOUT_START),
    **dict.fromkeys((State.ENDED, State.CLOSED), _OVER),
}


class Fit:
    """One fit, from ``on_fit_start`` until ``teardown``. The constructor opens the store.

    Args:
        trainer: Of the fit.
        module: The model.
        options: The user's.
        k: Experts per layer that the run saved before; None if unknown.
        stopwatch: Counts how long this keeps the training thread.
    """

    def __init__(
        self,
        trainer: Any,
        module: pl.LightningModule,
        options: Options,
        k: int | None,
        stopwatch: Stopwatch,
    ) -> None:
        self.host = LightningHost(trainer, module, options, self._count_update)
        self.driver = Driver(self.host, options, _ADVICE, stopwatch)
        self.stopwatch = stopwatch
        self._policy = type(options.policy).__name__
        self.buckets = buckets_of(trainer)
        self.step_log = StepLog(k, trainer)
        self._counter = open_torch(
            self.driver,
            module,
            self.host.state,
            self.host.passes,
            on_device=trainer.strategy.root_device.type == "cuda",
            no_boost=boost_refusal(trainer.strategy),
            observers=[self.step_log],
            open_log=self._open_log,
            local_ranks=getattr(trainer.strategy, "num_processes", 1),
        )
        self.session = self.driver.session
        if options.needs.windows:
            self._watch_windows()
        self._own_callbacks: Collection[Callback] = ()
        self._watch = UpdateWatch(self)

    def _open_log(self) -> GradientLogging:
        from moe_ckpt.gradient_log.lightning import fit_log

        return fit_log(self.host.trainer, self.host.module, self.driver)

    def _watch_windows(self) -> None:
        from moe_ckpt.windows.lightning import Windows

        host = self.host
        host.windows = Windows(host.trainer, host.module, self._policy, self.stopwatch)

    # --- before training ---

    def resume(self, previous: Fit | None) -> None:
        """Resumes from the checkpoint that ``ckpt_path`` names, from the newest one, or starts a new run.

        Args:
            previous: The callback's previous fit. If it has trained, and its trainer fits on, memory already holds the
                state of the newest checkpoint, with no stale expert, and Lightning's loops must not be set back. If it
                only found that nothing was left to train, this fit is the one that was interrupted: Lightning has made
                optimizers anew for it, which get their state from the checkpoint.
        """
        driver, host = self.driver, self.host
        before = host.step
        if previous is not None:
            driver.last = previous.driver.last
        if previous is not None and previous.trained_up_to(host.step):
            driver.resume_elsewhere()
            newest, applied = previous.session.committed_directory, previous.session.run_ledger.tokens.applied
            manifest = open_step(os.path.join(driver.options.dirpath, str(newest)))[1]
            fault = driver.session.resume_from(manifest, tokens_from_host=applied)
            boost = previous.driver.boost
            driver.begin_boost({} if boost is None else boost.captured(), fault, manifest, None)
        elif (named := given_path(host.trainer)) is not None:
            driver.resume_elsewhere()
            if driver.comm.rank == 0:
                _warn_of_ignored(driver, named)
        else:
            driver.resume()
            ended = previous is not None and previous.host.ended and previous.host.trainer is host.trainer
            if ended and driver.restored_step is not None:
                driver.say.gone_back(driver.restored_step, before)
        if driver.replaying is not None and host.windows is None:
            self._watch_windows()
        if driver.replaying is not None and host.windows is not None:
            host.windows.resumed(driver.replaying)

    def begin(
        self,
        loaded: Mapping[str, Any] | None,
        run_ledger: Mapping[str, Any] | None,
        data: DataPosition,
        bucket_order: str | None,
        ours: Collection[Callback],
    ) -> None:
        """Training begins.

        Args:
            loaded: The ``RESUME_KEY`` entry of the step that Lightning loaded; None if it loaded none of ours.
            run_ledger: State of ``MoECheckpoint`` in a checkpoint of another kind that was loaded.
            data: Data positions of the checkpoint.
            bucket_order: Of DDP's buckets, as the checkpoint has it.
            ours: Callbacks of the adapter.
        """
        driver, host, self._own_callbacks = self.driver, self.host, ours
        if loaded is not None:
            self._resume_from(loaded)
            host.generators.take(loaded["rng"])
            host.state.freeze(loaded["frozen"])
            go_on_finetuning(host.trainer)
        elif run_ledger is not None:
            self.session.continue_ledger(run_ledger["tokens"], run_ledger["index"])
        elif driver.restored is not None and driver.restored.plain:
            # The module's own on_fit_start ran after the restore, and may have frozen what training had thawed.
            host.state.freeze(driver.restored.plain["plain"]["frozen"])
        self._watch.begin(host.step)
        if host.windows is not None:
            host.windows.check(driver.replaying, self.buckets)
        reasons = inexact(host.trainer, self.buckets) if host.trainer.is_global_zero else ()
        for reason in reasons:
            log.warning("a resume in the middle of an epoch will not be exact: %s", reason)
        if self.buckets is not None and host.step > 0:
            self.buckets.arrange(bucket_order)
        if driver.restored_step is not None:
            warn_of_timers(host.trainer)
            forget_broken_fit(host.trainer)
            go_on_accumulating(host.trainer)
        data.put_back(host.trainer, resumed=host.generators.due)
        host.data = data
        if driver.restored_step is not None:
            end_whole_epoch(host.trainer)
        host.generators.put_back()
        if host.windows is not None and driver.replaying is not None:
            driver.replaying.begin()
        new = host.step == 0 and driver.restored_step is None
        if new:
            require_restartable(host.trainer)
            host.generators.note()
        driver.begin(new=new, over=driver.restored_step is not None and will_stop(host.trainer))

    def _resume_from(self, loaded: Mapping[str, Any]) -> None:
        """Continues from the step that Lightning has loaded."""
        driver, trainer = self.driver, self.host.trainer
        reader, manifest = open_step(f"{loaded['root']}/{loaded['directory']}")
        driver.say.inexact(other_ranks(manifest, trainer.world_size))
        same_store = _is_same_place(reader.storage.root, driver.options.dirpath)
        driver.resume_loaded(reader, manifest, loaded, same_store=same_store)

    def trained_up_to(self, step: int) -> bool:
        """Returns whether this fit made updates, and the newest committed checkpoint is of its last, ``step``."""
        return self._watch.moved and self.session.run_ledger.committed_step == step > 0

    # --- every step ---

    def is_searching(self) -> bool:
        """Returns whether a learning rate or batch size finder runs batches that are not part of the run.

        Finders remove all callbacks meanwhile, and restore the trainer's state afterwards.
        """
        removed = not any(callback in self._own_callbacks for callback in self.host.trainer.callbacks)
        return removed and self.driver.lifecycle.is_training

    @timed
    def join(self, *, update: bool) -> None:
        """Joins the copy before parameters change. Does nothing when evaluating after a fit.

        Args:
            update: Parameters change by an optimizer's update, so that the agreement is received as well.
        """
        if self.driver.lifecycle.allows(Action.JOIN):
            self.driver.before_update(receive=update)

    def before_bypassing(self) -> None:
        """Called before an update for which Lightning calls no callback.

        Raises:
            ConfigError: A finder makes it during training, and the policy computes steps again after a failure.
        """
        if self.is_searching() and self.driver.options.needs.windows:
            # Lightning tells no callback of this exception.
            self.close(min(CLOSE_SECS, self.driver.options.timeout_secs))
            raise ConfigError(
                f"{self._policy} and a learning rate or batch size finder in the middle of training contradict each "
                "other: after a failure steps are computed again, and a search between them cannot be. Search before "
                "training (with Tuner, or a finder that runs in on_fit_start), or use Dense or MoC"
            )
        self.join(update=not self.is_searching())
        self._counter.update_begins()

    def updated(self) -> None:
        """An optimizer has stepped."""
        if not self.is_searching():
            self.driver.note(Moment.WRITTEN)

    @timed
    def before_backward(self) -> None:
        """A backward pass begins."""
        if self.host.windows is not None and self._watch.unbooked:
            self.host.windows.refuse_backward()

    @timed
    def before_optimizer(self) -> None:
        """Gradients are final, before clipping."""
        self.join(update=True)
        self._counter.update_begins()
        if self.host.windows is not None:
            self.host.windows.before_update(self.session)

    @timed
    def before_callbacks(self) -> None:
        """A batch ended; runs before any callback that may read weights."""
        self.host.passes.in_batch = False
        self._watch.hooks_began = True
        if self.driver.replaying is not None and self._watch.unbooked:
            self.driver.replaying.put_back(self.host.step)

    @timed
    def after_batch(self) -> None:
        """A batch ended; runs after every batch-end hook, when the step of the batch, if any, is final."""
        if self.is_searching():
            self._watch.forget()
            self._discard_tokens()
            if self.driver.gradients is not None:
                self.driver.gradients.forget()
            return
        driver, trainer, windows = self.driver, self.host.trainer, self.host.windows
        self.host.generators.note()
        if self.buckets is not None:
            self.buckets.note()
        last_for_now = trainer.is_last_batch or validation_due(trainer)
        if last_for_now:
            driver.before_update(receive=False)  # what follows may swap or average weights
        batch = self._watch.book(self.host.step)
        self.host.settled = batch.stepped
        if not batch.updates:
            if batch.stepped:
                self._discard_tokens()
            if driver.replaying is None and self._watch.moved:
                self._leave_last(last_for_now)
            return
        if windows is not None:
            windows.check_updates(batch.updates)
        driver.after_update(self._counter.take(), updated=batch.applied)
        if windows is not None:
            if driver.replaying is None:
                windows.replayed()
            windows.step_ends(self.session)
            if driver.replaying is None and not driver.options.needs.windows:  # the replay is done
                windows.close()
                self.host.windows = None
        if driver.replaying is None:
            self._leave_last(last_for_now)

    def _count_update(self) -> bool:
        """``Host.count_update``: training stops in a batch whose update is made, before ``after_batch``."""
        self._watch.require_whole(sys.exc_info()[1])  # that Lightning is handling
        self.host.generators.note()
        batch = self._watch.book(self.host.step)
        self.driver.count(self._counter.take(), updated=batch.applied)
        return True

    def _discard_tokens(self) -> None:
        """Forgets the tokens routed since the last step: they led to no update."""
        self._counter.discard()
        if self.driver.boost is not None:
            self.driver.boost.discard()

    def _leave_last(self, last_for_now: bool) -> None:
        """Saves the newest step's state if training ends with this batch; keeps its plain state if training may end.

        It is also kept if the next batch may make no step and be the last one: by then buffers, random numbers and the
        position in the data have moved on, and the accumulated gradients are in no checkpoint.
        """
        driver, host, last = self.driver, self.host, will_stop(self.host.trainer)
        if driver.options.save_last and last and self.host.has_newest:
            # on_train_end comes too late: Lightning has counted the epoch as done by then, and averaging
            # callbacks may have put other weights in.
            driver.save(wait=False)
        if last_for_now:
            driver.before_update(receive=False)
        may_end = last_for_now or self._watch.steps_seldom or host.trainer.accumulate_grad_batches > 1
        if driver.options.save_last and not last and self.host.settled and may_end:
            host.keep()

    # --- the end ---

    def finish(self) -> None:
        """Training ended; runs after all other callbacks' ``on_train_end``."""
        driver, save = self.driver, self.host.has_newest
        driver.finish(moved=self._watch.moved, save=save)
        self.host.ended = True
        if not save and driver.options.save_last:
            driver.say.unsaved(self.host.step, self.session.run_ledger.committed_step)

    def end_untrained(self) -> None:
        """The fit ended. If nothing was left to train, Lightning called no hook of training: the run ends here."""
        self.host.generators.put_back()
        driver = self.driver
        if driver.lifecycle.state is State.WINDOW:
            self.finish()  # says that the window was not computed again
            return
        if driver.lifecycle.state is not State.READY or driver.restored is None:
            return
        store = open_storage(driver.options.dirpath, access=driver.options.access)
        if read_finished(store, driver.comm, driver.restored.manifest) is None:
            self.finish()

    def close(self, grace_secs: float | None) -> None:
        """Releases threads, lock and hooks. Safe to call twice."""
        self._watch.close()
        self._counter.close()
        self.driver.close(grace_secs)
        windows, self.host.windows = self.host.windows, None
        if windows is not None:
            windows.close()


def given_path(trainer: Any) -> str | os.PathLike[str] | None:
    """Returns the path that Lightning loads: the argument of ``fit``, or what "last" or "hpc" stand for.

    Called in ``on_fit_start``, when ``trainer.ckpt_path`` may be another one: that of an earlier ``fit``, under a
    strategy with ``restore_checkpoint_after_setup`` (ModelParallelStrategy), or the temporary file to which a callback
    that searches for a learning rate or a batch size has returned. So the argument is read from the frame of
    ``Trainer._run``, which calls every hook of a fit. If no such frame is found, the property is returned: the resume
    is right, but loads the newest checkpoint first.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        if frame.f_code.co_name == NAMES["run"] and names.get("self") is trainer and "ckpt_path" in names:
            return cast("str | os.PathLike[str] | None", names["ckpt_path"])
        frame = frame.f_back
    named: str | os.PathLike[str] | None = trainer.ckpt_path
    return named


def _warn_of_ignored(driver: Driver, named: str | os.PathLike[str]) -> None:
    """Warns of checkpoints and weights that are not loaded because the user gave ``ckpt_path``."""
    dirpath = driver.options.dirpath
    if driver.session.generation and not _is_same_place(named, dirpath):
        log.warning(
            "ckpt_path=%s is loaded, and training goes on from there, although %s holds checkpoints that automatic "
            "resume would load: do not set ckpt_path in a job that restarts",
            named,
            dirpath,
        )
    if driver.options.weights_from is not None:
        log.warning("ckpt_path=%s is loaded, and weights_from= is not", named)


def _is_same_place(path: str | os.PathLike[str], dirpath: str) -> bool:
    """Returns whether ``path``, which need not be a store, is the store ``dirpath``."""
    return os.path.realpath(os.path.expanduser(path)) == os.path.realpath(open_storage(dirpath).root)
