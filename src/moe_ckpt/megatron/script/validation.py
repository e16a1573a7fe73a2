"""Validations of Megatron-LM's ``train``: those at which training stopped, and those during a localized recovery.

A validation changes no weights. If training stops during one, the iteration is sealed as of the validation's beginning,
and the next start runs the validation first. A pipeline stage that recomputes an iteration alone skips the validation
after it, which all stages have run: it only draws and counts the validation's batches, to have the others' position.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from moe_ckpt.megatron.checkpoint import MegatronCheckpoint
from moe_ckpt.megatron.loop import Progress
from moe_ckpt.megatron.script.arguments import changed, flat

DUE = "validation_due"
"""Name of the counter that says that the validation after an iteration is still to be made."""
USED_OF_TRAIN = ("forward_step_func", "model", "valid_data_iterator", "process_non_loss_data_func", "config")
"""Parameters of ``train`` that a validation is made with, beside ``non_loss_data_func``."""


def follows(settings: Any, iteration: int) -> bool:
    """Returns whether ``train`` makes a validation after ``iteration``.

    Args:
        settings: Megatron's arguments.
    """
    interval = getattr(settings, "eval_interval", None)
    return bool(interval and iteration % interval == 0 and getattr(settings, "do_valid", False))


def can_pass_over(settings: Any) -> bool:
    """Returns whether it is known which batches a validation draws.

    Args:
        settings: Megatron's arguments.
    """
    others = ("multiple_validation_sets", "full_validation", "vision_pretraining")
    return isinstance(settings.eval_iters, int) and not any(getattr(settings, name, False) for name in others)


def pass_over(settings: Any, data_iterator: Any) -> None:
    """Draws and counts the batches that a validation would have.

    Args:
        settings: Megatron's arguments.
        data_iterator: Of the validation data; a list of one for each chunk of the model, or None where none is read.
    """
    machine: Any = importlib.import_module("megatron.core.rerun_state_machine")
    state = machine.get_rerun_state_machine()
    mode = state.get_mode()
    state.set_mode(machine.RerunMode.DISABLED)  # as in a validation, of whose batches none is kept
    try:
        batches = settings.global_batch_size // (settings.micro_batch_size * settings.data_parallel_size)
        for iterator in flat(data_iterator):
            for _ in range(0 if iterator is None else batches * settings.eval_iters):
                next(iterator)
    finally:
        state.set_mode(mode)
    settings.consumed_valid_samples += settings.global_batch_size * settings.eval_iters


class LateValidation:
    """The validation at which training stopped; it runs before the first iteration after the restart.

    Attributes:
        iteration: That it follows; None if none is late.
        arguments: Those of ``train``, by name.
    """

    def __init__(self) -> None:
        self.iteration: int | None = None
        self.arguments: Mapping[str, Any] = {}
        self._runs_again = False

    def agree(self, ckpt: MegatronCheckpoint, settings: Any, progress: Progress) -> None:
        """Training resumes. A collective: if one rank has yet to run the validation, all ranks run it.

        Args:
            ckpt: Of the run.
            settings: Megatron's arguments, set to the position where this rank resumes.
            progress: That position.
        """
        is_due = bool(progress.counters.get(DUE, False))
        position = json.dumps([progress.iteration, is_due, getattr(settings, "consumed_valid_samples", 0)]).encode()
        everyone = [json.loads(raw) for raw in ckpt.session.comm.everyone(position)]
        late = [(iteration, consumed) for iteration, is_due_there, consumed in everyone if is_due_there]
        self.iteration, consumed = max(late, default=(None, 0))
        if progress.iteration == self.iteration:
            self._runs_again = not is_due
            settings.consumed_valid_samples = consumed

    def counted(self, settings: Any) -> AbstractContextManager[None]:
        """Encloses the building of loaders: Megatron takes a count of 0 for one that a checkpoint lacks, and estimates.

        Args:
            settings: Megatron's arguments.
        """
        is_first = self.iteration is not None and getattr(settings, "consumed_valid_samples", None) == 0
        is_first = is_first and not getattr(settings, "phase_transition_iterations", None)
        return changed(settings, **({"iteration": 0} if is_first else {}))

    def run(self, ckpt: MegatronCheckpoint, settings: Any, evaluate: Callable[..., Any]) -> None:
        """Runs the validation if it is next. Called before each iteration, and at the loop's end.

        Args:
            ckpt: Of the run.
            settings: Megatron's arguments.
            evaluate: As ``evaluate_and_print_results``.
        """
        iteration, arguments = self.iteration, self.arguments
        if iteration is None or ckpt.iteration != iteration:
            return
        self.iteration = None
        if not follows(settings, iteration):  # other arguments than those of the run
            return
        ckpt.begin_training()
        if ckpt.upstream is not None:
            ckpt.upstream.boundary.begin()
        settings.curr_iteration = iteration - 1  # as it counts them, from 0
        evaluate(
            f"iteration {iteration}",
            *(arguments[name] for name in ("forward_step_func", "valid_data_iterator", "model")),
            iteration,
            *(arguments[name] for name in ("process_non_loss_data_func", "config")),
            verbose=False,
            write_to_tensorboard=True,
            non_loss_data_func=arguments["non_loss_data_func"],
        )
        settings.curr_iteration = iteration
        if self._runs_again:
            ckpt._host.generators.go_back()  # random numbers of this rank had moved on already
