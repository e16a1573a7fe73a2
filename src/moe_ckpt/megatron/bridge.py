"""The callback of Megatron-Bridge::

    from moe_ckpt.megatron.bridge import MoECheckpointCallback

    pretrain(config, forward_step, callbacks=[MoECheckpointCallback(Dense(every_n_steps=10), dirpath="/shared/my_run")])

It imports nothing of Megatron-Bridge, which takes any object with methods of its events' names.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from moe_ckpt.driver.host import Stateful
from moe_ckpt.driver.run import CLOSE_SECS
from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.checkpoint import MegatronCheckpoint, megatron_options
from moe_ckpt.megatron.compat import Wrapped
from moe_ckpt.megatron.host import Progress
from moe_ckpt.megatron.script import (
    counters_of,
    discard_tokens_of_reruns,
    give_generators,
    left_out_of_iteration,
    samples_of_iteration,
    set_counters,
    tell_of_unwritten,
    warn_of_loader,
)
from moe_ckpt.policies.base import Policy
from moe_ckpt.run.options import OptionValues

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MoECheckpointCallback"]

PRETRAIN = "megatron.bridge.training.pretrain"
"""Its global ``train`` is the training loop, which ends a job early by ``sys.exit`` and fires no event then."""
LOOP = "megatron.bridge.training.train"
"""Its global ``save_checkpoint_and_time`` saves checkpoints of Bridge's own."""
LOADERS = "megatron.bridge.data.loaders"
"""Its global ``build_train_valid_test_data_loaders`` makes loaders, one of which is first iterated by a validation."""


