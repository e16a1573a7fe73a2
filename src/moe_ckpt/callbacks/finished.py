"""The end of a run under Lightning: its reason, and what a start of the same script does afterwards.

The last checkpoint is of the last batch. Lightning's work after that (the last validation, the end of the epoch, files
of other callbacks) is repeated by a run that died in between, but must not be repeated by a run that finished.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging

from moe_ckpt.callbacks.compat import Private
from moe_ckpt.callbacks.support import STATE_KEY
from moe_ckpt.driver.changes import Change, differing
from moe_ckpt.driver.host import End
from moe_ckpt.errors import finished_run
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.run_records import Finished
from moe_ckpt.run.options import Options

log = logging.getLogger("moe_ckpt")

_UNLIMITED = -1


def ended(trainer: Any) -> End | None:
    """Returns the reason for the end of the run. Called in ``on_train_end``, after all other callbacks.

    None if the reason may not hold at the next start: a signal, a time limit, a user's callback.
    """
    reason = _reason(trainer)
    if reason is None:
        return None
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    return End(reason, _limits(trainer), {key: state for key, state in states.items() if state and key != STATE_KEY})


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


def continue_finished(
    trainer: Any, options: Options, manifest: Manifest, finished: Finished, differences: Sequence[Change], plt: float
) -> bool:
    """Decides whether the start of a finished run trains on, and warns of it. The last checkpoint is restored.

    Args:
        trainer: Of this script.
        options: Of this script.
        manifest: Of the last checkpoint.
        finished: How the run ended.
        differences: How this script's hyperparameters differ from the run's.
        plt: The run's portion of lost tokens.

    Returns:
        False if nothing is left to train, so that ``fit`` returns at once with the final state.

    Raises:
        ConfigError: Hyperparameters have changed without resume="extend"; or nothing is left to train, and the run had
            another policy.
    """
    dirpath, extend = options.dirpath, options.resume == "extend"
    if not extend and any(change.decides for change in differences):
        changed, retained = (
            tuple(str(change) for change in differences if change.from_checkpoint or not only) for only in (False, True)
        )
        raise finished_run(dirpath, manifest.step, finished.reason, changed, retained)
    _mark_saved(trainer, finished)
    goes_on = _has_work_left(trainer, finished, extend=extend)
    if not goes_on:
        if not extend and (changed := _other_policy(manifest.policy, options.policy.describe())):
            raise finished_run(dirpath, manifest.step, finished.reason, changed)
        if not any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
            _leave(trainer, finished)
    if trainer.is_global_zero:
        end = f"{dirpath} is finished ({finished.reason}, at step {finished.step}, PLT {plt:.2%})"
        limits = [f"{name}={value}" for name, value in _limits(trainer).items() if value != _UNLIMITED]
        log.warning(
            f"the run in %s and is extended: training continues to {', '.join(limits) or 'no limit'}"
            if goes_on
            else "the run in %s: nothing is left to train. For another experiment choose another dirpath; to train "
            "longer, raise max_steps or max_epochs, or set resume='extend'",
            end,
        )
    return goes_on


def _other_policy(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns how two policies differ, as text. Options that only one release has do not count."""
    if before.get("name") != now["name"]:
        return (f"policy {before.get('name')} -> {now['name']}",)
    both = before.keys() & now.keys()
    old, new = ({key: values[key] for key in sorted(both)} for values in (before, now))
    return tuple(str(change) for change in differing(f"policy {now['name']} ", old, new, from_checkpoint=False))


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
        if isinstance(callback, WeightAveraging) and Private(callback).average_model is not None:
            callback.on_train_end(trainer, trainer.lightning_module)  # averaged weights are the run's result
    progress = trainer.fit_loop.epoch_progress
    progress.increment_processed()
    progress.increment_completed()
    trainer.should_stop = trainer.should_stop or finished.reason == "EarlyStopping"


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
