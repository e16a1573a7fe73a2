"""``LightningModule.load_from_checkpoint``, which opens files by itself and asks nobody, for steps and stores."""

from __future__ import annotations

import io
import os
from typing import Any, TypeVar

import torch

from moe_ckpt.callbacks.named_steps import is_step_path, is_store_path, load_named
from moe_ckpt.errors import NoCheckpointError
from moe_ckpt.interop.lightning_dict import module_checkpoint

Module = TypeVar("Module")


def load_from_checkpoint(module_class: type[Module], path: str | os.PathLike[str], **options: Any) -> Module:
    """Returns a LightningModule or LightningDataModule made from a checkpoint of this package, for evaluation.

    As ``module_class.load_from_checkpoint(path)``, which reads single files only. Needs memory for the weights twice.

    Args:
        module_class: What to make: its hyper-parameters are those that were saved.
        path: A step directory, or a store: its newest good dense step.
        **options: Those of Lightning's ``load_from_checkpoint``: ``map_location``, ``strict``, arguments of the class.

    Raises:
        NoCheckpointError: There is no such step or store.
        DamagedError: The step's bytes are not intact.
        SparseWindowError: The step is no one state of the run.
    """
    if not (is_step_path(path) or is_store_path(path)):
        raise NoCheckpointError(
            f"{os.fspath(path)} is neither a step directory nor a store of moe_ckpt. Files of Lightning are read by "
            f"{module_class.__name__}.load_from_checkpoint"
        )
    file = io.BytesIO()
    torch.save(load_named(path, module_checkpoint, fitting=False), file)
    file.seek(0)
    loaded: Module = module_class.load_from_checkpoint(file, **options)  # type: ignore[attr-defined]
    return loaded
