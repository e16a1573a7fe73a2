"""Finds who reads a model's weights beside its kernels, in a way that may enter saved state: averages, targets.

A window's replay that holds frozen weights in the type of the kernels (bf16) would give such readers rounded ones.
Whether a hook reads weights cannot be seen in advance, so one that runs in training counts if it can keep something.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from moe_ckpt.callbacks.support import overrides

_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end"),
)
_OF_MODULES = (*_HOOKS, "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")
_KEEPS = ("state_dict", "on_save_checkpoint")
_HARMLESS = ("lightning.pytorch.", "moe_ckpt.")
"""Packages whose callbacks read no weights, but for ``_READERS``."""
_READERS = frozenset(
    f"lightning.pytorch.callbacks.{name}"
    for name in ("weight_averaging", "stochastic_weight_avg", "pruning", "lambda_function")
)
"""``LambdaCallback`` calls functions of the user's."""


def weight_readers(trainer: Any, module: pl.LightningModule) -> list[str]:
    """Returns names of callbacks, and of the module, that may read weights in a hook and keep what they made of them.

    Forward and backward passes do not count: what those read can be watched.
    """
    readers = [type(callback).__name__ for callback in trainer.callbacks if _may_keep(callback)]
    if any(is_overridden(name, module) for name in _OF_MODULES) and _has_room(module):
        readers.append(f"the hooks of {type(module).__name__}")
    return list(dict.fromkeys(readers))


def _may_keep(callback: Callback) -> bool:
    return (any(_of_others(callback, _HOOKS)) and any(overrides(callback, name) for name in _KEEPS)) or (
        any(_of_others(callback, _KEEPS)) and any(overrides(callback, name) for name in _HOOKS)
    )


def _of_others(callback: Callback, names: tuple[str, ...]) -> Iterator[bool]:
    """Yields for each overridden method whether it is of unknown code, which may read weights."""
    for name in names:
        if name in vars(callback):
            yield True
        elif overrides(callback, name):
            where = next(kind.__module__ for kind in type(callback).__mro__ if name in vars(kind))
            yield where in _READERS or not f"{where}.".startswith(_HARMLESS)


def _has_room(module: pl.LightningModule) -> bool:
    """Returns whether the module saves matrices in the shapes of its trained ones, or anything by its own hook.

    A copy of a model has matrices. Running statistics of a norm are vectors, as its weights are, and are no copy.
    """
    trained = {parameter.shape for parameter in module.parameters() if parameter.requires_grad}
    frozen = (parameter for parameter in module.parameters() if not parameter.requires_grad)
    copies = any(tensor.ndim > 1 and tensor.shape in trained for tensor in chain(module.buffers(), frozen))
    return copies or is_overridden("on_save_checkpoint", module)
