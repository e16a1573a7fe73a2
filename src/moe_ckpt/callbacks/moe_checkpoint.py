"""``MoECheckpoint``, the Lightning callback. What each hook does, and why there:

    on_fit_start             open the store; load the newest good step, unless ckpt_path names another
    on_train_start           restore samplers, then the RNG: the loader's iterator, which draws from it, exists by now
    on_before_optimizer_step join the copy: parameters may change from here on
    on_train_batch_end       of the module, after all callbacks: the step is final. Book its tokens and start the next
                             copy; join at once if an epoch or validation hook is next
    on_train_epoch_end, on_validation_start, on_train_end
                             of a callback in front of all others: join, for other callbacks may change weights
    on_validation_end        restore the RNG as of the last batch, so that training draws the same numbers with and
                             without a validation in between
    on_train_end             save a complete last checkpoint
    on_exception, teardown   release threads and lock

During a replay of a sparse window, training computes its steps again and nothing is saved; see ``windows``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from moe_ckpt.callbacks.checkpoint_io import RESUME_KEY, MoECheckpointIO, load_steps_into_shards
from moe_ckpt.callbacks.data_position import DataPosition
from moe_ckpt.callbacks.fit import Fit
from moe_ckpt.callbacks.loop_position import end_validation
from moe_ckpt.callbacks.step_log import StepLog
from moe_ckpt.callbacks.support import sharding_of
from moe_ckpt.driver.host import SealingSurvivors
from moe_ckpt.driver.run import CLOSE_SECS
from moe_ckpt.driver.states import Moment
from moe_ckpt.errors import ConfigError
from moe_ckpt.interop.whole import TOKENS_MARK
from moe_ckpt.modeling.bucket_order import BUCKETS_KEY
from moe_ckpt.policies.base import Policy
from moe_ckpt.recovery.recovery_plan import RecoveryPlan
from moe_ckpt.run.events import StepRecord
from moe_ckpt.run.options import OptionValues, make_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MoECheckpoint(Checkpoint):
    """Checkpoints a Mixture-of-Experts model while it trains, and resumes automatically after a failure.

    ``Trainer(callbacks=[MoECheckpoint(policy=MoC(k=1), dirpath="checkpoints")])`` is all that is needed. It does not
    monitor metrics: add a ``ModelCheckpoint`` to keep the best model.

    Args:
        policy: Decides what is saved at which step; see ``moe_ckpt.policies``. None: ``CheckFreq()``.
        dirpath: The store, a directory that all ranks see, or an fsspec URL. One run per store.
        **options: See ``moe_ckpt.run.options.Options``, which checks them. ``resume`` matters only where
            ``fit(ckpt_path=...)`` is not given.

    Attributes:
        policy: The policy.
        dirpath: Directory or URL of the store.
        restored_step: Step of the checkpoint that training resumed from; None before, and for a new run.
        recovery_plan: Where each operator of that checkpoint came from on this rank: memory of this node, of others, or
            storage. None for a new run, and where ``fit(ckpt_path=...)`` was given.

    Raises:
        ConfigError: An unknown option, or an impossible value.
    """

    state_key = "moe_ckpt.MoECheckpoint"
    # Loggers read these from any checkpoint callback. There is no "best" model here.
    every_n_train_steps = 1
    save_top_k = -1
    best_model_path = kth_best_model_path = ""
    best_model_score: torch.Tensor | None = None
    current_score: torch.Tensor | None = None

    def __init__(
        self,
        policy: Policy | None = None,
        dirpath: str | os.PathLike[str] = "checkpoints",
        **options: Unpack[OptionValues],
    ) -> None:
        super().__init__()
        self.best_k_models: dict[str, torch.Tensor] = {}
        self.options = make_options("MoECheckpoint", policy, dirpath, options)
        if self.options.memory is not None and self.options.memory.upstream_bytes is not None:
            raise ConfigError(
                "MoECheckpoint(memory=Memory(upstream_bytes=...)): Lightning trains without a pipeline, so no stage "
                "can go back alone. Leave it out"
            )
        self.policy, self.dirpath = self.options.policy, self.options.dirpath
        self.restored_step: int | None = None
        self.recovery_plan: RecoveryPlan | None = None
        self._fit: Fit | None = None
        self._data = DataPosition()
        self._bucket_order: str | None = None
        self._step_log = StepLog()
        self._loaded: Mapping[str, Any] | None = None
        self._saved_ledger: Mapping[str, Any] | None = None

    @property
    def last(self) -> StepRecord | None:
        """The newest step's costs, logged as ``moe_ckpt/...`` every ``log_every_n_steps``; None before the first."""
        return None if self._fit is None else self._fit.driver.last

    @property
    def metrics(self) -> Any:
        """A torchmetrics ``MetricCollection`` of ``moe_ckpt.metrics``, updated at each step; a new one in each fit.

        ``compute`` asks no other rank: bytes and stalls are of this rank in this process, tokens of all ranks and the
        whole run. ``metrics["expert_ages"].plot()`` draws one.
        """
        return self._step_log.metrics

    @property
    def last_model_path(self) -> str:
        """The directory of the newest committed step, or ""."""
        step = None if self._fit is None else self._fit.session.committed_directory
        return "" if step is None else os.path.join(self.dirpath, step)

    @property
    def survivors(self) -> SealingSurvivors | None:
        """Seals the newest step when training stops; None without a fit or memory that outlives the process."""
        return None if self._fit is None else self._fit.driver.survivors

    # --- before training ---

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses unsupported strategies, orders the callbacks, and makes the trainer open step directories."""
        sharding = sharding_of(trainer.strategy)
        # Last, because Lightning asks the first checkpoint callback for the best model. A new list, because Lightning
        # iterates over the old one.
        others = [callback for callback in trainer.callbacks if not isinstance(callback, Fit)]
        trainer.callbacks = [*(callback for callback in others if callback is not self), self]
        if sharding == "dtensor":
            load_steps_into_shards(trainer)
            return
        if not isinstance(trainer.strategy.checkpoint_io, MoECheckpointIO):
            trainer.strategy.checkpoint_io = MoECheckpointIO(trainer.strategy.checkpoint_io)
        trainer.strategy.checkpoint_io.fitting = lambda: trainer.state.fn == TrainerFn.FITTING

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Refuses Fabric, which calls this hook and no other, so that nothing would be saved."""
        raise ConfigError(
            "MoECheckpoint is a callback of Lightning's Trainer, and Fabric calls none of its hooks. Give what "
            "fabric.setup(model, optimizer) returns to moe_ckpt.attach (docs/pytorch.md)"
        )

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        previous, self._fit = self._fit, None
        if trainer.fast_dev_run:
            return  # a dry run leaves nothing behind, as with Lightning's own checkpoint callbacks
        fit = Fit(trainer, pl_module, self.options, self._step_log.k)
        self._fit, self._step_log = fit, fit.step_log
        trainer.callbacks = [fit, *trainer.callbacks]
        fit.resume(previous)
        if fit.driver.restored_step is not None:
            self.restored_step, restored = fit.driver.restored_step, fit.driver.restored
            self.recovery_plan = None if restored is None else restored.plan
            self._loaded = self._saved_ledger = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is None:
            return
        loaded, run_ledger, self._loaded, self._saved_ledger = self._loaded, self._saved_ledger, None, None
        self._fit.begin(loaded, run_ledger, self._data, self._bucket_order)
        if loaded is not None:
            self.restored_step, self.recovery_plan = self._fit.driver.restored_step, None

    # --- every step ---

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._fit is not None:
            self._fit.before_update()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            with self._fit.stopwatch:
                self._fit.driver.note(Moment.RESTING)
                self._fit.host.passes.in_batch = True
                if self._fit.host.windows is not None:
                    self._fit.host.windows.batch_begins()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None and self._fit.host.windows is not None:
            with self._fit.stopwatch:
                self._fit.host.windows.gradients_done()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fitting and self._fit is not None:
            with self._fit.stopwatch:
                self._fit.host.generators.restore_newest()

    # --- the end ---

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None:
            self._fit.finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.close(min(CLOSE_SECS, self.options.timeout_secs), exception)
        if self._fit is not None:
            end_validation(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.close()

    def close(self, timeout_secs: float | None = None, failure: BaseException | str | None = None) -> None:
        """Releases threads, lock and hooks. The Trainer's hooks call it; safe to call again, and before a fit.

        Args:
            timeout_secs: Longest wait for checkpoints under way.
            failure: Why training stops; None if it has ended normally.
        """
        if self._fit is None:
            return
        if failure is not None:
            self._fit.driver.survive(failure)
        self._fit.close(timeout_secs)

    # --- state inside other checkpoints (ModelCheckpoint beside us) ---

    def state_dict(self) -> dict[str, Any]:
        """Returns token counts and K, which are small, for the checkpoints of other callbacks."""
        if self._fit is None:
            return {}
        return self.state_in_own_store() | {"tokens": self._fit.session.run_ledger.tokens.to_dict()}

    def state_in_own_store(self) -> dict[str, Any]:
        """Returns ``state_dict`` without the token counts, which are long and in the manifest anyway."""
        if self._fit is None:
            return {}
        index, k = self._fit.session.run_ledger.index, self._step_log.k
        return {"tokens": TOKENS_MARK, "index": index} | ({} if k is None else {"k": k})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._fit is not None and self._fit.driver.lifecycle.is_training:
            return  # a learning rate finder returns to where it began; tokens and K are already right
        self._saved_ledger = state_dict
        self._step_log.k = state_dict.get("k")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._data.save(trainer, checkpoint)
        fit = self._fit
        if fit is None:
            return
        fit.loaders.save(checkpoint)
        if fit.buckets.recorded is not None:
            self._bucket_order = checkpoint[BUCKETS_KEY] = fit.buckets.recorded
        if fit.host.windows is not None and fit.driver.replaying is not None:
            fit.host.windows.strip_optimizer_state(checkpoint, fit.driver.replaying)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._fit is not None and self._fit.driver.lifecycle.is_training:
            return
        self._data.load(checkpoint)
        self._bucket_order = checkpoint.pop(BUCKETS_KEY, None)
        self._loaded = checkpoint.pop(RESUME_KEY, None)
