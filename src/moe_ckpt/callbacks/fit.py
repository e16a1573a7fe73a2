"""One ``Trainer.fit``: its driver, its token counter, and the work of each Lightning hook, in order."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl

from moe_ckpt.callbacks.compat import NAMES
from moe_ckpt.callbacks.data_position import DataPosition, LoaderWatch
from moe_ckpt.callbacks.host import LightningHost, take_averages, will_stop
from moe_ckpt.callbacks.lightning_state import restore_finetuning, validation_due
from moe_ckpt.callbacks.loop_position import (
    end_complete_epoch,
    reset_validation_flag,
    restore_accumulation,
    update_plateaus,
)
from moe_ckpt.callbacks.step_log import StepLog
from moe_ckpt.callbacks.support import (
    boost_refusal,
    buckets_of,
    reasons_for_inexact_resume,
    require_restartable,
    warn_of_partial_means,
    warn_of_timers,
)
from moe_ckpt.callbacks.update_watch import UpdateWatch
from moe_ckpt.driver.host import GradientLogging
from moe_ckpt.driver.run import CLOSE_SECS, Driver
from moe_ckpt.driver.states import Action, State
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


class Fit(pl.Callback):
    """One fit, from ``on_fit_start`` until ``teardown``. The constructor opens the store.

    It is the first callback of the trainer. ``MoECheckpoint`` is the last one, but averaging callbacks replace weights
    at the end of an epoch, around a validation and when training ends, through ``.data``, which no version counter
    notices, so a copy under way is joined before the first of them. During a replay no callback may read weights before
    those of the window are loaded.

    Args:
        trainer: Of the fit.
        module: The model.
        options: The user's.
        k: Experts per layer that the run saved before; None if unknown.

    Attributes:
        stopwatch: Counts how long checkpointing keeps the training thread.
        loaders: Watches the training loaders, which are not made yet.
    """

    def __init__(self, trainer: Any, module: pl.LightningModule, options: Options, k: int | None) -> None:
        self.stopwatch = Stopwatch()
        self.host = LightningHost(trainer, module, options)
        self.host.count_update = self._count_update
        self.driver = Driver(self.host, options, _ADVICE, self.stopwatch)
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
        self._epoch_is_whole = False
        self._watch = UpdateWatch(self)
        self.loaders = LoaderWatch(trainer.fit_loop, self._source, self.stopwatch)

    def _source(self) -> str:
        """Returns the file of the state that this rank resumed from, or what Lightning loaded."""
        return str(self.host.trainer.ckpt_path) if self.driver.restored is None else self.driver.restored.path

    def _open_log(self) -> GradientLogging:
        from moe_ckpt.gradient_log.recording import fit_log

        return fit_log(self.host.trainer, self.host.module, self.driver)

    def _watch_windows(self) -> None:
        from moe_ckpt.windows.lightning import Windows

        self.host.windows = Windows(self.host.trainer, self.host.module, self._policy, self.stopwatch)

    # --- before training ---

    def resume(self, previous: Fit | None) -> None:
        """Resumes from the checkpoint that ``ckpt_path`` names, from the newest one, or starts a new run.

        Args:
            previous: The callback's previous fit; None if there was none. If it has trained, and the same trainer fits
                again, memory already holds the state of the newest checkpoint, with no stale expert, and Lightning's
                loops must not be set back. If it only found that nothing was left to train, Lightning has made new
                optimizers for this fit, which get their state from the checkpoint.
        """
        driver, host = self.driver, self.host
        before = host.step
        if previous is not None:
            driver.last = previous.driver.last
        if previous is not None and previous.trained_up_to(host.step):
            driver.resume_by_framework()
            newest, applied = previous.session.committed_directory, previous.session.run_ledger.tokens.applied
            manifest = open_step(os.path.join(driver.options.dirpath, str(newest)))[1]
            fault = driver.session.resume_from(manifest, tokens_from_host=applied)
            boost = previous.driver.boost
            driver.begin_boost({} if boost is None else boost.captured(), fault, manifest, None)
        elif (named := path_to_load(host.trainer)) is not None:
            driver.resume_by_framework()
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
    ) -> None:
        """Begins training.

        Args:
            loaded: The ``RESUME_KEY`` entry of the step that Lightning loaded; None if it loaded no step of a store.
            run_ledger: State of ``MoECheckpoint`` in another callback's checkpoint that was loaded; None if none was.
            data: Data positions of the checkpoint.
            bucket_order: Of DDP's buckets, as the checkpoint has it.
        """
        driver, host = self.driver, self.host
        if loaded is not None:
            reader, manifest = open_step(f"{loaded['root']}/{loaded['directory']}")
            driver.say.inexact(other_ranks(manifest, host.trainer.world_size))
            same_store = _is_same_place(reader.storage.root, driver.options.dirpath)
            driver.resume_loaded(reader, manifest, loaded, same_store=same_store)
            host.generators.schedule(loaded["rng"])
            host.state.freeze(loaded["frozen"])
            restore_finetuning(host.trainer)
        elif run_ledger is not None:
            self.session.continue_ledger(run_ledger["tokens"], run_ledger["index"])
        elif driver.restored is not None and driver.restored.plain:
            # The module's own on_fit_start ran after the restore, and may have frozen what training had thawed.
            host.state.freeze(driver.restored.plain["plain"]["frozen"])
        self._watch.begin(host.step)
        if host.windows is not None:
            host.windows.check(driver.replaying, self.buckets)
        reasons = reasons_for_inexact_resume(host.trainer, self.buckets) if host.trainer.is_global_zero else ()
        for reason in reasons:
            log.warning("a resume in the middle of an epoch will not be exact: %s", reason)
        if host.step > 0:
            self.buckets.recorded = bucket_order
            self.buckets.arrange()
        if driver.restored_step is not None:
            warn_of_timers(host.trainer)
            reset_validation_flag(host.trainer)
            restore_accumulation(host.trainer)
        data.restore(host.trainer, self.loaders, resumed=host.generators.due)
        if driver.restored_step is not None:
            end_complete_epoch(host.trainer)
        host.generators.restore_scheduled()
        new = host.step == 0 and driver.restored_step is None
        if new:
            require_restartable(host.trainer)
            host.generators.record()
        driver.begin(new=new, over=driver.restored_step is not None and will_stop(host.trainer))

    def trained_up_to(self, step: int) -> bool:
        """Returns whether this fit made updates, and the newest committed checkpoint is of the last one, ``step``."""
        return self._watch.moved and self.session.run_ledger.committed_step == step > 0

    # --- every step ---

    def is_searching(self) -> bool:
        """Returns whether a learning rate or batch size finder runs batches that are not part of the run.

        Finders remove all callbacks meanwhile, and restore the trainer's state afterwards.
        """
        return self not in self.host.trainer.callbacks and self.driver.lifecycle.is_training

    @timed
    def join(self, *, update: bool) -> None:
        """Joins the copy before parameters change. Does nothing in an evaluation after a fit.

        Args:
            update: An optimizer is about to change them, so the ranks' agreement is received as well.
        """
        if self.driver.lifecycle.allows(Action.JOIN):
            self.driver.before_update(receive=update)

    @timed
    def before_update(self) -> None:
        """Joins the copy when gradients are final, before clipping, or at the update itself if Lightning tells of none.

        Raises:
            ConfigError: A finder makes the update during training, and the policy computes steps again after a failure.
        """
        searching = self.is_searching()
        if searching and self.driver.options.needs.windows:
            # Lightning tells no callback of this exception.
            self.close(min(CLOSE_SECS, self.driver.options.timeout_secs))
            raise ConfigError(
                f"{self._policy} and a learning rate or batch size finder in the middle of training contradict each "
                "other: after a failure steps are computed again, and a search between them cannot be. Search before "
                "training (with Tuner, or a finder that runs in on_fit_start), or use Dense or MoC"
            )
        self.join(update=not searching)
        self._counter.update_begins()
        if self.host.windows is not None:
            self.host.windows.before_update(self.session)

    def on_train_epoch_start(self, *_: Any) -> None:
        self._epoch_is_whole = True  # Lightning calls this in no epoch that is resumed in its middle
        self.on_train_batch_start()

    def on_train_batch_start(self, *_: Any) -> None:
        if self.host.windows is not None:
            self.host.windows.hooks_begin()

    @timed
    def on_before_backward(self, *_: Any) -> None:
        """Refuses a backward pass after an update of the same batch, if the policy has windows."""
        if self.host.windows is not None and self._watch.updates:
            self.host.windows.refuse_backward()

    @timed
    def on_train_batch_end(self, *_: Any) -> None:
        """Loads replayed weights, before any callback may read them."""
        self.host.passes.in_batch = False
        self._watch.hooks_began = True
        if self.driver.replaying is not None and self._watch.updates:
            self.driver.replaying.put_back(self.host.step)

    def on_validation_start(self, *_: Any) -> None:
        self.join(update=False)

    def on_train_epoch_end(self, *_: Any) -> None:
        self.join(update=False)
        if self.driver.restored_step is not None:
            update_plateaus(self.host.trainer)
            if not self._epoch_is_whole:
                warn_of_partial_means(self.host.trainer)
        self._epoch_is_whole = False

    @timed
    def after_batch(self) -> None:
        """Books the step of a batch, if any. Called after every batch-end hook, when the step is final."""
        if self.is_searching():
            self._watch.forget()
            self._discard_tokens()
            if self.driver.gradients is not None:
                self.driver.gradients.forget()
            return
        driver, trainer, windows = self.driver, self.host.trainer, self.host.windows
        self.host.generators.record()
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
        """Counts the update of a batch in which training stops before ``after_batch`` (``Host.count_update``)."""
        self._watch.require_whole(sys.exc_info()[1])  # that Lightning is handling
        self.host.generators.record()
        batch = self._watch.book(self.host.step)
        self.driver.count(self._counter.take(), updated=batch.applied)
        return True

    def _discard_tokens(self) -> None:
        """Discards the tokens routed since the last step, which led to no update."""
        self._counter.discard()
        if self.driver.boost is not None:
            self.driver.boost.discard()

    def _leave_last(self, last_for_now: bool) -> None:
        """Saves the newest step if training ends with this batch; keeps its plain state if training may end.

        The plain state is also kept if the next batch may make no step and be the last one: then buffers, random
        numbers and the position in the data have moved on, and accumulated gradients are in no checkpoint.
        """
        driver, host, last = self.driver, self.host, will_stop(self.host.trainer)
        if driver.options.save_last and last and self.host.has_newest_state:
            # on_train_end is too late: by then Lightning has counted the epoch as done, and averaging callbacks may
            # have replaced the weights.
            driver.save(wait=False)
        if last_for_now:
            driver.before_update(receive=False)
        may_end = last_for_now or self._watch.steps_seldom or host.trainer.accumulate_grad_batches > 1
        if driver.options.save_last and not last and self.host.settled and may_end:
            host.keep()

    # --- the end ---

    def on_train_end(self, *_: Any) -> None:
        self.join(update=False)
        self.driver.catch_up()  # other callbacks may read the last step's record

    def finish(self) -> None:
        """Saves the last checkpoint, after all other callbacks' ``on_train_end``."""
        driver, save = self.driver, self.host.has_newest_state
        driver.finish(moved=self._watch.moved, save=save)
        self.host.ended = True
        if not save and driver.options.save_last:
            driver.say.unsaved(self.host.step, self.session.run_ledger.committed_step)

    def on_fit_end(self, *_: Any) -> None:
        """Ends the run after a fit in which nothing was left to train: Lightning then calls no hook of training."""
        self.host.generators.restore_scheduled()
        driver = self.driver
        if driver.lifecycle.state is State.WINDOW:
            self.finish()  # says that the window was not computed again
            return
        if driver.lifecycle.state is not State.READY or driver.restored is None:
            return
        if read_finished(driver.storage, driver.comm, driver.restored.manifest) is None:
            self.finish()
            take_averages(self.host.trainer)

    def close(self, grace_secs: float | None) -> None:
        """Releases threads, lock and hooks. Safe to call twice."""
        self.loaders.close()
        self._watch.close()
        self._counter.close()
        self.driver.close(grace_secs)
        windows, self.host.windows = self.host.windows, None
        if windows is not None:
            windows.close()


def path_to_load(trainer: Any) -> str | os.PathLike[str] | None:
    """Returns the path that Lightning loads: the argument of ``fit``, or the file that "last" or "hpc" stands for.

    Called in ``on_fit_start``, when ``trainer.ckpt_path`` may be another path: that of an earlier ``fit``, under a
    strategy with ``restore_checkpoint_after_setup`` (ModelParallelStrategy), or the temporary file of a callback that
    has searched for a learning rate or a batch size. So the argument is read from the frame of ``Trainer._run``, which
    calls every hook of a fit. Without such a frame the property is returned: then the resume is right, but loads the
    newest checkpoint first.
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
