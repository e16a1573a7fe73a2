"""The callback of ``transformers.Trainer``, built on the adapter of PyTorch loops."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.notices import announce
from moe_ckpt.plain.checkpoint import PlainCheckpoint
from moe_ckpt.policies.base import Policy
from moe_ckpt.run.options import OptionValues, make_options
from moe_ckpt.transformers.progress import TrainerProgress

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MoECheckpointCallback(TrainerCallback):
    """Checkpoints a ``Trainer``, and resumes it from the newest checkpoint when ``train()`` is called again.

    A restart restores the weights, the optimizer, the schedule, the random numbers, the position in the data and the
    running loss. ``Trainer`` skips the batches that were trained. A step is evaluated before it is saved, so the best
    metric is restored, too; ``state.log_history`` is not.

    Args:
        policy: Decides what is saved at which step. None: ``CheckFreq()``.
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
        self._opened = contextlib.ExitStack()
        self._is_uncounted = False
        _accompany_trainers()

    @property
    def _training(self) -> TrainerProgress:
        if self._progress is None:
            raise ConfigError("MoECheckpointCallback: give it to a transformers.Trainer, Trainer(callbacks=[...])")
        return self._progress

    # --- around methods of Trainer ---

    def run(self, trainer: Trainer, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``train``, the whole training, and keeps the newest step if that raises."""
        self._progress, self.checkpoint, self._is_uncounted = TrainerProgress(trainer), None, False
        with self._opened:
            self._opened.callback(self._progress.close)
            return train(trainer, *args, **kwargs)

    def run_epoch(self, trainer: Trainer, train: Callable[..., Any], **arguments: Any) -> None:
        """Runs an epoch from the position where training resumes in it, or not at all if it is over.

        Args:
            trainer: The one that trains.
            train: ``Trainer._run_epoch``.
            arguments: Of ``train``; ``Trainer`` begins at the epoch that its own checkpoint is in.
        """
        if self._training.enter_epoch(arguments):
            train(trainer, **arguments)
            self._training.leave_epoch(arguments)

    def end(self, trainer: Trainer, finalize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Saves the last step, before ``Trainer`` loads the best model or deletes anything."""
        self._count(trainer.state)
        if self.checkpoint is not None:
            is_complete = trainer.state.global_step >= trainer.state.max_steps
            self.checkpoint.finish(ended=is_complete or self._training.has_stopped_early())
        return finalize(trainer, *args, **kwargs)

    def save_optimizer(self, trainer: Trainer, save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Saves the optimizer in a checkpoint of ``Trainer``'s own; not in a replay, which has only a part of it."""
        if self.checkpoint is None or not self.checkpoint.replaying:
            save(trainer, *args, **kwargs)
        elif trainer.is_world_process_zero():
            announce(
                "Trainer's checkpoint of step %d keeps the optimizer state that it has: a sparse window is computed "
                "again, and until its end the optimizer holds no complete state of the run",
                trainer.state.global_step,
            )

    # --- events ---

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Finds the MoE layers, opens the store and resumes."""
        trainer = self._training.trainer
        _require_supported(trainer)
        stateful = {"trainer": self._training, "lr": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            stateful["scaler"] = trainer.accelerator.scaler
        checkpoint = PlainCheckpoint(self._options, trainer.model_wrapped, [trainer.optimizer], stateful)
        self.checkpoint = self._opened.enter_context(checkpoint)
        self._training.begin(checkpoint.resume(step=state.global_step), checkpoint)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Counts the step before, which is final now: ``Trainer`` has logged, evaluated and saved it."""
        self._training.batch_is_loaded()
        self._count(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Notes that an optimizer step is done; ``Trainer`` has still to log, evaluate and save it."""
        self._is_uncounted = True
        self._training.updates += 1

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Notes that an evaluation is over."""
        if self._progress is not None:
            self._progress.has_evaluated, self._progress.evaluated_step = True, state.global_step

    def _count(self, state: TrainerState) -> None:
        if self._is_uncounted and self.checkpoint is not None:
            self._is_uncounted = False
            self._training.is_in_training = True
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
    """Makes ``Trainer`` call ``MoECheckpointCallback`` around a training, each epoch, its end, and saves of its own.

    A callback's events alone cannot set the batch at which training begins, and do not tell of failures.
    """
    ours = MoECheckpointCallback
    around: dict[str, Callable[..., Any]] = {
        "_inner_training_loop": ours.run,
        "_run_epoch": ours.run_epoch,
        "_finalize_training": ours.end,
        "_save_optimizer_and_scheduler": ours.save_optimizer,
    }
    if not all(hasattr(Trainer, name) for name in around):
        from transformers import __version__

        raise UnsupportedError(
            f"MoECheckpointCallback: Trainer of transformers {__version__} has no {', '.join(around)}. It was tested "
            "with transformers 5.24"
        )
    for name, enclosing in around.items():
        setattr(Trainer, name, _enclosed(getattr(Trainer, name), enclosing))


def _enclosed(theirs: Callable[..., Any], enclosing: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def enclosed(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        ours = _of(self)
        return theirs(self, *args, **kwargs) if ours is None else enclosing(ours, self, theirs, *args, **kwargs)

    return enclosed
