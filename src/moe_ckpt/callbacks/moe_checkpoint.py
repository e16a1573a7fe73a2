"""The Lightning callback: finds the experts, drives the session at the right hooks, restores.

Which hook does what, and why there:

    on_fit_start             open the store; load the newest good step, unless ckpt_path says otherwise
    on_train_start           put the samplers where they stood, then restore the RNG: the loader's iterator, which
                             draws from it, exists by now
    on_before_optimizer_step join the copy: the first moment after which parameters may change
    on_train_batch_end       of the module, when it and all callbacks are through: the step is final, book its
                             tokens and start the next copy; join at once if an epoch or validation hook is next;
                             end training if the policy asks for it
    on_train_epoch_end, on_validation_start, on_train_end
                             of a callback in front of all others: join, for they may put other weights in
    on_validation_end        put the RNG back where the last batch left it, so that training draws the same
                             numbers whether or not a validation came between (``isolate_validation``)
    on_train_end             leave a complete last checkpoint
    on_exception, teardown   let go of threads and lock, whatever happened

While a sparse window is brought back, training computes its steps again and nothing is saved; see ``windows``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from moe_ckpt.callbacks.checkpoint_io import RESUME_KEY, MoECheckpointIO
from moe_ckpt.callbacks.data_position import DataPosition
from moe_ckpt.callbacks.fine_tuning import begin_with_weights
from moe_ckpt.callbacks.finished import note_end
from moe_ckpt.callbacks.front import InFront
from moe_ckpt.callbacks.hyperparameters import changes, configured
from moe_ckpt.callbacks.lightning_state import capture_checkpoint, restore_checkpoint, validation_due
from moe_ckpt.callbacks.replaying import Replaying
from moe_ckpt.callbacks.resuming import (
    admission,
    adopt_given,
    adopt_restored,
    is_same_place,
    say_changes,
    say_new,
    say_replayed,
    say_resumed,
)
from moe_ckpt.callbacks.session import make_session
from moe_ckpt.callbacks.sharded_loading import load_steps_into_shards
from moe_ckpt.callbacks.step_log import StepLog
from moe_ckpt.callbacks.stopping import may_stop, refusal, will_stop
from moe_ckpt.callbacks.support import inexact, sharding_of
from moe_ckpt.callbacks.update_watch import UpdateWatch
from moe_ckpt.callbacks.windows import Windows
from moe_ckpt.engine.comm import make_communicator
from moe_ckpt.engine.options import OptionValues, make_options
from moe_ckpt.engine.record import StepRecord
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.discover import build_catalog, find_moe_layers
from moe_ckpt.modeling.rng import capture_rng, restore_rng
from moe_ckpt.modeling.routing import RoutingCounter
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.policies.base import Policy, uses_gate_weights, uses_windows
from moe_ckpt.ports import Communicator
from moe_ckpt.recovery.handing_back import handing_back
from moe_ckpt.recovery.reader import open_step
from moe_ckpt.recovery.resume import Restored, resume_newest
from moe_ckpt.storage import open_storage

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("moe_ckpt")


class MoECheckpoint(Checkpoint):
    """Checkpoint a Mixture-of-Experts model while it trains, and go on by itself after a failure.

    ``Trainer(callbacks=[MoECheckpoint(policy=MoC(k=1), dirpath="checkpoints")])`` is all that is needed.

    policy: what is saved when; see ``moe_ckpt.policies``. None: ``MoC(k=1)``.
    dirpath: the store, a directory that all ranks see, or an fsspec URL. One run per store.
    options: see ``moe_ckpt.engine.options.Options``, which checks them. ``resume`` matters only where
        ``fit(ckpt_path=...)`` is not given.

    isolate_validation: True: training draws the same random numbers whether, when and how often it validates, so that a
        resume is exact whatever validation draws; but from the first validation on they are not those of a run without
        this callback. False: they are, and a resume is exact as long as a validation draws the same in any process
        (persistent workers do not, nor does one that comes by the clock: these are warned of).

    After each step ``last`` tells what that step cost, and every ``log_every_n_steps`` the same goes to the
    trainer's loggers as ``moe_ckpt/...``. ``metrics`` holds the same and more for this process as torchmetrics
    (see ``moe_ckpt.metrics``): ``metrics.compute()``, ``metrics["expert_ages"].plot()``.

    It does not monitor metrics: put an ordinary ``ModelCheckpoint`` beside it to keep the best model.
    """

    # Loggers and users read these from any checkpoint callback; there is no "best" model here.
    every_n_train_steps = 1
    save_top_k = -1
    best_model_path = ""
    best_model_score: torch.Tensor | None = None
    current_score: torch.Tensor | None = None
    kth_best_model_path = ""

    def __init__(
        self,
        policy: Policy | None = None,
        dirpath: str | os.PathLike[str] = "checkpoints",
        *,
        isolate_validation: bool = True,
        **options: Unpack[OptionValues],
    ) -> None:
        super().__init__()
        self.options = make_options("MoECheckpoint", policy, dirpath, options, ("isolate_validation",))
        if not isinstance(isolate_validation, bool):
            raise ConfigError(f"MoECheckpoint(isolate_validation={isolate_validation!r}): choose True or False")
        self.isolate_validation = isolate_validation
        self.best_k_models: dict[str, torch.Tensor] = {}
        self.last: StepRecord | None = None
        self.restored_step: int | None = None
        self._data = DataPosition()
        self._front = InFront(self._join, self._in_front_of_batch_end)
        self._windows: Windows | None = None
        self._session: CheckpointSession | None = None
        self._configured: Mapping[str, Any] = {}
        self._counter: RoutingCounter | None = None
        self._state: TorchTrainingState | None = None
        self._watch: UpdateWatch | None = None
        self._step_log = StepLog()
        self._saved_updates = 0
        self._seen_global_step = 0
        self._rng: Mapping[str, Any] | None = None
        self._rng_to_restore: Mapping[str, Any] | None = None
        self._resumed_from: Mapping[str, Any] | None = None
        self._books: Mapping[str, Any] | None = None
        self._kept: tuple[int, Mapping[str, Any]] | None = None

    @property
    def state_key(self) -> str:
        return "moe_ckpt.MoECheckpoint"

    @property
    def policy(self) -> Policy:
        """The policy, within its guard if there is one."""
        return self.options.policy

    @property
    def dirpath(self) -> str:
        """Directory or URL of the store."""
        return self.options.dirpath

    @property
    def metrics(self) -> Any:
        """A torchmetrics ``MetricCollection`` of ``moe_ckpt.metrics``, updated at each step; a new one in each fit.

        It is this rank's own: ``compute`` asks no other rank. Bytes and stalls are those of this rank in this
        process, tokens those of all ranks and the whole run.
        """
        return self._step_log.metrics

    @property
    def last_model_path(self) -> str:
        """Directory of the newest committed step that this process knows of, or ""."""
        step = None if self._session is None else self._session.committed_directory
        return "" if step is None else os.path.join(self.dirpath, step)

    # --- before training ---

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot work, and teach the trainer to open step directories."""
        sharding = sharding_of(trainer.strategy)
        # Behind the others: Lightning takes the first checkpoint callback for the one that knows the best model.
        # A new list, because Lightning is walking over the old one.
        others = [callback for callback in trainer.callbacks if callback is not self and callback is not self._front]
        trainer.callbacks = [self._front, *others, self]
        if sharding == "dtensor":
            load_steps_into_shards(trainer, trainer.strategy)
            return
        if not isinstance(trainer.strategy.checkpoint_io, MoECheckpointIO):
            trainer.strategy.checkpoint_io = MoECheckpointIO(trainer.strategy.checkpoint_io)
        trainer.strategy.checkpoint_io.fitting = lambda: trainer.state.fn == TrainerFn.FITTING

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        previous, self._session = self._session, None
        self._saved_updates = 0
        self._rng = self._rng_to_restore = self._kept = self._windows = None
        if trainer.fast_dev_run:
            return  # like Lightning's own checkpoint callbacks: a dry run leaves nothing behind
        layers = find_moe_layers(pl_module)
        catalog = build_catalog(pl_module, layers)
        self.policy.check(catalog)
        self._counter = RoutingCounter(pl_module, layers, soft=uses_gate_weights(self.policy))
        self._state = TorchTrainingState(pl_module, trainer.optimizers)
        self._configured = configured(trainer)
        storage = open_storage(self.dirpath, self.options.on_phase, access=self.options.access)
        comm = make_communicator(self.options.timeout_secs)
        session = make_session(trainer, pl_module, self.options, storage, comm, catalog, self._state)
        session.open()
        self._session = session
        self._windows = Windows(trainer, pl_module, catalog) if uses_windows(self.policy) else None
        self._step_log = StepLog([layer.experts for layer in catalog.layers], self._step_log.k)
        self._watch = UpdateWatch(trainer, pl_module, self._join, lambda: self._after_batch(trainer))
        if previous is not None and previous.committed_step == trainer.global_step > 0:
            # The same trainer fits on: its state is of the newest checkpoint's step, with no expert older than that,
            # and its loops must not be set back.
            manifest = open_step(os.path.join(self.dirpath, str(previous.committed_directory)))[1]
            session.adopt(manifest, held=previous.books.tokens.applied)
        elif trainer.ckpt_path is not None:
            if session.generation and comm.rank == 0 and not is_same_place(trainer.ckpt_path, self.dirpath):
                log.warning(
                    "ckpt_path=%s is loaded as asked, although %s holds checkpoints that automatic resume would take; "
                    "a restarted job should not give ckpt_path",
                    trainer.ckpt_path,
                    self.dirpath,
                )
            if self.options.weights_from is not None and comm.rank == 0:
                log.warning("ckpt_path=%s is loaded, and weights_from= is not", trainer.ckpt_path)
        else:
            look = self.options.resume != "never"
            admits = admission(trainer, session, comm.rank)
            tier, reading = session.host_tier, self.options.reading
            restored = resume_newest(storage, comm, self._state, tier, admits, **reading) if look else None
            if restored is not None:
                self._go_on(trainer, session, restored, comm)
            elif self.options.weights_from is not None:
                begin_with_weights(self.options.weights_from, pl_module, self._state, comm)
            else:
                say_new(self.dirpath, self.options.resume, session.generation, comm.rank)

    def _go_on(self, trainer: Any, session: CheckpointSession, restored: Restored, comm: Communicator) -> None:
        """The tensors are back in place; now everything else."""
        found = changes(trainer, restored.plain, self._configured)
        self._configured = restored.plain.get("configured", self._configured)
        with handing_back("the model and its optimizers", restored.path):
            self._require_state().load_plain(restored.plain["plain"])
        restore_checkpoint(trainer, restored.plain["checkpoint"], restored.path)
        self._resumed_from = self._books = None
        self._take_rng(restored.plain["rng"])
        if restored.replay is not None:
            self._windows = self._windows or Windows(trainer, trainer.lightning_module, session.catalog)
            self._windows.replaying = Replaying(restored.replay)
            first, self.restored_step = self._windows.replaying.steps
            say_replayed((first, self.restored_step), restored.manifest, self.dirpath, comm.rank)
            say_changes(found, comm.rank)
            return
        self.restored_step = restored.manifest.step
        adopt_restored(trainer, session, comm, self.options, restored, found)

    def _take_rng(self, rng: Mapping[str, Any]) -> None:
        self._rng = self._rng_to_restore = rng

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is None:  # fast_dev_run
            return
        session = self._session
        if self._resumed_from is not None:
            self.restored_step = adopt_given(session, self._resumed_from, self.dirpath, trainer)
            self._take_rng(self._resumed_from["rng"])
        elif self._books is not None:
            session.continue_books(self._books["tokens"], self._books["index"])
        self._resumed_from = self._books = None
        self._seen_global_step = trainer.global_step
        if self._windows is not None:
            self._windows.check(type(self.policy).__name__, self.isolate_validation)
        for reason in inexact(trainer, self.isolate_validation) if trainer.is_global_zero else ():
            log.warning("a resume in the middle of an epoch will not be exact: %s", reason)
        self._data.put_back(trainer, resumed=self._rng_to_restore is not None)
        if self._rng_to_restore is not None:
            restore_rng(self._rng_to_restore)
            self._rng_to_restore = None
        if self._windows is not None:
            self._windows.begin_replay((self, self._front))
        if trainer.global_step == 0 and self.restored_step is None and uses_windows(self.policy):
            self._rng = capture_rng()
            session.begin_run(lambda: self._capture(trainer))
        session.training_begins()

    # --- every step ---

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._join()
        if self._windows is not None:
            self._windows.before_update()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._windows is not None:
            self._windows.batch_begins()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self._windows is not None and self._watch is not None and self._watch.updates != self._saved_updates:
            self._windows.refuse_backward(type(self.policy).__name__)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._windows is not None:
            self._windows.gradients_done()

    def _join(self) -> None:
        if self._session is not None and self._session.is_open:  # not when evaluating after a fit
            self._session.before_update()

    def _in_front_of_batch_end(self, trainer: pl.Trainer) -> None:
        replaying = None if self._windows is None else self._windows.replaying
        if replaying is not None and self._watch is not None and self._watch.updates != self._saved_updates:
            replaying.in_front(trainer.global_step)

    def _after_replayed(self, trainer: pl.Trainer, windows: Windows, replaying: Replaying) -> None:
        """A step of the window was computed again; with its last one, the run goes on from there."""
        self._require_counter().discard()
        replaying.behind(trainer.global_step, self._capture(trainer))
        session = self._require_session()
        if replaying.done:
            windows.replaying = None
            if not uses_windows(self.policy):
                windows.close()
                self._windows = None
            fault = session.adopt(replaying.manifest)
            say_resumed(session, fault, replaying.manifest, self.dirpath, trainer.global_rank)
        windows.step_ends(session)
        self.last = StepRecord(trainer.global_step, replayed=True, committed_step=replaying.manifest.step)
        self._step_log.note(trainer, self.last, session.books)

    def _after_batch(self, trainer: pl.Trainer) -> None:
        began = time.perf_counter()
        session, counter = self._require_session(), self._require_counter()
        self._rng = capture_rng()
        last_for_now = trainer.is_last_batch or validation_due(trainer)
        if last_for_now:
            session.before_update()  # what follows may swap or average weights
        stepped, self._seen_global_step = trainer.global_step != self._seen_global_step, trainer.global_step
        updates = 0 if self._watch is None else self._watch.updates
        if updates == self._saved_updates:
            if stepped:
                counter.discard()
            return
        if not stepped:
            raise ConfigError(
                "an optimizer stepped, but trainer.global_step did not: in manual optimization call step() on what "
                "self.optimizers() returns (use_pl_optimizer=True), or steps cannot be told apart"
            )
        if (windows := self._windows) is not None:
            windows.check_updates(type(self.policy).__name__, updates - self._saved_updates)
        self._saved_updates = updates
        if windows is not None and windows.replaying is not None:
            self._after_replayed(trainer, windows, windows.replaying)
            if windows.replaying is None:
                self._leave_last(trainer, session, last_for_now)
            return
        soft = counter.take_soft()
        counts = counter.take().numpy()
        session.add_stall(time.perf_counter() - began)
        self.last = session.after_update(
            trainer.global_step, counts, lambda: self._capture(trainer), None if soft is None else soft.numpy()
        )
        if windows is not None:
            windows.step_ends(session)
        self._step_log.note(trainer, self.last, session.books)
        if self.last.halt is not None:
            last_for_now = trainer.should_stop = True
        self._leave_last(trainer, session, last_for_now)
        if self.last.halt is not None:
            self._halt(trainer, session, self.last.halt)

    def _leave_last(self, trainer: pl.Trainer, session: CheckpointSession, last_for_now: bool) -> None:
        """Save the state of this batch if training ends with it, and keep what is needed if it may."""
        if self.options.save_last and will_stop(trainer):
            # on_train_end comes too late: Lightning has counted the epoch as done by then, and averaging
            # callbacks may have put other weights in.
            session.save_complete(trainer.global_step, lambda: self._capture(trainer))
        if last_for_now:
            session.before_update()
            if self.options.save_last and not will_stop(trainer):  # what follows may yet decide to
                self._kept = (trainer.global_step, deepcopy(self._capture(trainer)))

    def _halt(self, trainer: pl.Trainer, session: CheckpointSession, reason: str) -> None:
        """The policy asked for the end, and ``trainer.should_stop`` is set; alike on every rank."""
        if trainer.is_global_zero:
            log.warning("training ends at step %d, because the policy asks for it: %s", trainer.global_step, reason)
        if not may_stop(trainer):
            session.finish(trainer.global_step, lambda: self._capture(trainer), save_last=self.options.save_last)
            raise ConfigError(refusal(trainer, reason))

    def _capture(self, trainer: pl.Trainer) -> dict[str, Any]:
        recorded = {} if self._windows is None else {"replay": self._windows.recorded()}
        return recorded | {
            "framework": "lightning",
            "checkpoint": capture_checkpoint(trainer),
            "plain": self._require_state().plain(),
            "rng": self._rng,
            "configured": self._configured,
        }

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self.isolate_validation and fitting and self._rng is not None:
            restore_rng(self._rng)

    # --- the end ---

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is None:  # fast_dev_run
            return
        step, kept = self._kept or (None, {})
        unfinished = self._windows is not None and self._windows.say_unfinished()  # no state that ever was
        self._session.finish(
            trainer.global_step,
            lambda: kept if step == trainer.global_step else self._capture(trainer),
            save_last=self.options.save_last and self._saved_updates > 0 and not unfinished,
        )
        if trainer.is_global_zero and not unfinished:
            storage = open_storage(self.dirpath, access=self.options.access)
            note_end(trainer, storage, self._session.committed_directory, self.state_key)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._rng_to_restore is not None:  # nothing was left to train, so on_train_start did not come
            restore_rng(self._rng_to_restore)
            self._rng_to_restore = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close(grace_secs=min(10.0, self.options.timeout_secs))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close(grace_secs=None)

    def _close(self, grace_secs: float | None) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        windows, self._windows = self._windows, None
        if windows is not None:
            windows.close()
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.close()
        if self._session is not None:
            self._session.close(grace_secs)

    # --- state inside other checkpoints (ModelCheckpoint beside us) ---

    def state_dict(self) -> dict[str, Any]:
        """Token counts and K only: small, so that any checkpoint can carry them."""
        if self._session is None:
            return {}
        books, k = self._session.books, self._step_log.k
        return {"tokens": books.tokens.to_dict(), "index": books.index} | ({} if k is None else {"k": k})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._books = state_dict
        self._step_log.k = state_dict.get("k")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._data.save(trainer, checkpoint)
        if self._windows is not None:
            self._windows.leave_out_of(checkpoint)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._data.load(checkpoint)
        self._resumed_from = checkpoint.pop(RESUME_KEY, None)

    # --- parts ---

    def _require_session(self) -> CheckpointSession:
        if self._session is None:
            raise ConfigError("MoECheckpoint: training started without on_fit_start; do not call its hooks by hand")
        return self._session

    def _require_counter(self) -> RoutingCounter:
        if self._counter is None:
            raise ConfigError("MoECheckpoint: training goes on after it ended; do not call its hooks by hand")
        return self._counter

    def _require_state(self) -> TorchTrainingState:
        if self._state is None:
            raise ConfigError("MoECheckpoint: training started without on_fit_start; do not call its hooks by hand")
        return self._state
