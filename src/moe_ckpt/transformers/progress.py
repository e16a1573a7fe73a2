"""The position of a ``Trainer`` in its data, and the sums that it logs: saved with each checkpoint, and restored."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_callback import ExportableState

from moe_ckpt.driver.changes import are_equal, changes_between
from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.rng import capture_rng, restore_rng
from moe_ckpt.plain.checkpoint import PlainCheckpoint
from moe_ckpt.plain.host import Position

log = logging.getLogger(__name__)

_OF_STATE = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""Fields of ``TrainerState`` that training changes, except ``log_history``, which grows with the run."""
_OF_TRAINER = ("_tr_loss", "_globalstep_last_logged", "current_flos")
"""Sums of ``Trainer`` since it last logged."""


class TrainerProgress:
    """The position and the sums of one training, as an object of ``stateful``.

    Args:
        trainer: The one that trains.

    Attributes:
        epoch: The epoch of the next optimizer step, from 0.
        updates: Optimizer steps of that epoch that are done.
        is_in_training: A step was counted; else the state is that before the first batch is loaded.
        has_evaluated: An evaluation is over.
        evaluated_step: The step of the newest evaluation in this process; None before.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer  # much of what is set below is private to it
        self.epoch = self.updates = 0
        self.is_in_training = self.has_evaluated = False
        self.evaluated_step: int | None = None
        self._stopped_before: int | None = None  # the run's max_steps then; None unless an early stop was restored
        self._resumed = self._warned = self._is_over = False
        self._restore_generators: Callable[[], None] | None = None
        self._eval_on_start = trainer.args.eval_on_start
        self._rng: Mapping[str, Any] = {}  # before the epoch's order was drawn

    # --- saved and restored ---

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, the sums, and the state of other callbacks that have one."""
        trainer = self.trainer
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "is_in_training": self.is_in_training,
            "has_evaluated": self.has_evaluated,
            "stopped_before": trainer.state.max_steps if self.has_stopped_early() else None,
            "rng": self._rng,
            "data": self._data(),
            "state": {name: getattr(trainer.state, name) for name in _OF_STATE},
            "sums": {name: _copied(getattr(trainer, name)) for name in _OF_TRAINER},
            "callbacks": [[type(one).__name__, dict(one.state()["attributes"])] for one in self._callbacks()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of ``state_dict``.

        Raises:
            ConfigError: Within an epoch, the data or the size of batches have changed, so the position is not valid.
        """
        trainer = self.trainer
        before, now = state["data"], self._data()
        changed = "; ".join(map(str, changes_between("", before, now, from_checkpoint=False)))
        if changed and state["updates"]:
            raise ConfigError(
                f"the checkpoint is within an epoch, and its data have changed: {changed}. Its position "
                "would be another one. Set what the run had, or start a new run with weights_from= and another dirpath"
            )
        if changed:
            log.warning("the next epoch begins with other data than the run had: %s", changed)
        self.epoch, self.updates, self.is_in_training = state["epoch"], state["updates"], state["is_in_training"]
        self._rng, self.has_evaluated = state["rng"], state["has_evaluated"]
        self._stopped_before = state["stopped_before"]
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        for name, value in state["sums"].items():
            setattr(trainer, name, value.to(trainer.args.device) if isinstance(value, torch.Tensor) else value)
        callbacks, absent = self._callbacks(), []
        for name, attributes in state["callbacks"]:
            one = next((one for one in callbacks if type(one).__name__ == name), None)
            if one is None:
                absent.append(name)
                continue
            callbacks.remove(one)
            vars(one).update(attributes)
        if absent:
            names = ", ".join(absent)
            log.warning("the checkpoint holds state of callbacks that this Trainer does not have: %s", names)

    def _data(self) -> dict[str, Any]:
        """Returns settings on which the position in the data depends."""
        trainer, arguments = self.trainer, self.trainer.args
        sized = hasattr(trainer.train_dataset, "__len__")
        return {
            "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
            "per_device_train_batch_size": trainer._train_batch_size,
            "ranks": arguments.world_size,
            "seed": arguments.seed if arguments.data_seed is None else arguments.data_seed,
            "train_sampling_strategy": str(arguments.train_sampling_strategy),
            "samples": len(trainer.train_dataset) if sized else None,
        }

    def _callbacks(self) -> list[Any]:
        return [one for one in self.trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    # --- where training begins ---

    def begin(self, position: Position, checkpoint: PlainCheckpoint) -> None:
        """Begins training at ``position`` if it was restored or is another host's; else where ``Trainer`` begins."""
        trainer, step = self.trainer, position.step
        if not position.restored:
            self.epoch = -1
            trainer._initial_global_step = trainer._globalstep_last_logged = trainer.state.global_step = step
            return
        self._resumed = True
        self._is_over = self._remains_stopped(checkpoint.options.resume)
        if self._is_over and trainer.is_world_process_zero():
            log.warning(
                "the run in %s was ended by EarlyStoppingCallback at step %d: nothing is left to train. For another "
                "experiment choose another dirpath; to train longer, raise max_steps, num_train_epochs or "
                "early_stopping_patience, or set resume='extend'",
                checkpoint.options.dirpath,
                step,
            )
        if not self.is_in_training:
            return
        trainer.args.eval_on_start = False  # the run has made this evaluation, and callbacks have counted it
        _iterate_quietly(trainer.callback_handler.train_dataloader, checkpoint)
        if self.has_evaluated:
            load = trainer.get_eval_dataloader
            trainer.get_eval_dataloader = lambda *args, **kwargs: _iterate_quietly(load(*args, **kwargs), checkpoint)
        trainer._initial_global_step = trainer.state.global_step = step
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer._total_loss_scalar = -trainer._tr_loss.item()  # at the end Trainer reports the loss of this call alone
        if self.updates or not are_equal(self._rng, capture_rng()):  # else the epoch's order is still to be drawn
            self._restore_generators = checkpoint.restore_generators

    def batch_is_loaded(self) -> None:
        """Restores random numbers before the first step: the checkpoint was made after this batch was loaded."""
        if self._restore_generators is not None:
            self._restore_generators()
            self._restore_generators = None

    def close(self) -> None:
        """Restores the settings of ``Trainer`` after training."""
        vars(self.trainer).pop("get_eval_dataloader", None)
        self.trainer.args.eval_on_start = self._eval_on_start

    # --- an early stop ---

    def has_stopped_early(self) -> bool:
        """Returns whether an ``EarlyStoppingCallback`` has ended the run, by the evaluation of the newest step."""
        state, control = self.trainer.state, self.trainer.control
        is_asked = control.should_training_stop and self.evaluated_step == state.global_step
        return self._is_over or (is_asked and self._is_patience_spent())

    def _remains_stopped(self, resume: str) -> bool:
        """Returns whether the restored early stop holds for this start of the script."""
        if self._stopped_before is None or resume == "extend" or self.trainer.state.max_steps > self._stopped_before:
            return False
        return self._is_patience_spent()

    def _is_patience_spent(self) -> bool:
        return any(
            isinstance(one, EarlyStoppingCallback)
            and one.early_stopping_patience_counter >= one.early_stopping_patience
            for one in self._callbacks()
        )

    # --- every epoch ---

    def enter_epoch(self, arguments: dict[str, Any]) -> bool:
        """Returns whether an epoch has batches left to train, and makes ``Trainer`` skip those that were trained.

        Args:
            arguments: Of ``Trainer._run_epoch``; changed.
        """
        trainer, epoch = self.trainer, arguments["epoch"]
        if self.epoch < 0:  # a new run: Trainer decides
            begins = epoch == arguments["epochs_trained"]
            batches = arguments["steps_trained_in_current_epoch"] if begins else 0
            self.epoch, self.updates = epoch, batches // trainer.args.gradient_accumulation_steps
        if self._is_over or trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
            return False
        if epoch < self.epoch or self.updates >= arguments["num_update_steps_per_epoch"]:
            return False
        if epoch > self.epoch:
            self.epoch, self.updates = epoch, 0
        trainer.get_batch_samples = self._watched(trainer.get_batch_samples)
        if not (self._resumed and self.is_in_training):
            self._rng = capture_rng()
        else:
            restore_rng(self._rng)  # so that samplers draw the same order
        if self._resumed:
            # Trainer skips batches only if it resumes from a checkpoint of its own, whose random numbers it loads.
            batches = self.updates * trainer.args.gradient_accumulation_steps
            arguments.update(
                epochs_trained=epoch, steps_trained_in_current_epoch=batches, resume_from_checkpoint="moe_ckpt"
            )
            trainer._load_rng_state = lambda checkpoint: None
        return True

    def leave_epoch(self, arguments: dict[str, Any]) -> None:
        """Ends an epoch, which was complete, or which a callback has ended."""
        trainer = self.trainer
        for name in ("_load_rng_state", "get_batch_samples"):
            vars(trainer).pop(name, None)
        self._resumed = False
        if self.updates >= arguments["num_update_steps_per_epoch"] or not trainer.control.should_training_stop:
            self.epoch, self.updates = self.epoch + 1, 0
            self._rng = capture_rng()  # training may stop here, before the next epoch's order is drawn

    def _watched(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``load``, which warns if it draws random numbers at the second step; the first draws the order."""
        calls = itertools.count()

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._warned or next(calls) != 1:
                return load(*args, **kwargs)
            before = capture_rng()
            batches = load(*args, **kwargs)
            if not are_equal(before, capture_rng()):
                self._warned = True
                log.warning(
                    "batches are made with random numbers of this process (a collator that masks, for instance). After "
                    "a restart the same samples come with others, so recovery is not exact. Draw them from a generator "
                    "that is seeded by the sample"
                )
            return batches

        return watched


def _iterate_quietly(loader: Any, checkpoint: PlainCheckpoint) -> Any:
    """Makes a loader with persistent workers draw no seed for them: the run did so when it was first iterated."""
    inner = getattr(loader, "base_dataloader", loader)
    if isinstance(inner, DataLoader) and inner.persistent_workers:
        checkpoint.iterate_quietly(inner)
    return loader


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
