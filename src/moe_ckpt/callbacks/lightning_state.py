"""Lightning's own state, in the layout of a Lightning checkpoint: loops, schedulers, callbacks, hooks.

The engine copies the tensors of model and optimizers. User hooks (``on_save_checkpoint``, ``state_dict``) are called as
Lightning calls them, so that modules, callbacks and datamodules with state of their own need no change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import lightning
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.amp import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm

from moe_ckpt.callbacks.compat import ACCUMULATED_BEFORE, NAMES, Private
from moe_ckpt.callbacks.loop_position import interrupted_progress
from moe_ckpt.driver.host import loading_state, require_framework
from moe_ckpt.errors import UnencodableStateError
from moe_ckpt.format.schema import Schema, like, require
from moe_ckpt.format.tree import encode_tree
from moe_ckpt.interop.whole import MODEL_MARK, unmark

log = logging.getLogger("moe_ckpt")

_STATES_OF_SCALER = (MixedPrecision.state_dict, FSDPPrecision.state_dict)
"""``state_dict`` of precision plugins that return the gradient scaler's state and nothing else."""
HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


def capture_checkpoint(trainer: Any) -> dict[str, Any]:
    """Returns the present checkpoint dict, with a mark in place of the model's ``state_dict``. Called on every rank."""
    module = trainer.lightning_module
    weights: Any = module.state_dict() if _has_reader(trainer) else MODEL_MARK
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        "loops": {
            "fit_loop": _loop_state(trainer),
            "validate_loop": trainer.validate_loop.state_dict(),
            "test_loop": trainer.test_loop.state_dict(),
            "predict_loop": trainer.predict_loop.state_dict(),
        },
        "callbacks": {  # ours has a shorter state for its own store
            callback.state_key: state
            for callback in trainer.callbacks
            if (state := getattr(callback, "state_in_own_store", callback.state_dict)())
        },
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "state_dict": weights,
    }
    precision = trainer.precision_plugin
    precision_state = _scaler_state(precision)
    if precision_state:
        checkpoint[type(precision).__qualname__] = precision_state
    precision.on_save_checkpoint(checkpoint)
    for owner, key in zip((module, trainer.datamodule), HYPER_PARAMETERS, strict=True):
        if owner is not None and owner.hparams:
            checkpoint[key] = plain_hparams(owner, key)
    datamodule = trainer.datamodule
    if datamodule is not None:
        state = datamodule.state_dict()
        if state:
            checkpoint[type(datamodule).__qualname__] = state
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    return {key: MODEL_MARK if value is weights else value for key, value in checkpoint.items()}


def _has_reader(trainer: Any) -> bool:
    """Returns whether a hook of others gets the checkpoint dict, and may read the model's ``state_dict`` in it.

    With thousands of modules, making that takes longer, at each step, than the rest of the checkpoint.
    """
    module, precision = trainer.lightning_module, trainer.precision_plugin
    others = [callback for callback in trainer.callbacks if not hasattr(callback, "state_in_own_store")]
    return (
        is_overridden("on_save_checkpoint", module)
        or type(precision).on_save_checkpoint is not Precision.on_save_checkpoint
        or any(overrides(callback, "on_save_checkpoint") for callback in others)
    )


def overrides(callback: Callback, name: str) -> bool:
    """Returns whether the callback overrides a hook of ``Callback``, also where it is set on the object."""
    override, plain = getattr(type(callback), name, None), getattr(Callback, name, None)
    return plain is not None and (name in vars(callback) or override is not plain)


def _scaler_state(precision: Any) -> dict[str, Any]:
    """Returns the precision plugin's state; for a scaler on a GPU live tensors, so that nothing waits for the GPU."""
    scaler: Any = getattr(precision, "scaler", None)
    scaled = isinstance(scaler, GradScaler) and type(scaler).state_dict is GradScaler.state_dict
    standard = scaled and type(precision).state_dict in _STATES_OF_SCALER
    if not standard or scaler._scale is None or scaler._scale.device.type == "cpu":
        state: dict[str, Any] = precision.state_dict()
        return state
    return {
        "scale": scaler._scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": scaler._growth_tracker,
    }


