"""The arguments of Megatron-LM that matter to checkpoints before there is a model, and the releases that are known."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.megatron.compat import megatron_core
from moe_ckpt.megatron.topology import is_rank_zero
from moe_ckpt.notices import announce

KNOWN_RELEASES = "core_v0.16.1 and core_v0.19.0"
"""The releases of Megatron-LM with which ``megatron.install`` is tested."""
ARGUMENTS = ("consumed_train_samples", "train_iters", "micro_batch_size", "load", "save")


def unknown_release(what: str) -> UnsupportedError:
    """Returns the error of a Megatron-LM that lacks ``what``."""
    return UnsupportedError(
        f"this Megatron-LM (megatron-core {megatron_core().version}) has no {what}, which moe_ckpt.megatron.install "
        f"needs. {KNOWN_RELEASES} have it: use one of them, or put attach, resume, after_step and finish into the "
        "training loop (docs/megatron.md), or take a newer moe_ckpt."
    )


def require_trainable(settings: Any) -> None:
    """Raises for modes of Megatron-LM in which checkpoints cannot work."""
    missing = [name for name in ARGUMENTS if not hasattr(settings, name)]
    if missing:
        raise unknown_release(f"args.{missing[0]}")
    if getattr(settings, "skip_train", False):
        raise ConfigError(
            "--skip-train: nothing is trained, so there is no optimizer to attach checkpoints to. Leave "
            "megatron.install() out, and give --load a checkpoint of Megatron's (megatron.export_torch_dist writes one)"
        )
    if getattr(settings, "ckpt_convert_format", None) is not None:
        raise ConfigError(
            "--ckpt-convert-format: Megatron-LM converts what --load names and ends, and megatron.install() would load "
            "the store's newest checkpoint instead. Leave megatron.install() out"
        )
    if getattr(settings, "perform_rl_step", False):
        raise UnsupportedError(
            "--perform-rl-step: Megatron-LM then loads weights from --load again after setup, over those that "
            "megatron.install() has restored. Train without it"
        )


def warn_of_loader(settings: Any, stateful: Collection[str]) -> None:
    """Says that the position in the data is not saved, where that is so.

    Args:
        stateful: Names of what was given to ``megatron.install``.
    """
    if getattr(settings, "dataloader_type", None) == "external" and not stateful and is_rank_zero():
        announce(
            "--dataloader-type external: the loader's position in the data is not saved. Unless your loader begins at "
            "args.consumed_train_samples, a resumed run trains on data that it has seen: give the loader to "
            "megatron.install(stateful={'loader': ...}), anything with state_dict and load_state_dict",
            level=logging.WARNING,
        )
