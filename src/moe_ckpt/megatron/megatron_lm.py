"""``megatron.install``: checkpoints for Megatron-LM's own training scripts, with one added line.

``pretrain`` of Megatron-LM has no hooks. It consists of functions of ``megatron.training.training`` that call each
other by name, so some of them are replaced by functions that call the original and the adapter:

    setup_model_and_optimizer             attach and resume after it; set counters in ``args`` before data iterators
                                          are built from them
    build_train_valid_test_data_loaders   give loaders their own generators, so that making iterators does not draw
                                          from training's
    train_step, dummy_train_step          begin training before the first; record an iteration without an update
    evaluate_and_print_results            an iteration that stops in it is sealed as of before; with an upstream log it
                                          is no part of an iteration, and not made again
    checkpoint_and_decide_exit            after_step, when the iteration is counted and validated; no more than that
                                          while some stages compute iterations again alone
    training_log                          with an upstream log: at the same iterations on all stages
    save_checkpoint                       write no checkpoint of Megatron's during a replay
    train                                 finish, also on ``sys.exit``
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moe_ckpt.driver.host import Stateful
from moe_ckpt.driver.run import CLOSE_SECS, close_guarded
from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.checkpoint import MegatronCheckpoint, megatron_options
from moe_ckpt.megatron.compat import changed_attributes, look_up
from moe_ckpt.megatron.host import Progress
from moe_ckpt.megatron.script import (
    USED_OF_TRAIN,
    LateValidation,
    StartedIteration,
    can_draw_batches,
    counters_of,
    discard_tokens_of_reruns,
    draw_batches,
    give_generators,
    require_trainable,
    samples_of_iteration,
    set_counters,
    tell_of_unwritten,
    uninterrupted,
    unknown_release,
    warn_of_loader,
)
from moe_ckpt.megatron.world import from_rank_zero, is_rank_zero
from moe_ckpt.notices import announce
from moe_ckpt.policies.base import Policy
from moe_ckpt.reading.reader import newest_step
from moe_ckpt.run.options import Options, OptionValues

if TYPE_CHECKING:
    from typing_extensions import Unpack

TRAINING = "megatron.training.training"

REPLACED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "setup_model_and_optimizer": ("pretrain", ()),
    "train": ("pretrain", (*USED_OF_TRAIN, "non_loss_data_func")),
    "build_train_valid_test_data_loaders": ("build_train_valid_test_data_iterators", ()),
    "train_step": ("train", ("opt_param_scheduler",)),
    "dummy_train_step": ("train", ()),
    "evaluate_and_print_results": ("train", ("data_iterator",)),
    "checkpoint_and_decide_exit": ("train", ("iteration", "num_floating_point_operations_so_far")),
    "save_checkpoint": ("save_checkpoint_and_time", ("iteration",)),
}
"""Replaced function of ``TRAINING`` -> (its caller, the parameters that are used)."""
REPLACED_WITH_LOG = {**REPLACED, "training_log": ("train", ("is_first_iteration",))}
"""The same with ``Memory(upstream_bytes=...)``."""

USED = (
    ("megatron.training.global_vars", "get_args"),
    ("megatron.core.num_microbatches_calculator", "get_current_global_batch_size"),
    ("megatron.core.num_microbatches_calculator", "get_current_running_global_batch_size"),
    ("megatron.core.num_microbatches_calculator", "update_num_microbatches"),
    ("megatron.core.rerun_state_machine", "get_rerun_state_machine"),
    ("megatron.core.rerun_state_machine", "RerunStateMachine.should_run_forward_backward"),
)

_TRACKER = "latest_checkpointed_iteration.txt"
_installed: MegatronLM | None = None


def install(
    policy: Policy | None = None,
    dirpath: str | os.PathLike[str] = "checkpoints",
    *,
    stateful: Mapping[str, Stateful] | None = None,
    **options: Unpack[OptionValues],
) -> MegatronLM:
    """Checkpoints the training of Megatron-LM's ``pretrain(...)``. Call it on all ranks, before ``pretrain``::

        from moe_ckpt import megatron

        megatron.install(policy=Dense(every_n_steps=10), dirpath="/shared/my_run")
        pretrain(...)

    Training resumes from the newest checkpoint in ``dirpath``; without one from ``--load``, or as a new run. Megatron's
    own ``--save`` and ``--load`` still work, but are not needed.

    Args:
        policy: As in ``megatron.attach``.
        dirpath: As in ``megatron.attach``.
        stateful: As in ``megatron.attach``.
        **options: As in ``megatron.attach``.

    Returns:
        The installed adapter; its ``checkpoint`` is the result of ``attach``, once there is a model.

    Raises:
        ConfigError: An impossible setting, a second call, or Megatron-LM cannot be imported.
        UnsupportedError: This version of Megatron-LM lacks a function that is needed, or ``state_from`` is set.
    """
    global _installed
    chosen = megatron_options("megatron.install", policy, dirpath, options)
    if _installed is not None:
        raise ConfigError(
            f"megatron.install() was called twice in this process, for {_installed.options.dirpath} and for "
            f"{chosen.dirpath}: call it once, before pretrain()"
        )
    logs_messages = chosen.memory is not None and chosen.memory.upstream_bytes is not None
    replaced = REPLACED_WITH_LOG if logs_messages else REPLACED
    training = find_training(replaced)
    _installed = MegatronLM(training, chosen, tuple(replaced), stateful or {})
    atexit.register(_warn_unused, _installed)
    return _installed


def _warn_unused(installed: MegatronLM) -> None:
    """Warns at exit if nothing was checkpointed because no model was set up after ``install``, or that failed."""
    if installed.checkpoint is not None or installed is not _installed or os.environ.get("RANK", "0") != "0":
        return
    why = "no model was set up after it, so nothing was checkpointed: call it before pretrain()"
    if installed.setting_up:
        why = "setting up model and checkpoints failed, so this start saved nothing: the error above says why"
    announce("megatron.install(dirpath=%r) was called, but %s", installed.options.dirpath, why, level=logging.WARNING)


def find_training(replaced: Mapping[str, tuple[str, tuple[str, ...]]]) -> Any:
    """Returns the module ``megatron.training.training``, checked. Raises as ``install``.

    Args:
        replaced: The functions that will be replaced, as ``REPLACED``.
    """
    try:
        training = importlib.import_module(TRAINING)
    except ImportError as error:
        raise ConfigError(
            f"megatron.install() needs {TRAINING}, which cannot be imported ({error}): it is in Megatron-LM's source "
            "tree, not in the package megatron-core. Put that tree on PYTHONPATH, or, in a training loop of your own, "
            "use megatron.attach"
        ) from error
    absent = list(_missing_names(training, replaced))
    if absent:
        raise unknown_release(", no ".join(absent))
    for module, name in USED:
        look_up(module, name)
    return training


def _missing_names(training: Any, replaced: Mapping[str, tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    """Yields what of ``replaced`` this version lacks."""
    for name, (caller, parameters) in replaced.items():
        absent = [function for function in (name, caller) if not callable(getattr(training, function, None))]
        if absent:
            yield from (f"{TRAINING}.{function}" for function in absent)
            continue
        if name not in inspect.unwrap(getattr(training, caller)).__code__.co_names:
            yield f"{TRAINING}.{caller} calling {name}"
        accepted = inspect.signature(getattr(training, name)).parameters
        yield from (f"{TRAINING}.{name}({parameter})" for parameter in parameters if parameter not in accepted)


class MegatronLM:
    """Megatron-LM's training functions with checkpoints, in this process. ``_<name>`` replaces function ``<name>``.

    Args:
        training: Their module.
        options: As given, checked.
        replaced: Names of the functions.
        stateful: As of ``attach``.

    Attributes:
        checkpoint: The result of ``attach``; None until ``pretrain`` has built the model.
        setting_up: ``pretrain`` has begun to build it.
        options: As given, checked.
    """

    def __init__(
        self,
        training: Any,
        options: Options,
        replaced: Sequence[str],
        stateful: Mapping[str, Stateful],
    ) -> None:
        self.checkpoint: MegatronCheckpoint | None = None
        self.setting_up = False
        self.options = options
        self._training = training
        self._stateful = stateful
        self._updated, self._exits = True, False  # of the newest step: it updated weights; all ranks will exit
        self._floating_point_operations: Any = 0
        self._iteration: StartedIteration | None = None
        self._late_validation = LateValidation()
        self._original: dict[str, Callable[..., Any]] = {name: getattr(training, name) for name in replaced}
        for name in replaced:
            setattr(training, name, getattr(self, f"_{name}"))

    def remove(self) -> None:
        """Restores Megatron-LM's functions, and closes the checkpoint."""
        global _installed
        for name, function in self._original.items():
            setattr(self._training, name, function)
        if self.checkpoint is not None:
            self.checkpoint.close()
        _installed = None

    @property
    def _args(self) -> Any:
        return importlib.import_module("megatron.training.global_vars").get_args()

    @property
    def _attached(self) -> MegatronCheckpoint:
        if self.checkpoint is None:
            raise ConfigError("megatron.install(): training began without setup_model_and_optimizer")
        return self.checkpoint

    def _bound(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Returns the arguments of a call of Megatron's function ``name``, by name."""
        return inspect.signature(self._original[name]).bind(*args, **kwargs)

    # --- once ---

    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.setting_up, settings = True, self._args
        require_trainable(settings)
        names = "--dataloader-type external", "args.consumed_train_samples"
        warn_of_loader(settings, self._stateful, "megatron.install", *names)
        if self.checkpoint is not None:  # restarted within this process
            self.checkpoint.close(CLOSE_SECS)
            self.checkpoint = None
        dirpath, stored_step = self.options.dirpath, None
        if self.options.resume != "never":
            doing = f"read the store {dirpath}"
            stored_step = from_rank_zero(lambda: newest_step(dirpath), doing, self.options.timeout_secs)
        with changed_attributes(
            settings, **({} if stored_step is None else {"load": None, "pretrained_checkpoint": None})
        ):
            built = self._original["setup_model_and_optimizer"](*args, **kwargs)
        model, optimizer, scheduler = built[:3]
        self.checkpoint = MegatronCheckpoint(
            self.options, model, optimizer, scheduler, self._stateful, self._count_update
        )
        discard_tokens_of_reruns(self.checkpoint)
        progress = self.checkpoint.resume(
            functools.partial(self._progress_of_load, settings) if settings.iteration else None
        )
        self._set_counters(settings, progress)
        self._late_validation.agree(self.checkpoint, settings, progress)
        if stored_step is not None:
            self._warn_of_newer_load(settings, progress.iteration)
        return built

    def _progress_of_load(self, settings: Any) -> Progress:
        """Returns the position of the state that ``--load`` has loaded, where the store has no checkpoint."""
        if is_rank_zero():
            announce(
                "no checkpoint is loaded from %s: training continues at iteration %d of --load %s",
                self.options.dirpath,
                settings.iteration,
                settings.load,
            )
        return Progress(
            settings.iteration,
            settings.consumed_train_samples,
            restored=True,
            counters=counters_of(settings, getattr(settings, "num_floating_point_operations_so_far", 0)),
        )

    def _set_counters(self, settings: Any, progress: Progress) -> None:
        """Sets Megatron's counters as its ``load_checkpoint`` does."""
        settings.iteration = progress.iteration
        set_counters(settings, progress)
        self._floating_point_operations = progress.counters.get("num_floating_point_operations_so_far", 0)
        if is_rank_zero() and settings.train_iters is not None and progress.iteration >= settings.train_iters:
            announce(
                "%s is at iteration %d, and --train-iters is %d: there is nothing left to train",
                self.options.dirpath,
                progress.iteration,
                settings.train_iters,
            )

    def _warn_of_newer_load(self, settings: Any, iteration: int) -> None:
        """Warns if ``--load`` has a newer iteration than the checkpoint that was loaded instead."""
        if settings.load is None or not is_rank_zero():
            return
        try:
            with open(os.path.join(settings.load, _TRACKER)) as file:
                newer = int(file.read())
        except (OSError, ValueError):
            return
        if newer > iteration:
            announce(
                "--load %s is at iteration %d, but was not loaded: the checkpoint in %s was, which is at iteration %d. "
                "To continue from --load, give megatron.install another dirpath",
                settings.load,
                newer,
                self.options.dirpath,
                iteration,
                level=logging.WARNING,
            )

    def _build_train_valid_test_data_loaders(self, *args: Any, **kwargs: Any) -> Any:
        with self._late_validation.counted(self._args):
            built = self._original["build_train_valid_test_data_loaders"](*args, **kwargs)
        give_generators(built, self._args.iteration)
        return built

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        ckpt, self._exits = self._attached, False
        self._late_validation.arguments = self._bound("train", args, kwargs).arguments
        try:
            result = self._original["train"](*args, **kwargs)
            self._late_validation.run(ckpt, self._args, self._evaluate_and_print_results)  # no iteration was left
        except BaseException as error:
            if isinstance(error, SystemExit) and self._exits:
                self._finish()
            else:  # also if this rank alone exits, so that the others would not answer
                close_guarded(uninterrupted, ckpt.close, error)
            raise
        self._finish()
        return result

    def _finish(self) -> None:
        """Ends the run; only the job, if a time limit, a signal or an interval ended it, and another one continues."""
        last = self._args.train_iters
        self._attached.finish(ended=last is None or self._attached.iteration >= last)

    # --- every iteration ---

    def _train_step(self, *args: Any, **kwargs: Any) -> Any:
        ckpt = self._attached
        ckpt.begin_training()
        if ckpt.upstream is not None:
            ckpt.upstream.boundary.begin()
        self._late_validation.run(ckpt, self._args, self._evaluate_and_print_results)
        with ckpt.stopwatch:
            scheduler = self._bound("train_step", args, kwargs).arguments["opt_param_scheduler"]
            self._iteration = StartedIteration(ckpt, self._args, self._training, scheduler)
        result = self._original["train_step"](*args, **kwargs)
        if not isinstance(result, tuple) or len(result) < 4:
            raise unknown_release(
                f"{TRAINING}.train_step returning (losses, skipped, should checkpoint, should exit, ...)"
            )
        self._updated, self._exits = not result[1], bool(result[3])
        return result

    def _count_update(self) -> bool:
        return self._iteration is not None and self._iteration.count(self._floating_point_operations)

    def _dummy_train_step(self, *args: Any, **kwargs: Any) -> Any:
        ckpt, settings = self._attached, self._args
        ckpt.begin_training()
        self._late_validation.run(ckpt, settings, self._evaluate_and_print_results)
        result = self._original["dummy_train_step"](*args, **kwargs)
        samples = samples_of_iteration()  # which the loop counts when this returns
        counters = counters_of(settings, self._floating_point_operations)
        if "skipped_train_samples" in counters:
            counters["skipped_train_samples"] += samples
        ckpt.skip(ckpt.iteration + 1, settings.consumed_train_samples + samples, counters=counters)
        return result

    def _checkpoint_and_decide_exit(self, *args: Any, **kwargs: Any) -> Any:
        ckpt, settings = self._attached, self._args
        arguments = self._bound("checkpoint_and_decide_exit", args, kwargs).arguments
        iteration = arguments["iteration"]
        self._floating_point_operations = arguments["num_floating_point_operations_so_far"]
        stage = ckpt.upstream
        is_alone = stage is not None and stage.boundary.is_alone
        ckpt.after_step(
            iteration,
            consumed_samples=settings.consumed_train_samples,
            updated=self._updated,
            counters=counters_of(settings, self._floating_point_operations),
        )
        if stage is not None:
            stage.boundary.rest()
        if is_alone:  # all ranks saved and decided when the iteration was computed first
            self._exits = False
            return False
        interval = getattr(settings, "save_interval", None)
        if interval and iteration % interval == 0:
            ckpt.save(wait=False)
        # A replayed iteration did not end the run the first time; if it did now, every restart would end there.
        again = {"exit_interval": None, "phase_transition_iterations": None} if ckpt.replaying else {}
        with changed_attributes(settings, **again):
            self._exits = self._original["checkpoint_and_decide_exit"](*args, **kwargs)
        return self._exits

    def _training_log(self, *args: Any, **kwargs: Any) -> Any:
        """Logs the first iteration of a start like any other, since stages may begin at different iterations."""
        call = self._bound("training_log", args, kwargs)
        call.arguments["is_first_iteration"] = False
        return self._original["training_log"](*call.args, **call.kwargs)

    def _evaluate_and_print_results(self, *args: Any, **kwargs: Any) -> Any:
        stage, settings = self._attached.upstream, self._args
        with contextlib.ExitStack() as within:
            if self._iteration is not None:
                within.enter_context(self._iteration.validating())
            if stage is not None and can_draw_batches(settings):
                if stage.boundary.is_alone:
                    call = self._bound("evaluate_and_print_results", args, kwargs)
                    return draw_batches(settings, call.arguments["data_iterator"])
                within.enter_context(stage.boundary.aside())
            return self._original["evaluate_and_print_results"](*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Saves Megatron's own checkpoint; without ``--save`` one in the store; in a replay none."""
        ckpt = self.checkpoint
        if ckpt is None:
            return self._original["save_checkpoint"](*args, **kwargs)
        if ckpt.replaying:
            tell_of_unwritten(self._bound("save_checkpoint", args, kwargs).arguments["iteration"])
            return None
        if self._args.save is None:  # the rerun machine asks for one whether or not there is --save
            ckpt.save()
            return None
        return self._original["save_checkpoint"](*args, **kwargs)