def _loop_state(trainer: Any) -> dict[str, Any]:
    """Returns the fit loop's state, changed so that Lightning (2.6) resumes correctly from it.

    From the unchanged state after an epoch's last batch, or before a validation, Lightning would count the epoch twice,
    train on batches that ``limit_train_batches`` left in the loader, and skip the validation. So the batch is stored as
    completed (no epoch is counted, no batch fetched), and a due validation as interrupted in its first batch (it runs).
    """
    state: dict[str, Any] = trainer.fit_loop.state_dict()
    if trainer.global_step == 0:  # nothing was done yet, so nothing is due
        return state
    batches, validated, counters = (
        "epoch_loop.batch_progress",
        "epoch_loop.val_loop.batch_progress",
        "epoch_loop.state_dict",
    )
    progress = state[batches]
    # A batch that ends its epoch because on_train_batch_start returned -1 is ready and processed, but neither started
    # nor completed. From totals that differ ever after, Lightning would conclude that no batch was done, and a resume
    # would count one number twice.
    total, current = progress["total"], progress["current"]
    progress["total"] = total | {span: total["ready"] - current["ready"] + current[span] for span in current}
    due = validation_due(trainer)
    if not due and not trainer.is_last_batch:
        return state
    state[batches] = progress | {
        span: progress[span] | {"completed": progress[span]["processed"]} for span in ("total", "current")
    }
    if due:
        done = state[validated]["total"]["completed"]
        state[validated] = state[validated] | {
            "total": interrupted_progress(done),
            "current": dict.fromkeys(state[validated]["current"], 0),
            "is_last_batch": False,
        }
    else:
        # The step counter for loggers; where a validation runs, Lightning advances it on that path.
        steps = NAMES["batches_that_stepped"]
        state[counters] = state[counters] | {steps: state[counters][steps] + 1}
    return state


def validation_due(trainer: Any) -> bool:
    """Returns whether Lightning will validate right after this batch, which the loop itself decides."""
    loop = trainer.fit_loop
    return bool(trainer.enable_validation and Private(loop.epoch_loop).should_check_val_fx(Private(loop).data_fetcher))


_warned: set[str] = set()


def plain_hparams(owner: Any, key: str) -> dict[str, Any]:
    """Returns the hyper-parameters that can be stored without pickle; warns once of each of the others.

    Args:
        owner: The module or datamodule.
        key: Of the hyper-parameters in a checkpoint, for the warning.
    """
    plain = {}
    for name, value in owner.hparams.items():
        try:
            encode_tree(value)
            plain[name] = value
        except UnencodableStateError as error:
            if (path := f"{key}/{name}") not in _warned:
                _warned.add(path)
                log.warning(
                    "%s is a %s and left out of checkpoints: resuming does not need it, load_from_checkpoint() would",
                    *(path, error.type_name),
                )
    return plain


_POSITIONS: Schema = {"state_dict?": {"combined_loader?": [{}]}}
"""The positions of loaders in the fit loop's state."""


def check_state(trainer: Any, plain: Mapping[str, Any], path: str) -> None:
    """Raises unless ``restore_checkpoint`` can restore a rank's plain state. Called before anything is loaded.

    Args:
        trainer: Of the fit.
        plain: The state.
        path: Of its file.

    Raises:
        ConfigError: It is the state of another framework.
        DamagedError: The stored state of a loop or scheduler has another structure than that of this run.
    """
    require_framework(plain, "Lightning", path)
    stored = plain["checkpoint"]
    loops = stored["loops"]["fit_loop"]
    require(like(trainer.fit_loop.state_dict()), loops, path, "the fit loop's state: ")
    require(_POSITIONS, loops, path, "the fit loop's state: ")  # there are no loaders yet
    for config, state in zip(trainer.lr_scheduler_configs, stored["lr_schedulers"], strict=False):
        require(like(config.scheduler.state_dict()), state, path, f"{type(config.scheduler).__name__}'s state: ")


