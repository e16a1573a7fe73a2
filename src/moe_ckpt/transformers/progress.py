"""The position of a ``Trainer`` in its data, with the sums it logs: saved with each checkpoint, and restored."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from moe_ckpt.driver.changes import same
from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.rng import capture_rng, restore_rng
from moe_ckpt.plain.checkpoint import PlainCheckpoint

log = logging.getLogger(__name__)

_OF_STATE = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""Fields of ``TrainerState`` that training changes. ``log_history`` grows with the run, and is left out."""
_OF_TRAINER = ("_tr_loss", "_globalstep_last_logged", "current_flos")
"""What ``Trainer`` adds up until it logs."""


class TrainerProgress:
    """The position and the sums of one training, as an object of ``stateful``.

    Args:
        trainer: The one that trains.

    Attributes:
        epoch: The epoch that the next optimizer step belongs to, from 0.
        updates: Optimizer steps of that epoch that are done.
        is_in_training: Whether a step was counted; else the state is that before the first batch is loaded.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer  # much of what is set below is private to it
        self.epoch = self.updates = 0
        self.is_in_training = False
        self._resumed = False
        self._warned = False
        self._rng: Mapping[str, Any] = {}  # before the epoch's order was drawn

    # --- saved and restored ---

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, the sums, and the state of other callbacks that have one."""
        trainer = self.trainer
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "is_in_training": self.is_in_training,
            "rng": self._rng,
            "accumulate": trainer.args.gradient_accumulation_steps,
            "state": {name: getattr(trainer.state, name) for name in _OF_STATE},
            "sums": {name: _copied(getattr(trainer, name)) for name in _OF_TRAINER},
            "callbacks": [[type(one).__name__, dict(one.state()["attributes"])] for one in self._callbacks()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned.

        Raises:
            ConfigError: Gradients are accumulated over another number of batches, so the position is another one.
        """
        trainer = self.trainer
        accumulate = trainer.args.gradient_accumulation_steps
        if state["accumulate"] != accumulate:
            raise ConfigError(
                f"the checkpoint's run had gradient_accumulation_steps={state['accumulate']}, and this one has "
                f"{accumulate}: its position in the data would be another one. Set {state['accumulate']} again, or "
                "start a new run with weights_from= and another dirpath"
            )
        self.epoch, self.updates, self.is_in_training = state["epoch"], state["updates"], state["is_in_training"]
        self._rng = state["rng"]
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        for name, value in state["sums"].items():
            setattr(trainer, name, value.to(trainer.args.device) if isinstance(value, torch.Tensor) else value)
        callbacks = self._callbacks()
        if [type(one).__name__ for one in callbacks] == [name for name, _ in state["callbacks"]]:
            for one, (_, attributes) in zip(callbacks, state["callbacks"], strict=True):
                vars(one).update(attributes)

    def _callbacks(self) -> list[Any]:
        return [one for one in self.trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    # --- where training begins ---

    def begins(self) -> None:
        """Nothing was restored: training begins where ``Trainer`` begins, at step 0 or at its own checkpoint."""
        self.epoch = -1

    def resumed(self, step: int) -> None:
        """The state was restored: training goes on at ``step``, which logs count from."""
        trainer = self.trainer
        self._resumed = True
        trainer._initial_global_step = trainer.state.global_step = step
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer._total_loss_scalar = -trainer._tr_loss.item()  # at the end Trainer reports the loss of this call alone

    def first_batch_is_loaded(self, checkpoint: PlainCheckpoint) -> None:
        """Restores the random numbers of a checkpoint, which was made when the same batch had been loaded."""
        if self._resumed and self.is_in_training:
            checkpoint.restore_generators()

    # --- every epoch ---

    def enter_epoch(self, arguments: dict[str, Any]) -> bool:
        """Returns whether anything of an epoch is to be trained, and lets ``Trainer`` skip what was.

        Args:
            arguments: Of ``Trainer._run_epoch``; changed.
        """
        trainer, epoch = self.trainer, arguments["epoch"]
        if self.epoch < 0:  # new: as Trainer says
            begins = epoch == arguments["epochs_trained"]
            batches = arguments["steps_trained_in_current_epoch"] if begins else 0
            self.epoch, self.updates = epoch, batches // trainer.args.gradient_accumulation_steps
        if trainer.state.global_step >= trainer.state.max_steps:
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
            # Trainer skips batches only where it resumes from a checkpoint of its own, whose random numbers it loads.
            batches = self.updates * trainer.args.gradient_accumulation_steps
            arguments.update(
                epochs_trained=epoch, steps_trained_in_current_epoch=batches, resume_from_checkpoint="moe_ckpt"
            )
            trainer._load_rng_state = lambda checkpoint: None
        return True

    def leave_epoch(self, arguments: dict[str, Any]) -> None:
        """An epoch has ended: by its length, or because a callback ended it or the training."""
        trainer = self.trainer
        for name in ("_load_rng_state", "get_batch_samples"):
            vars(trainer).pop(name, None)
        self._resumed = False
        if self.updates >= arguments["num_update_steps_per_epoch"] or not trainer.control.should_training_stop:
            self.epoch, self.updates = self.epoch + 1, 0

    def _watched(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Lets ``load`` warn if it draws random numbers, at the epoch's second step: the first draws its order."""
        calls = itertools.count()

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._warned or next(calls) != 1:
                return load(*args, **kwargs)
            before = capture_rng()
            batches = load(*args, **kwargs)
            if not same(before, capture_rng()):
                self._warned = True
                log.warning(
                    "batches are made with random numbers of this process (a collator that masks, for instance). After "
                    "a restart the same samples come with others, so recovery is not exact. Draw them from a generator "
                    "that is seeded by the sample"
                )
            return batches

        return watched


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
