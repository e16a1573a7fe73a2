"""``LightningModule.load_from_checkpoint`` for steps and stores."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from moe_ckpt.callbacks.named_steps import is_step_path, is_store_path, load_named
from moe_ckpt.errors import ConfigError, NoCheckpointError
from moe_ckpt.interop.lightning_dict import module_checkpoint

Module = TypeVar("Module")


def load_from_checkpoint(module_class: type[Module], path: str | os.PathLike[str], **options: Any) -> Module:
    """Returns a LightningModule or LightningDataModule made from a checkpoint of this package, for evaluation.

    Like ``module_class.load_from_checkpoint(path)``, which reads single files only. Needs memory for the weights twice.

    Args:
        module_class: The class to make, with the saved hyper-parameters.
        path: A step directory, or a store (its newest good dense step).
        **options: Those of Lightning's ``load_from_checkpoint``: ``map_location``, ``strict``, arguments of the class.

    Raises:
        ConfigError: The arguments are no class and path.
        NoCheckpointError: There is no such step or store; says what is there instead.
        DamagedError: The step's bytes are not intact.
        UnsupportedError: The step is a sparse window.
    """
    if not isinstance(module_class, type) or not isinstance(path, (str, os.PathLike)):
        raise ConfigError(
            f"load_from_checkpoint({_shown(module_class)}, {_shown(path)}): give the class first and the path second: "
            "load_from_checkpoint(LitModel, 'checkpoints/my_run')"
        )
    if not (is_step_path(path) or is_store_path(path)):
        raise NoCheckpointError(f"{os.fspath(path)} is {_other(os.fspath(path), module_class.__name__)}")
    file = io.BytesIO()
    torch.save(load_named(path, module_checkpoint, fitting=False), file)
    file.seek(0)
    loaded: Module = module_class.load_from_checkpoint(file, **options)  # type: ignore[attr-defined]
    return loaded


def _shown(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


def _other(path: str, name: str) -> str:
    """Returns what is at a path that is neither a step nor a store, and what opens that."""
    files = os.listdir(path) if os.path.isdir(path) else [os.path.basename(path)]
    if _any(files, ".safetensors"):
        return (
            "an export (safetensors), which holds weights and no hyper-parameters. Build the model yourself "
            "(from_pretrained opens the export of a transformers model), set weights_from= to train from it, or pass "
            f"the step that it was exported from to load_from_checkpoint({name}, ...)"
        )
    if _any(files, ".metadata", ".distcp"):
        return (
            "a checkpoint of torch.distributed.checkpoint, such as moe-ckpt export --to dcp writes: open it with that "
            f"library, or pass the step that it was exported from to load_from_checkpoint({name}, ...)"
        )
    return (
        "neither a step directory nor a store of moe_ckpt. Files of Lightning (.ckpt) are read by "
        f"{name}.load_from_checkpoint"
    )


def _any(files: Iterable[str], *endings: str) -> bool:
    return any(file.endswith(endings) for file in files)
