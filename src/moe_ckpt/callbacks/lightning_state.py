"""Lightning's own state, in the layout of a Lightning checkpoint: loops, schedulers, callbacks, hooks.

Everything but the model's and the optimizers' tensors, which the engine copies. User hooks
(``on_save_checkpoint``, ``state_dict``) are called as Lightning would call them, so that modules,
callbacks and datamodules that keep state of their own need no change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import lightning
from lightning.pytorch.trainer.states import TrainerFn

from moe_ckpt.callbacks.averaging import go_on_averaging
from moe_ckpt.errors import ConfigError, UnencodableStateError
from moe_ckpt.format.schema import like, require
from moe_ckpt.format.tree import encode_tree
from moe_ckpt.interop.lightning_dict import MODEL_MARK, unmark
from moe_ckpt.recovery.handing_back import handing_back

log = logging.getLogger("moe_ckpt")

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


def capture_checkpoint(trainer: Any) -> dict[str, Any]:
    """The checkpoint dict of this moment, with references to the model's state_dict replaced by a mark.

    Called at ``on_train_batch_end`` of the step that is saved, on every rank.
    """
    module = trainer.lightning_module
    model_state = module.state_dict()
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": model_state,
        "loops": {
            "fit_loop": _loop_state(trainer),
            "validate_loop": trainer.validate_loop.state_dict(),
            "test_loop": trainer.test_loop.state_dict(),
            "predict_loop": trainer.predict_loop.state_dict(),
        },
        "callbacks": {cb.state_key: state for cb in trainer.callbacks if (state := cb.state_dict())},
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    precision = trainer.precision_plugin
    precision_state = precision.state_dict()
    if precision_state:
        checkpoint[type(precision).__qualname__] = precision_state
    precision.on_save_checkpoint(checkpoint)
    _add_hyper_parameters(trainer, checkpoint)
    datamodule = trainer.datamodule
    if datamodule is not None:
        state = datamodule.state_dict()
        if state:
            checkpoint[type(datamodule).__qualname__] = state
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    return {key: MODEL_MARK if value is model_state else value for key, value in checkpoint.items()}


def _loop_state(trainer: Any) -> dict[str, Any]:
    """The fit loop's state, such that Lightning goes on from it as if it had never stopped.

    At the end of an epoch's last batch, and where a validation is due next, Lightning (2.6) resumes from
    its own state wrongly: it counts the epoch twice, trains on what ``limit_train_batches`` left in the
    loader, and takes the validation for done. So there the batch is stored as completed (then no epoch is
    counted and no batch fetched), and a due validation as interrupted in its first batch (then it runs).
    """
    state = dict(trainer.fit_loop.state_dict())
    if trainer.global_step == 0:  # nothing was done yet, so nothing is due
        return state
    due = validation_due(trainer)
    if not due and not trainer.is_last_batch:
        return state
    batches, validated, own = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress", "epoch_loop.state_dict"
    progress = state[batches]
    state[batches] = progress | {
        span: progress[span] | {"completed": progress[span]["processed"]} for span in ("total", "current")
    }
    if due:
        done = state[validated]["total"]["completed"]
        state[validated] = state[validated] | {
            "total": {"ready": done + 1, "started": done + 1, "processed": done, "completed": done},
            "current": dict.fromkeys(state[validated]["current"], 0),
            "is_last_batch": False,
        }
    else:
        # The step counter for loggers; where a validation runs, Lightning advances it on that path.
        state[own] = state[own] | {"_batches_that_stepped": state[own]["_batches_that_stepped"] + 1}
    return state


def validation_due(trainer: Any) -> bool:
    """Whether Lightning will validate right after this batch; asked of the loop itself, which decides."""
    loop = trainer.fit_loop
    return bool(trainer.enable_validation and loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def _add_hyper_parameters(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Hyper-parameters may be any object; those that only pickle could hold are left out, with one warning each."""
    for owner, key in zip((trainer.lightning_module, trainer.datamodule), HYPER_PARAMETERS, strict=True):
        if owner is not None and owner.hparams:
            checkpoint[key] = plain_hparams(owner, key)


