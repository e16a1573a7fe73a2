"""Megatron-LM's training scripts: arguments, counters, iterations and validations at which training stopped.

The loop advances the scheduler and counts samples and operations after the update. If an error comes in between, the
weights are already those of the next iteration, and its state is complete once the rest is counted as the loop would
have counted it. If training stops during a validation, which changes no weights, the iteration is sealed as of the
validation's beginning, and the next start runs the validation first. A pipeline stage that recomputes an iteration
alone skips the validation after it, which all stages have run: it only draws and counts the validation's batches, so
that its data are at the same position as those of the other stages.

Under Megatron-LM's own ``--inprocess-restart`` a monitor interrupts the process to let it train again, but not while
the newest iteration is sealed.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from moe_ckpt.comm.communicator import answers_of
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.megatron.checkpoint import MegatronCheckpoint, end_iteration
from moe_ckpt.megatron.compat import Wrapped, changed_attributes, megatron_core
from moe_ckpt.megatron.host import Progress, capture_generators
from moe_ckpt.megatron.world import is_rank_zero
from moe_ckpt.notices import announce

COUNTED = ("consumed_valid_samples", "skipped_train_samples", "num_floating_point_operations_so_far")
"""Counters in ``args`` that are saved, if this version has them."""
KNOWN_RELEASES = "core_v0.16.1 and core_v0.19.0"
"""The releases of Megatron-LM with which ``megatron.install`` is tested."""
ARGUMENTS = ("consumed_train_samples", "train_iters", "micro_batch_size", "load", "save")


def unknown_release(what: str) -> UnsupportedError:
    """Returns the error of a Megatron-LM that lacks ``what``."""
    return UnsupportedError(
        f"this Megatron-LM (megatron-core {megatron_core().version}) has no {what}, which moe_ckpt.megatron.install "
        f"needs. {KNOWN_RELEASES} have it: use one of them, or put attach, resume, after_step and finish into the "
        "training loop (docs/megatron.md), or take a newer moe_ckpt."
    )


def require_trainable(settings: Any) -> None:
    """Raises for modes of Megatron-LM in which checkpoints cannot work."""
    missing = [name for name in ARGUMENTS if not hasattr(settings, name)]
    if missing:
        raise unknown_release(f"args.{missing[0]}")
    if getattr(settings, "skip_train", False):
        raise ConfigError(
            "--skip-train: nothing is trained, so there is no optimizer to attach checkpoints to. Leave "
            "megatron.install() out, and give --load a checkpoint of Megatron's (megatron.export_torch_dist writes one)"
        )
    if getattr(settings, "ckpt_convert_format", None) is not None:
        raise ConfigError(
            "--ckpt-convert-format: Megatron-LM converts what --load names and ends, and megatron.install() would load "
            "the store's newest checkpoint instead. Leave megatron.install() out"
        )
    if getattr(settings, "perform_rl_step", False):
        raise UnsupportedError(
            "--perform-rl-step: Megatron-LM then loads weights from --load again after setup, over those that "
            "megatron.install() has restored. Train without it"
        )


def warn_of_loader(settings: Any, stateful: Collection[str], where: str, option: str, position: str) -> None:
    """Warns on rank 0 if the position in the data is not saved.

    Args:
        settings: Those of the data.
        stateful: Names of the objects that the user gave.
        where: Function or class that they were given to.
        option: The setting that means the user's own loader, as the user writes it.
        position: Name of Megatron's count of the samples consumed.
    """
    if getattr(settings, "dataloader_type", None) == "external" and not stateful and is_rank_zero():
        announce(
            "%s: the loader's position in the data is not saved. Unless your loader begins at %s, a resumed run trains "
            "on data that it has seen: give the loader to %s(stateful={'loader': ...}), anything with state_dict and "
            "load_state_dict",
            *(option, position, where),
            level=logging.WARNING,
        )


def counters_of(settings: Any, floating_point_operations: Any) -> dict[str, Any]:
    """Returns the counters as they are now, by name.

    Args:
        settings: Megatron's arguments.
        floating_point_operations: So far.
    """
    counters = {name: getattr(settings, name) for name in COUNTED if hasattr(settings, name)}
    counters["num_floating_point_operations_so_far"] = floating_point_operations
    largest = getattr(rerun_machine(), "max_values", None)
    return counters if largest is None else {**counters, "rerun_max_values": dict(largest)}


def set_counters(settings: Any, progress: Progress) -> None:
    """Sets the counters, and the number of micro-batches, which follows from them, to where training resumes.

    Args:
        settings: Megatron's arguments.
        progress: Result of ``resume``.
    """
    settings.consumed_train_samples = progress.consumed_samples
    for name in COUNTED:
        if name in progress.counters:
            setattr(settings, name, progress.counters[name])
    largest = progress.counters.get("rerun_max_values")
    if largest is not None:
        rerun_machine().max_values = dict(largest)
    calculator().update_num_microbatches(consumed_samples=progress.consumed_samples, verbose=True)


def calculator() -> Any:
    """Returns Megatron's module that counts micro-batches."""
    return importlib.import_module("megatron.core.num_microbatches_calculator")


