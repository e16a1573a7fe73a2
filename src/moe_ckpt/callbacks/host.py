"""The host of a Lightning trainer: its step, its plain state, read and restored, and the end of its run.

The last checkpoint is of the last batch. Lightning's work after that (the last validation, the end of the epoch, files
of other callbacks) is repeated by a run that died in between, but must not be repeated by a run that finished.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)

from moe_ckpt.callbacks.compat import Private
from moe_ckpt.callbacks.lightning_state import (
    HYPER_PARAMETERS,
    capture_checkpoint,
    check_state,
    plain_hparams,
    restore_checkpoint,
)
from moe_ckpt.callbacks.loop_position import count_steps
from moe_ckpt.driver.changes import (
    Change,
    Groups,
    are_equal,
    changes_between,
    groups_of,
    optimizer_changes,
    plain_values,
    schedules_of,
)
from moe_ckpt.driver.host import End
from moe_ckpt.driver.torch_model import TorchHost
from moe_ckpt.errors import finished_run
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.format.run_records import Finished
from moe_ckpt.modeling.names import is_compiled
from moe_ckpt.modeling.routing import TrainingPasses
from moe_ckpt.recovery.executing import Restored, rank_of_state
from moe_ckpt.recovery.replay import Repeated
from moe_ckpt.recovery.resume import other_ranks
from moe_ckpt.run.options import Options

if TYPE_CHECKING:
    from moe_ckpt.windows.lightning import Windows

log = logging.getLogger("moe_ckpt")

_Plain = Mapping[str, Any]
_UNLIMITED = -1


class LightningHost(TorchHost):
    """The trainer of one fit, from ``on_fit_start`` on.

    Args:
        trainer: The trainer.
        module: The model.
        options: Of the run.

    Attributes:
        count_update: See ``driver.host.Host``; set by the fit.
        windows: Checks of sparse windows; None if none is written or replayed.
        passes: Tells which forward passes are training's.
        settled: The newest batch made a step, so no accumulated gradients wait for another batch.
        ended: Training ended without an exception.
    """

    module: pl.LightningModule
    count_update: Callable[[], bool]

    def __init__(self, trainer: Any, module: pl.LightningModule, options: Options) -> None:
        super().__init__(module, trainer.optimizers)
        self.trainer = trainer
        self.windows: Windows | None = None
        self.passes = TrainingPasses()
        self.settled, self.ended = True, False
        self._options = options
        self._configured = {**self._configured, **_configured(trainer)}
        self._retained_state: tuple[int, _Plain] | None = None

    @property
    def step(self) -> int:
        return int(self.trainer.global_step)

    def admits(self, manifest: Manifest, plain: _Plain) -> None:
        rank = rank_of_state(manifest, self.trainer.global_rank)
        check_state(self.trainer, plain, state_path(manifest.slots[0].directory, rank))
        super().admits(manifest, plain)

    def load(self, restored: Restored) -> tuple[Sequence[Change], str | None]:
        plain = restored.plain
        thawed = self._load_model(plain, restored.path)
        differences = changes(self.trainer, plain, self._configured) + thawed
        self._configured = plain["configured"]
        restore_checkpoint(self.trainer, plain["checkpoint"], restored.path)
        return differences, other_ranks(restored.manifest, self.trainer.world_size)

    @property
    def _scheduled(self) -> Iterable[Any]:
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return [*schedulers, getattr(self.trainer.precision_plugin, "scaler", None)]

    def _count_from(self, step: int) -> None:
        count_steps(self.trainer, step)

    def continue_finished(
        self, manifest: Manifest, finished: Finished, differences: Sequence[Change], plt: float
    ) -> tuple[bool, str]:
        """Decides whether the start of a finished run trains on, and warns of it. The last checkpoint is restored.

        False if nothing is left to train, so that ``fit`` returns at once with the final state.

        Raises:
            ConfigError: Hyperparameters have changed without resume="extend"; or nothing is left to train, and the run
                had another policy.
        """
        dirpath, extend = self._options.dirpath, self._options.resume == "extend"
        if not extend and any(change.decides for change in differences):
            changed, retained = (
                tuple(str(change) for change in differences if change.from_checkpoint or not only)
                for only in (False, True)
            )
            raise finished_run(dirpath, manifest.step, finished.reason, changed, retained)
        _mark_saved(self.trainer, finished)
        goes_on = _has_work_left(self.trainer, finished, extend=extend)
        if not goes_on:
            if not extend and (changed := _other_policy(manifest.policy, self._options.policy.describe())):
                raise finished_run(dirpath, manifest.step, finished.reason, changed)
            if not any(isinstance(callback, StochasticWeightAveraging) for callback in self.trainer.callbacks):
                _leave(self.trainer, finished)
        if self.trainer.is_global_zero:
            end = f"{dirpath} is finished ({finished.reason}, at step {finished.step}, PLT {plt:.2%})"
            limits = [f"{name}={value}" for name, value in _limits(self.trainer).items() if value != _UNLIMITED]
            log.warning(
                f"the run in %s and is extended: training continues to {', '.join(limits) or 'no limit'}"
                if goes_on
                else "the run in %s: nothing is left to train. For another experiment choose another dirpath; to train "
                "longer, raise max_steps or max_epochs, or set resume='extend'",
                end,
            )
        return goes_on, ""

    def repeated(self, before: _Plain, recorded: _Plain) -> Iterable[Repeated]:
        return *super().repeated(before, recorded), *_REPEATED

    def capture(self, *, described: bool = False) -> _Plain:
        if self._retained_state is not None and self._retained_state[0] == self.step:
            return self._retained_state[1]
        return {
            "framework": "lightning",
            "checkpoint": capture_checkpoint(self.trainer),
            "plain": self.state.plain(described=described),
            "rng": self.generators.state,
            "configured": self._configured,
        }

    def keep(self) -> None:
        """Keeps the plain state of this step: Lightning and callbacks may change it before training ends."""
        self._retained_state = self.step, deepcopy(self.capture())

    @property
    def has_newest_state(self) -> bool:
        """Returns whether the newest step's plain state is still known, so that a checkpoint of it can be made now."""
        return self.settled or (self._retained_state is not None and self._retained_state[0] == self.step)

    def end(self) -> End | None:
        """Returns the reason for the end of the run. Called in ``on_train_end``, after all other callbacks.

        None if the reason may not hold at the next start: a signal, a time limit, a user's callback.
        """
        reason = _reason(self.trainer)
        if reason is None:
            return None
        others = [callback for callback in self.trainer.callbacks if not hasattr(callback, "state_in_own_store")]
        states = {callback.state_key: state for callback in others if (state := callback.state_dict())}
        return End(reason, _limits(self.trainer), states)