def plain_hparams(owner: Any, key: str) -> dict[str, Any]:
    """Hyper-parameters of a module or datamodule that can be held without pickle.

    Args:
        owner: Of the hyper-parameters.
        key: Where a checkpoint keeps them, for the warning about those that are left out.
    """
    plain = {}
    for name, value in owner.hparams.items():
        try:
            encode_tree(value)
        except UnencodableStateError as error:
            _warn_once(f"{key}/{name}", error.type_name)
        else:
            plain[name] = value
    return plain


_warned: set[str] = set()


def _warn_once(path: str, type_name: str) -> None:
    if path not in _warned:
        _warned.add(path)
        log.warning(
            "%s is a %s and is left out of checkpoints: resuming does not need it, load_from_checkpoint() would",
            path,
            type_name,
        )


def check_state(trainer: Any, plain: Mapping[str, Any], path: str) -> None:
    """Whether a rank's plain state is one that ``restore_checkpoint`` can give back, before anything is loaded.

    path: of the state file.

    Raises:
        ConfigError: it is the state of another trainer.
        DamagedError: loops or schedulers are not what they are in any run.
    """
    if plain.get("framework") != "lightning":
        raise ConfigError(
            f"{path} was written by {plain.get('framework')!r}, not by Lightning: its loops and schedules cannot go on "
            "here"
        )
    stored = plain["checkpoint"]
    require(like(trainer.fit_loop.state_dict()), stored["loops"]["fit_loop"], path, "the fit loop's state: ")
    for config, state in zip(trainer.lr_scheduler_configs, stored["lr_schedulers"], strict=False):
        require(like(config.scheduler.state_dict()), state, path, f"{type(config.scheduler).__name__}'s state: ")


def restore_checkpoint(trainer: Any, stored: Mapping[str, Any], path: str) -> None:
    """Give Lightning its state back. The model's and optimizers' tensors are in place already.

    Called from ``on_fit_start``: what Lightning itself would do between there and the first batch. path: of the state
    file, for messages.

    Raises:
        StateRefusedError: names whose state it is that could not be given back.
    """
    module = trainer.lightning_module
    checkpoint = unmark(stored, module.state_dict())
    datamodule = trainer.datamodule
    if datamodule is not None and type(datamodule).__qualname__ in checkpoint:
        with handing_back(f"the datamodule {type(datamodule).__name__}", path):
            datamodule.load_state_dict(checkpoint[type(datamodule).__qualname__])
    with handing_back(f"{type(module).__name__} (on_load_checkpoint)", path):
        module.on_load_checkpoint(checkpoint)
    _restore_callbacks(trainer, checkpoint, path)
    precision = trainer.precision_plugin
    with handing_back(f"the precision plugin {type(precision).__name__}", path):
        precision.on_load_checkpoint(checkpoint)
        if type(precision).__qualname__ in checkpoint:
            precision.load_state_dict(checkpoint[type(precision).__qualname__])
    if trainer.state.fn is TrainerFn.FITTING and checkpoint["global_step"]:
        with handing_back("the fit loop", path):
            trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
    go_on_averaging(trainer)
    for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=False):
        with handing_back(f"the scheduler {type(config.scheduler).__name__}", path):
            config.scheduler.load_state_dict(state)


def _restore_callbacks(trainer: Any, checkpoint: dict[str, Any], path: str) -> None:
    states = checkpoint.get("callbacks", {})
    absent = sorted(states.keys() - {cb.state_key for cb in trainer.callbacks})
    if absent:
        log.warning("the checkpoint holds state of callbacks that this Trainer does not have: %s", ", ".join(absent))
    for callback in trainer.callbacks:
        with handing_back(f"the callback {type(callback).__name__} (on_load_checkpoint)", path):
            callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
    for callback in trainer.callbacks:
        if callback.state_key in states:
            with handing_back(f"the callback {type(callback).__name__}", path):
                callback.load_state_dict(deepcopy(states[callback.state_key]))
