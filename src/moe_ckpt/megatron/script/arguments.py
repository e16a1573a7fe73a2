"""Megatron-LM's training scripts: arguments, counters, the releases that are known, values changed for a while."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.megatron.compat import megatron_core
from moe_ckpt.notices import announce

COUNTED = ("consumed_valid_samples", "skipped_train_samples", "num_floating_point_operations_so_far")
"""Counters in ``args`` that are saved, if this version has them."""
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
    if getattr(settings, "dataloader_type", None) == "external" and not stateful:
        announce(
            "--dataloader-type external: the loader's position in the data is not saved. Unless your loader begins at "
            "args.consumed_train_samples, a resumed run trains on data that it has seen: give the loader to "
            "megatron.install(stateful={'loader': ...}), anything with state_dict and load_state_dict",
            level=logging.WARNING,
        )


def counters_of(settings: Any, floating_point_operations: Any) -> dict[str, Any]:
    """Returns the counters as they are now, by name.

    Args:
        settings: Megatron's arguments.
        floating_point_operations: So far.
    """
    counters = {name: getattr(settings, name) for name in COUNTED if hasattr(settings, name)}
    counters["num_floating_point_operations_so_far"] = floating_point_operations
    largest = getattr(rerun_machine(), "max_values", None)
    return counters if largest is None else {**counters, "rerun_max_values": dict(largest)}


def rerun_machine() -> Any:
    """Returns Megatron's rerun state machine."""
    return importlib.import_module("megatron.core.rerun_state_machine").get_rerun_state_machine()


def flat(value: Any) -> Iterator[Any]:
    """Yields what lists and tuples hold, however deep."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    else:
        yield value


@contextmanager
def changed(target: Any, **values: Any) -> Iterator[None]:
    """Sets those attributes that ``target`` has to other values until the block ends."""
    old = {name: getattr(target, name) for name in values if hasattr(target, name)}
    for name in old:
        setattr(target, name, values[name])
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(target, name, value)