_REPEATED: tuple[Repeated, ...] = (
    ("the state of the learning rate schedulers", lambda state: state["checkpoint"]["lr_schedulers"]),
    (
        "the number of batches",
        lambda state: state["checkpoint"]["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"],
    ),
)


def _configured(trainer: Any) -> dict[str, Any]:
    """Returns the script's hyperparameters of schedulers, and its settings, as plain data.

    Called before those of a checkpoint replace them, to be compared with the result at the beginning of the run.
    """
    return {
        "schedulers": [plain_values(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "training": _training(trainer),
    }


def _training(trainer: Any) -> dict[str, Any]:
    """Returns further settings that decide which steps are made, and by which programs."""
    scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
    return {
        **({} if scheduled else {"accumulate_grad_batches": trainer.accumulate_grad_batches}),
        "limit_train_batches": trainer.limit_train_batches,
        "schedules": [name for config in trainer.lr_scheduler_configs for name in schedules_of(config.scheduler)],
        "gradient_clip_val": trainer.gradient_clip_val,
        "precision": str(trainer.precision),
        "torch.compile": is_compiled(trainer.lightning_module),
    }


def changes(trainer: Any, stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Returns the differences between a checkpoint and this script, in the script's order.

    Args:
        trainer: Of this script, with optimizers as they are in the checkpoint.
        stored: Plain state of the checkpoint.
        now: What ``LightningHost`` has found configured in this script.
    """
    differences: list[Change] = []
    checkpoint, before = stored["checkpoint"], stored["configured"]
    for name, owner, key in zip(
        ("module", "datamodule"), (trainer.lightning_module, trainer.datamodule), HYPER_PARAMETERS, strict=True
    ):
        if owner is not None and key in checkpoint:
            differences += changes_between(
                f"{name}.", checkpoint[key], plain_hparams(owner, key), from_checkpoint=False
            )
    optimizers = before["optimizers"]
    if not before["schedulers"]:  # else the present values are the schedulers'
        facts = zip(optimizers, now["optimizers"], groups_of(trainer.optimizers), strict=False)
        optimizers = [_in_force(*of_one) for of_one in facts]
    differences += optimizer_changes(optimizers, now["optimizers"])
    for old, new in zip(before["schedulers"], now["schedulers"], strict=False):
        old, new = ({key: value for key, value in settings.items() if key != "base_lrs"} for settings in (old, new))
        differences += changes_between("scheduler ", old, new, from_checkpoint=True, decides=False)
    differences += changes_between(
        "trainer ", before["training"], now["training"], from_checkpoint=False, decides=False
    )
    return differences


def _in_force(before: Groups, now: Groups, groups: Groups) -> Groups:
    """Returns ``before``; values that differ from the script's are replaced by those that training had set since."""
    in_force: list[Mapping[str, Any]] = []
    for old, new, group in zip(before, now, groups, strict=False):
        set_since = {key: group[key] for key in old if key in group and not are_equal(old[key], new.get(key))}
        in_force.append({**old, **set_since})
    return in_force


# --- the end of a run ---


def _reason(trainer: Any) -> str | None:
    limits = _limits(trainer)
    if _UNLIMITED < limits["max_steps"] <= trainer.global_step:
        return f"max_steps={limits['max_steps']}"
    epochs = trainer.fit_loop.epoch_progress.current.processed
    # Lightning also counts an epoch that was interrupted.
    if trainer.is_last_batch and _UNLIMITED < limits["max_epochs"] <= epochs:
        return f"max_epochs={limits['max_epochs']}"
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping) and (
            callback.stopped_epoch > 0 or getattr(callback, "stopping_reason_message", None) is not None
        ):
            return "EarlyStopping"
    return None


def _limits(trainer: Any) -> dict[str, int]:
    return {
        "max_steps": trainer.max_steps,
        "max_epochs": _UNLIMITED if trainer.max_epochs is None else trainer.max_epochs,
    }


def _other_policy(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns how two policies differ, as text. Options that only one release has do not count."""
    if before.get("name") != now["name"]:
        return (f"policy {before.get('name')} -> {now['name']}",)
    both = before.keys() & now.keys()
    old, new = ({key: values[key] for key in sorted(both)} for values in (before, now))
    return tuple(str(change) for change in changes_between(f"policy {now['name']} ", old, new, from_checkpoint=False))


def _has_work_left(trainer: Any, finished: Finished, *, extend: bool) -> bool:
    if will_stop(trainer):
        return False
    if finished.reason != "EarlyStopping":
        return True
    if not any(isinstance(callback, EarlyStopping) for callback in trainer.callbacks):
        return True  # the user removed the callback that ended the run
    now = _limits(trainer)
    limits = [(now[name], before) for name, before in finished.limits.items() if name in now]
    raised = any(old > _UNLIMITED and (new == _UNLIMITED or new > old) for new, old in limits)
    return extend or raised or not may_stop(trainer)


def _mark_saved(trainer: Any, finished: Finished) -> None:
    """Restores the last state of other checkpoint callbacks, so that they do not save their last file again."""
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.state_key in finished.callbacks:
            callback.load_state_dict(dict(finished.callbacks[callback.state_key]))
            Private(callback).last_global_step_saved = trainer.global_step
            Private(callback).last_checkpoint_saved = callback.last_model_path


def _leave(trainer: Any, finished: Finished) -> None:
    """Moves loops and callbacks from the last batch to the end of training, so that ``fit`` has nothing to do."""
    for callback in trainer.callbacks:
        if callback.state_key in finished.callbacks:
            callback.load_state_dict(dict(finished.callbacks[callback.state_key]))
    take_averages(trainer)
    progress = trainer.fit_loop.epoch_progress
    progress.increment_processed()
    progress.increment_completed()
    trainer.should_stop = trainer.should_stop or finished.reason == "EarlyStopping"


def take_averages(trainer: Any) -> None:
    """Loads averaged weights, which are a run's result, into the model of a run that trains no more."""
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging) and Private(callback).average_model is not None:
            callback.on_train_end(trainer, trainer.lightning_module)


def will_stop(trainer: Any) -> bool:
    """Returns whether the batch that just ended is the last one, as far as Lightning knows."""
    if trainer.should_stop and may_stop(trainer):
        return True
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    limit = trainer.max_epochs
    return trainer.is_last_batch and limit not in (None, -1) and trainer.current_epoch + 1 >= limit


def may_stop(trainer: Any) -> bool:
    """Returns whether Lightning will stop on ``trainer.should_stop``. Called at the end of a batch."""
    epochs = trainer.current_epoch + bool(trainer.is_last_batch)
    return bool(trainer.global_step >= (trainer.min_steps or 0) and epochs >= (trainer.min_epochs or 0))
