"""The end of a run under Lightning: what ended it, and what becomes of it when the script is started again.

The last checkpoint is of the last batch: what Lightning does after that (the last validation, the end of the epoch,
what other callbacks save there) is done again by a run that died in it, and must not be by one that got through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging

from moe_ckpt.callbacks.hyperparameters import Change
from moe_ckpt.callbacks.stopping import may_stop, will_stop
from moe_ckpt.engine.finishing import write_finished
from moe_ckpt.errors import FinishedRunError
from moe_ckpt.format.finished import Finished
from moe_ckpt.format.manifest import Manifest, parse_step_dir
from moe_ckpt.storage.base import Storage

_UNLIMITED = -1


def note_end(trainer: Any, storage: Storage, newest: str | None, ours: str) -> None:
    """Write down that the run is finished, at ``on_train_end`` behind all other callbacks, on rank 0.

    Not if training ended for a reason that may be gone at the next start: a signal, a time limit, a callback of the
    user's, a guard.

    Args:
        trainer: Whose training ended.
        storage: The store.
        newest: Directory of the last checkpoint; the run is noted as finished if that is of its last step.
        ours: State key of ``MoECheckpoint``, whose state is in every checkpoint.
    """
    reason = _reason(trainer)
    place = None if newest is None else parse_step_dir(newest)
    if reason is None or newest is None or place is None or place[0] != trainer.global_step:
        return
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    states = {key: state for key, state in states.items() if state and key != ours}
    write_finished(storage, newest, reason, _limits(trainer), states)


def _reason(trainer: Any) -> str | None:
    limits = _limits(trainer)
    if _UNLIMITED < limits["max_steps"] <= trainer.global_step:
        return f"max_steps={limits['max_steps']}"
    epochs = trainer.fit_loop.epoch_progress.current.processed
    # Lightning counts an epoch that was broken off, too.
    if trainer.is_last_batch and _UNLIMITED < limits["max_epochs"] <= epochs:
        return f"max_epochs={limits['max_epochs']}"
    stopped = any(isinstance(callback, EarlyStopping) and _stopped(callback) for callback in trainer.callbacks)
    return "EarlyStopping" if stopped else None


def _stopped(callback: EarlyStopping) -> bool:
    return callback.stopped_epoch > 0 or getattr(callback, "stopping_reason_message", None) is not None


def _limits(trainer: Any) -> dict[str, int]:
    return {
        "max_steps": trainer.max_steps,
        "max_epochs": _UNLIMITED if trainer.max_epochs is None else trainer.max_epochs,
    }


def go_on_from_end(
    trainer: Any, dirpath: str, manifest: Manifest, finished: Finished, found: Sequence[Change], *, extend: bool
) -> str | None:
    """Decide what a finished run is started again for. The last checkpoint's state is in place.

    Args:
        trainer: Of the script that was started again.
        dirpath: The store.
        manifest: Of the last checkpoint.
        finished: How the run ended.
        found: How this script's hyperparameters differ from it.
        extend: The user wants to train on, whatever has changed.

    Returns:
        How far training goes on, for people; None if there is nothing left to train. Then ``fit`` will return at once
        with the state of the end.

    Raises:
        FinishedRunError: Hyperparameters have changed, and the user did not say that they may.
    """
    if not extend and any(change.decides for change in found):
        changed = tuple(str(change) for change in found)
        raise FinishedRunError(dirpath, manifest.step, finished.reason, changed)
    _already_saved(trainer, finished)
    if _something_left(trainer, finished, extend=extend):
        return _until(trainer)
    if not any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
        _leave(trainer, finished)
    return None


def _something_left(trainer: Any, finished: Finished, *, extend: bool) -> bool:
    if will_stop(trainer):
        return False
    if finished.reason != "EarlyStopping":
        return True
    if not any(isinstance(callback, EarlyStopping) for callback in trainer.callbacks):
        return True  # the user took away what ended the run
    now = _limits(trainer)
    raised = any(old > _UNLIMITED and (new == _UNLIMITED or new > old) for new, old in _pairs(now, finished.limits))
    return extend or raised or not may_stop(trainer)


def _pairs(now: dict[str, int], before: Any) -> list[tuple[int, int]]:
    return [(now[name], before[name]) for name in now if name in before]


def _until(trainer: Any) -> str:
    limits = _limits(trainer)
    told = [f"{name}={value}" for name, value in limits.items() if value != _UNLIMITED]
    return ", ".join(told) or "no limit"


def _already_saved(trainer: Any, finished: Finished) -> None:
    """The other checkpoint callbacks had saved what they save at the end, so they must not again."""
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.state_key in finished.callbacks:
            callback.load_state_dict(dict(finished.callbacks[callback.state_key]))
            callback._last_global_step_saved = trainer.global_step
            callback._last_checkpoint_saved = callback.last_model_path


def _leave(trainer: Any, finished: Finished) -> None:
    """Bring loops and callbacks from the last batch to the end, so that Lightning finds nothing to do."""
    for callback in trainer.callbacks:
        if callback.state_key in finished.callbacks:
            callback.load_state_dict(dict(finished.callbacks[callback.state_key]))
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            callback.on_train_end(trainer, trainer.lightning_module)  # the averaged weights are the run's result
    progress = trainer.fit_loop.epoch_progress
    progress.increment_processed()
    progress.increment_completed()
    trainer.should_stop = trainer.should_stop or finished.reason == "EarlyStopping"