def samples_of_iteration() -> int:
    """Returns the number of samples of the present iteration, on all ranks together."""
    return int(calculator().get_current_running_global_batch_size())


def left_out_of_iteration() -> int:
    """Returns the number of samples by which the present iteration is smaller than the batch size that was set."""
    return int(calculator().get_current_global_batch_size()) - samples_of_iteration()


def rerun_machine() -> Any:
    """Returns Megatron's rerun state machine."""
    return importlib.import_module("megatron.core.rerun_state_machine").get_rerun_state_machine()


def tell_of_unwritten(iteration: int) -> None:
    """Says on rank 0 that Megatron's own checkpoint of an iteration is not written, in a replay."""
    if is_rank_zero():
        announce(
            "Megatron's checkpoint of iteration %d is not written: a sparse window is computed again, and until its "
            "end the model holds no complete state of the run",
            iteration,
        )


def discard_tokens_of_reruns(ckpt: MegatronCheckpoint) -> None:
    """Makes tokens count once if Megatron's rerun machine repeats a forward pass."""

    def should_run(asked: Callable[[Any], bool], data_iterator: Any) -> bool:
        runs = asked(data_iterator)
        if runs:
            ckpt.discard_tokens()
        return runs

    ckpt._undo.callback(Wrapped(rerun_machine(), "should_run_forward_backward", should_run).close)


def flat(value: Any) -> Iterator[Any]:
    """Yields the members of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    else:
        yield value


def give_generators(loaders: Any, iteration: int) -> None:
    """Gives data loaders generators of their own, so that making an iterator draws no random number of the run.

    Args:
        loaders: Nested lists and tuples of loaders. Objects that are no torch loaders are left as they are.
        iteration: The one at which training begins.
    """
    seed = torch.initial_seed() + iteration
    for loader in flat(loaders):
        if isinstance(loader, DataLoader) and loader.generator is None:
            loader.generator = torch.Generator().manual_seed(seed)


DUE = "validation_due"
"""Name of a counter, true if the validation after the iteration was not made yet."""
USED_OF_TRAIN = ("forward_step_func", "model", "valid_data_iterator", "process_non_loss_data_func", "config")
"""Parameters of ``train`` that a validation needs, beside ``non_loss_data_func``."""


def is_validated_after(settings: Any, iteration: int) -> bool:
    """Returns whether ``train`` makes a validation after ``iteration``.

    Args:
        settings: Megatron's arguments.
    """
    interval = getattr(settings, "eval_interval", None)
    return bool(interval and iteration % interval == 0 and getattr(settings, "do_valid", False))


def can_draw_batches(settings: Any) -> bool:
    """Returns whether it is known which batches a validation draws.

    Args:
        settings: Megatron's arguments.
    """
    others = ("multiple_validation_sets", "full_validation", "vision_pretraining")
    return isinstance(settings.eval_iters, int) and not any(getattr(settings, name, False) for name in others)


def draw_batches(settings: Any, data_iterator: Any) -> None:
    """Draws and counts the batches that a validation would have.

    Args:
        settings: Megatron's arguments.
        data_iterator: Of the validation data: one, or a list with one for each model chunk; None where none is read.
    """
    machine: Any = importlib.import_module("megatron.core.rerun_state_machine")
    state = machine.get_rerun_state_machine()
    mode = state.get_mode()
    state.set_mode(machine.RerunMode.DISABLED)  # as in a validation, whose batches are not kept for reruns
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
        iteration: The iteration before it; None if there is no such validation.
        arguments: Those of ``train``, by name.
    """

    def __init__(self) -> None:
        self.iteration: int | None = None
        self.arguments: Mapping[str, Any] = {}
        self._runs_again = False

    def agree(self, ckpt: MegatronCheckpoint, settings: Any, progress: Progress) -> None:
        """Finds out if the validation is due, when training resumes. A collective: if it is on one rank, all run it.

        Args:
            ckpt: Of the run.
            settings: Megatron's arguments, set to the position where this rank resumes.
            progress: That position.
        """
        is_due = bool(progress.counters.get(DUE, False))
        position = [progress.iteration, is_due, getattr(settings, "consumed_valid_samples", 0)]
        everyone = answers_of(ckpt.session.comm, position)
        late = [(iteration, consumed) for iteration, is_due_there, consumed in everyone if is_due_there]
        self.iteration, consumed = max(late, default=(None, 0))
        if progress.iteration == self.iteration:
            self._runs_again = not is_due
            settings.consumed_valid_samples = consumed

    def counted(self, settings: Any) -> AbstractContextManager[None]:
        """Encloses the building of loaders: Megatron takes a count of 0 for a missing one, and estimates it.

        Args:
            settings: Megatron's arguments.
        """
        is_first = self.iteration is not None and getattr(settings, "consumed_valid_samples", None) == 0
        is_first = is_first and not getattr(settings, "phase_transition_iterations", None)
        return changed_attributes(settings, **({"iteration": 0} if is_first else {}))

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
        if not is_validated_after(settings, iteration):  # other arguments than those of the run
            return
        ckpt.begin_training()
        if ckpt.upstream is not None:
            ckpt.upstream.boundary.begin()
        settings.curr_iteration = iteration - 1  # Megatron counts from 0 here
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
            ckpt._host.generators.restore_newest()  # this rank has drawn the validation's random numbers before


