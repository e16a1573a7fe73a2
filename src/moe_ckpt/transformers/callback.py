"""The callback of ``transformers.Trainer``, built on the adapter of PyTorch loops."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.plain.checkpoint import PlainCheckpoint
from moe_ckpt.policies.base import Policy
from moe_ckpt.run.options import OptionValues, make_options
from moe_ckpt.transformers.progress import TrainerProgress

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)


class MoECheckpointCallback(TrainerCallback):
    """Checkpoints a ``Trainer``, and resumes it from the newest checkpoint when ``train()`` is called again.

    A restart has the weights, the optimizer, the schedule, the random numbers, the position in the data and the running
    loss of the run. ``Trainer`` skips the batches that were trained. A step is evaluated before it is saved, so the
    best metric is restored too; ``state.log_history`` is not.

    Args:
        policy: What is saved when; None: ``CheckFreq()``.
        dirpath: The store, a directory that all ranks see, or an fsspec URL. One run per store.
        **options: See ``moe_ckpt.run.options.Options``.

    Attributes:
        checkpoint: Of the newest ``train()``; None before.

    Raises:
        ConfigError: Options contradict each other.
        UnsupportedError: This release of transformers has another training loop.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        dirpath: str | os.PathLike[str] = "checkpoints",
        **options: Unpack[OptionValues],
    ) -> None:
        self._options = make_options("MoECheckpointCallback", policy, dirpath, options)
        self.checkpoint: PlainCheckpoint | None = None
        self._progress: TrainerProgress | None = None
        self._is_first, self._is_uncounted = False, False
        _accompany_trainers()

    # --- once, around training ---

    def run(self, trainer: Trainer, train: Callable[[], Any]) -> Any:
        """Runs ``train``, the whole training of ``trainer``, and keeps the newest step if that raises."""
        self._progress, self.checkpoint = TrainerProgress(trainer), None
        try:
            result = train()
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)
        return result

    def _close(self, error: BaseException | None) -> None:
        if self._progress is not None:
            self._progress.close()
        if self.checkpoint is not None:
            self.checkpoint.__exit__(None if error is None else type(error), error, None)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Finds the MoE layers, opens the store and resumes."""
        progress = self._progress
        if progress is None:
            raise ConfigError("MoECheckpointCallback: give it to a transformers.Trainer, Trainer(callbacks=[...])")
        trainer = progress.trainer
        _require_supported(trainer)
        stateful = {"trainer": progress, "lr": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            stateful["scaler"] = trainer.accelerator.scaler
        before = state.global_step
        self.checkpoint = PlainCheckpoint(self._options, trainer.model_wrapped, [trainer.optimizer], stateful)
        position = self.checkpoint.resume(step=before)
        if position.step < before:
            log.warning(
                "Trainer had resumed at step %d from its own checkpoint. Training continues from step %d of %s, with "
                "the bits of the run. Call train() without resume_from_checkpoint; to continue from step %d, choose "
                "another dirpath",
                *(before, position.step, self._options.dirpath, before),
            )
        if position.restored:
            progress.resumed(position.step, self.checkpoint)
        else:
            progress.begins(position.step)
        self._is_first, self._is_uncounted = True, False

    def end(self) -> None:
        """Saves the last step, before ``Trainer`` loads the best model or deletes anything."""
        if self.checkpoint is None or self._progress is None:
            return
        state = self._progress.trainer.state
        self._count(state)
        self.checkpoint.finish(ended=state.global_step >= state.max_steps)

    # --- every epoch ---

    def run_epoch(self, train: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Runs an epoch from where training resumes in it, or not at all if it is over.

        Args:
            train: ``Trainer._run_epoch``.
            arguments: What ``Trainer`` calls it with, which begins at the epoch that its own checkpoint is in.
        """
        if self._progress is not None and self._progress.enter_epoch(arguments):
            train(**arguments)
            self._progress.leave_epoch(arguments)

    # --- every step ---

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Counts the step before, which is final now: it was logged, evaluated and saved by ``Trainer``."""
        if self._progress is None or self.checkpoint is None:
            return
        if self._is_first:
            self._is_first = False
            self._progress.first_batch_is_loaded(self.checkpoint)
        self._count(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """An optimizer step is done; what belongs to it is not."""
        if self._progress is not None:
            self._is_uncounted = True
            self._progress.updates += 1

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """An evaluation is over."""
        if self._progress is not None:
            self._progress.has_evaluated = True

    def _count(self, state: TrainerState) -> None:
        if self._is_uncounted and self.checkpoint is not None and self._progress is not None:
            self._is_uncounted = False
            self._progress.is_in_training = True
            self.checkpoint.after_step(state.global_step)


def _require_supported(trainer: Trainer) -> None:
    """Raises unless the run can be saved and repeated."""
    if trainer.is_deepspeed_enabled:
        raise UnsupportedError("MoECheckpointCallback: DeepSpeed holds state that cannot be saved; use DDP or FSDP2")
    if isinstance(trainer.model_wrapped, nn.DataParallel):
        raise UnsupportedError(
            "MoECheckpointCallback: one process drives several GPUs (torch.nn.DataParallel). Start one process per "
            "GPU: torchrun --nproc-per-node=N"
        )
    for name, value in (("auto_find_batch_size", True), ("ignore_data_skip", True)):
        if getattr(trainer.args, name, None) == value:
            raise ConfigError(
                f"MoECheckpointCallback: with TrainingArguments({name}={value}) a restart would train other batches "
                f"than the run. Leave it at {not value}"
            )
    if trainer.state.is_hyper_param_search:
        raise ConfigError(
            "MoECheckpointCallback: a search for hyperparameters trains many runs, and a store holds one. Remove the "
            "callback for the search"
        )


def _of(trainer: Trainer) -> MoECheckpointCallback | None:
    callbacks = [one for one in trainer.callback_handler.callbacks if isinstance(one, MoECheckpointCallback)]
    if len(callbacks) > 1:
        raise ConfigError(f"{len(callbacks)} MoECheckpointCallbacks are among the callbacks of one Trainer: keep one")
    return callbacks[0] if callbacks else None


@functools.cache
def _accompany_trainers() -> None:
    """Lets ``Trainer`` tell its callback of ours when training begins, an epoch begins and training ends.

    A callback alone cannot say at which batch of which epoch training begins, nor learn that it failed.
    """
    names = ("_inner_training_loop", "_run_epoch", "_finalize_training")
    if not all(hasattr(Trainer, name) for name in names):
        from transformers import __version__

        raise UnsupportedError(
            f"MoECheckpointCallback: Trainer of transformers {__version__} has no {', '.join(names)}. It was tested "
            "with transformers 5.24"
        )
    loop, epoch, finalize = (getattr(Trainer, name) for name in names)
    parameters = inspect.signature(epoch)

    @functools.wraps(loop)
    def train(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        ours, theirs = _of(self), functools.partial(loop, self, *args, **kwargs)
        return theirs() if ours is None else ours.run(self, theirs)

    @functools.wraps(epoch)
    def run_epoch(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        ours = _of(self)
        if ours is None:
            return epoch(self, *args, **kwargs)
        arguments = dict(parameters.bind(self, *args, **kwargs).arguments)
        arguments.pop("self")
        return ours.run_epoch(functools.partial(epoch, self), arguments)

    @functools.wraps(finalize)
    def end(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        ours = _of(self)
        if ours is not None:
            ours.end()
        return finalize(self, *args, **kwargs)

    for name, ours in zip(names, (train, run_epoch, end), strict=True):
        setattr(Trainer, name, ours)