def restore_checkpoint(trainer: Any, stored: Mapping[str, Any], path: str) -> None:
    """Restores Lightning's own state, as Lightning does between ``on_fit_start`` and the first batch.

    Called in ``on_fit_start``, when the tensors of model and optimizers are loaded.

    Args:
        trainer: Of the fit.
        stored: Result of ``capture_checkpoint``.
        path: Of the state file, for messages.

    Raises:
        StoreError: An object did not take its state; it is named.
    """
    module, datamodule, precision = trainer.lightning_module, trainer.datamodule, trainer.precision_plugin
    checkpoint = unmark(stored, module.state_dict())
    states = checkpoint.get("callbacks", {})
    absent = sorted(states.keys() - {callback.state_key for callback in trainer.callbacks})
    if absent:
        log.warning("the checkpoint holds state of callbacks that this Trainer does not have: %s", ", ".join(absent))

    def load(what: str, into: Callable[..., Any], *state: Any) -> None:
        with loading_state(what, path):
            into(*state)

    if (key := type(datamodule).__qualname__) in checkpoint:
        load(f"the datamodule {type(datamodule).__name__}", datamodule.load_state_dict, checkpoint[key])
    load(f"{type(module).__name__} (on_load_checkpoint)", module.on_load_checkpoint, checkpoint)
    for callback in trainer.callbacks:
        what = f"the callback {type(callback).__name__}"
        load(f"{what} (on_load_checkpoint)", callback.on_load_checkpoint, trainer, module, checkpoint)
    for callback in trainer.callbacks:
        if callback.state_key in states:
            state = deepcopy(states[callback.state_key])
            load(f"the callback {type(callback).__name__}", callback.load_state_dict, state)
    restore_finetuning(trainer)
    what = f"the precision plugin {type(precision).__name__}"
    load(what, precision.on_load_checkpoint, checkpoint)
    if (key := type(precision).__qualname__) in checkpoint:
        load(what, precision.load_state_dict, checkpoint[key])
    if trainer.state.fn is TrainerFn.FITTING and checkpoint["global_step"]:
        load("the fit loop", trainer.fit_loop.load_state_dict, checkpoint["loops"]["fit_loop"])
        # A search for a learning rate or a batch size may have made it. A new one takes the restored position.
        Private(trainer.fit_loop).combined_loader = None
    elif trainer.state.fn is TrainerFn.FITTING:
        # Then no sanity check runs: its effect on buffers and random numbers is in the state already.
        trainer.fit_loop.epoch_loop.val_loop.restarting = True
    _restore_averaging(trainer)
    for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=False):
        load(f"the scheduler {type(config.scheduler).__name__}", config.scheduler.load_state_dict, state)


def restore_finetuning(trainer: Any) -> None:
    """Makes finetuning callbacks leave parameters as the checkpoint has them, frozen or thawed.

    Such a callback has just frozen modules as before training, and would thaw them at the start of an epoch that is
    over. The optimizers have the groups that it added.
    """
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]
    for callback in callbacks:
        Private(callback).restarting = False
    for module in trainer.lightning_module.modules() if callbacks else ():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            parameters = list(module.parameters(recurse=False))
            module.track_running_stats |= bool(parameters) and all(parameter.requires_grad for parameter in parameters)


def _restore_averaging(trainer: Any) -> None:
    """Restores the scheduler of stochastic weight averaging, if the checkpoint was taken while it was in use.

    The callback swaps the scheduler at the start of an epoch, a hook that Lightning does not call again when a run
    resumes midway. Called after callbacks, loops and optimizers are restored, and before schedulers are.
    """
    for callback in trainer.callbacks:
        if not isinstance(callback, StochasticWeightAveraging):
            continue
        if trainer.current_epoch > callback.swa_end:  # its epoch for batch norms, at whose end it reads this
            setattr(callback, ACCUMULATED_BEFORE, trainer.accumulate_grad_batches)
        if Private(callback).scheduler_state is None:
            continue
        # The stored state is of the callback's scheduler; the run's own scheduler must not get it.
        Private(callback).clear_schedulers(trainer)
        if trainer.current_epoch != Private(callback).latest_update_epoch:
            continue  # the epoch has not begun, and Lightning will call the hook
        groups = trainer.optimizers[0].param_groups
        before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        callback.on_train_epoch_start(trainer, trainer.lightning_module)
        for group, values in zip(groups, before, strict=True):
            group.update(values)  # a scheduler's constructor takes a first step