def uninterrupted() -> AbstractContextManager[Any]:
    """Returns a guard that keeps the in-process monitor from interrupting a block. Called within ``pretrain``.

    The guard is a method of the call wrapper that ``pretrain`` has as a local variable.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "pretrain":
        frame = frame.f_back
    call = None if frame is None else frame.f_locals.get("inprocess_call_wrapper")
    guard: AbstractContextManager[Any] = contextlib.nullcontext() if call is None else call.atomic()
    return guard


class StartedIteration:
    """The loop's counters when an iteration began.

    Args:
        ckpt: Of the run.
        settings: Megatron's arguments.
        training: The module ``megatron.training.training``.
        scheduler: The one that ``train_step`` advances.
    """

    def __init__(self, ckpt: MegatronCheckpoint, settings: Any, training: Any, scheduler: Any) -> None:
        self._ckpt, self._settings, self._training, self._scheduler = ckpt, settings, training, scheduler
        self._scheduler_steps = scheduler.num_steps
        self._consumed: int = settings.consumed_train_samples
        self._skipped: int = getattr(settings, "skipped_train_samples", 0)
        self._validated: int = getattr(settings, "consumed_valid_samples", 0)
        self._generators: Mapping[str, Any] | None = None
        self._is_validated = False

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """Encloses the validation that follows the iteration."""
        self._generators = capture_generators()
        yield
        self._is_validated = True

    def count(self, operations: Any) -> bool:
        """Counts the iteration, whose update is made, as the loop would have counted it.

        Args:
            operations: Floating-point operations up to the iteration before.

        Returns:
            False if weights may change after the update, since then it is not known whether they have.
        """
        ckpt, settings, updated = self._ckpt, self._settings, self._ckpt._watch.updated
        iteration = ckpt.iteration + 1
        if getattr(settings, "qk_clip", False) or getattr(settings, "vision_pretraining", False):
            return False
        is_due = is_validated_after(settings, iteration) and not self._is_validated
        samples = samples_of_iteration()
        if updated and self._scheduler.num_steps == self._scheduler_steps:
            self._scheduler.step(increment=samples)
        counters = counters_of(settings, operations + self._training.num_floating_point_operations(settings, samples))
        if "skipped_train_samples" in counters:
            counters["skipped_train_samples"] = self._skipped + left_out_of_iteration()
        if is_due:
            counters |= {"consumed_valid_samples": self._validated, DUE: True}
        tokens = end_iteration(ckpt, iteration, self._consumed + samples, counters, updated=updated)
        if is_due and self._generators:
            ckpt._host.generators.state = self._generators
        ckpt._driver.count(tokens, updated=updated)
        return True