class MoECheckpointCallback:
    """Checkpoints ``pretrain`` of Megatron-Bridge, and resumes it from the newest checkpoint at the next start.

    A restart has the weights, the optimizer, the schedule, the random numbers and the counters of the run, set before
    Bridge opens its data. Bridge's own ``checkpoint.save`` and ``load`` still work, but are not needed. A validation at
    which training was killed is not made again. The operations counted so far, which Bridge logs, lack those of the
    newest iteration.

    Args:
        policy: Decides what is saved at which step. None: ``CheckFreq()``.
        dirpath: The store, a directory that all ranks see, or an fsspec URL. One run per store.
        stateful: As of ``megatron.attach``. With it, this callback must be the last of those with an
            ``on_train_step_end``, so that it saves what the others have changed.
        **options: See ``moe_ckpt.run.options.Options``.

    Attributes:
        checkpoint: The result of ``attach``; None until Bridge has built the model.

    Raises:
        ConfigError: Options contradict each other.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        dirpath: str | os.PathLike[str] = "checkpoints",
        stateful: Mapping[str, Stateful] | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        self._options = megatron_options("MoECheckpointCallback", policy, dirpath, options)
        memory = self._options.memory
        if memory is not None and memory.upstream_bytes is not None:
            raise ConfigError(
                "MoECheckpointCallback(memory=Memory(upstream_bytes=...)): between two iterations Megatron-Bridge lets "
                "all stages communicate, which a stage that computes iterations again alone cannot. Leave it out, so "
                "that all ranks go back"
            )
        self._stateful = stateful or {}
        self.checkpoint: MegatronCheckpoint | None = None

    # --- events of Megatron-Bridge ---

    def on_data_init_start(self, context: Any) -> None:
        """Model, optimizer and scheduler are complete, and no dataset is open yet: attaches and resumes."""
        settings, position = context.state.cfg, context.state.train_state
        if settings.validation.skip_train:
            raise ConfigError(
                "MoECheckpointCallback: validation.skip_train is set, so nothing is trained. Leave the callback out"
            )
        names = "dataloader_type='external'", "train_state.consumed_train_samples"
        warn_of_loader(settings.dataset, self._stateful, "MoECheckpointCallback", *names)
        if self.checkpoint is not None:  # restarted within this process
            self.checkpoint.close(CLOSE_SECS)
        loaded = Progress(position.step, position.consumed_train_samples, position.step > 0, _counters(position))
        ckpt = self.checkpoint = MegatronCheckpoint(
            self._options, context.model, context.optimizer, context.scheduler, self._stateful
        )
        progress = ckpt.resume((lambda: loaded) if loaded.restored else None)
        ckpt._driver.say.passed_over(progress.iteration, loaded.iteration)
        position.step = progress.iteration
        set_counters(position, progress)
        operations = vars(position).pop("num_floating_point_operations_so_far", 0)  # Bridge's name is another
        position.floating_point_operations_so_far = operations
        discard_tokens_of_reruns(ckpt)
        for name, function, around in (
            (LOADERS, "build_train_valid_test_data_loaders", self._build_loaders),
            (LOOP, "save_checkpoint_and_time", self._save_own),
            (PRETRAIN, "train", self._run),  # its exits and errors fire no event
        ):
            module = sys.modules.get(name)
            if hasattr(module, function):  # else it is a loop of the user's own that fires the events itself
                ckpt._undo.callback(Wrapped(module, function, around).close)

    def on_train_step_start(self, context: Any) -> None:
        """Counts the iterations before this one that Bridge has skipped, which fire no events."""
        ckpt = self._attached
        position = context.state.train_state
        for iteration in range(ckpt.iteration + 1, position.step + 1):
            ckpt.skip(iteration, position.consumed_train_samples, counters=_counters(position))

    def on_train_step_end(self, context: Any) -> None:
        """Counts the iteration, as Bridge does after this event, and starts a checkpoint if one is due."""
        ckpt, settings, position = self._attached, context.state.cfg, context.state.train_state
        if not ckpt._host.loop.is_updating:  # the rerun machine ends the job, and no update was made
            return
        iteration, counters = position.step + 1, _counters(position)
        counters["skipped_train_samples"] += left_out_of_iteration()
        if _is_validated(settings.validation, iteration, is_on=position.do_valid):
            rounds = settings.validation.eval_iters
            counters["consumed_valid_samples"] += rounds * settings.validation.eval_global_batch_size
        consumed = position.consumed_train_samples + samples_of_iteration()
        updated = not context.skipped_iter
        ckpt.after_step(iteration, consumed_samples=consumed, updated=updated, counters=counters)

    def on_train_end(self, context: Any) -> None:
        """Leaves a complete checkpoint: all iterations are done."""
        self.on_train_step_start(context)
        self._attached.finish()

    # --- functions of Megatron-Bridge ---

    @property
    def _attached(self) -> MegatronCheckpoint:
        if self.checkpoint is None:
            raise ConfigError(
                "MoECheckpointCallback: this Megatron-Bridge fired no on_data_init_start before training, so nothing "
                "was attached. It was written for Megatron-Bridge 0.7"
            )
        return self.checkpoint

    def _require_last(self, manager: Any) -> None:
        """Raises ``ConfigError`` if a callback behind this one may change ``stateful`` objects once they were saved."""
        methods = [] if manager is None or not self._stateful else manager.list_callbacks("on_train_step_end")
        behind = methods[methods.index(self.on_train_step_end) + 1 :] if self.on_train_step_end in methods else []
        if behind:
            name = getattr(behind[0], "__qualname__", repr(behind[0]))
            raise ConfigError(
                f"MoECheckpointCallback(stateful=...): {name} comes behind it, so what that changes would be saved one "
                "iteration late. Give MoECheckpointCallback as the last of the callbacks"
            )

    def _build_loaders(self, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loaders = build(*args, **kwargs)
        give_generators(loaders, self._attached.iteration)
        return loaders

    def _save_own(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ckpt = self._attached
        if not ckpt.replaying:
            return save(*args, **kwargs)
        tell_of_unwritten(ckpt.iteration)
        return None

    def _run(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            self._require_last(kwargs.get("callback_manager"))
            return train(*args, **kwargs)
        except BaseException as error:
            code = inspect.unwrap(train).__code__
            if isinstance(error, SystemExit) and _is_raised_by(code, error.__traceback__):
                self._attached.finish(ended=False)  # a signal, a time limit or an interval: another job continues
            else:  # also an exit of this rank alone
                self._attached.close(CLOSE_SECS, error)
            raise


def _counters(position: Any) -> dict[str, Any]:
    """Returns Bridge's counters beside iteration and samples, under the names of Megatron-LM.

    Args:
        position: Bridge's ``TrainState``.
    """
    return counters_of(position, position.floating_point_operations_so_far)


def _is_validated(validation: Any, iteration: int, *, is_on: bool) -> bool:
    """Returns whether Bridge makes a validation after ``iteration``."""
    begins_at = validation.start_eval_at_iter
    is_due = bool(validation.eval_interval) and iteration % validation.eval_interval == 0
    return is_on and is_due and (begins_at is None or iteration >= begins_at)


def _is_raised_by(code: CodeType, trace: TracebackType | None) -> bool:
    """Returns whether a function itself raised the error, and not a function that it called."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is code
