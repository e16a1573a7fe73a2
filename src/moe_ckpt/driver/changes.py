"""Compares the hyperparameters of a checkpoint with those of a script, and says whose values are used."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from moe_ckpt.format.tree import encode_tree
from moe_ckpt.modeling.optimizer_state import IMPLEMENTATION_FLAGS

log = logging.getLogger("moe_ckpt")

_ABSENT = "(not set)"
_SHOWN = 60


@dataclass(frozen=True)
class Change:
    """One hyperparameter that differs.

    Attributes:
        where: For instance ``module.dropout``, ``optimizer 0 lr``.
        before: Its value in the checkpoint, as text.
        now: Its value in this script, as text.
        from_checkpoint: The checkpoint's value is used (optimizers, schedulers), not the script's (modules,
            datamodules).
        decides: The change makes another experiment. False for values that a scheduler computes from the length of
            training.
    """

    where: str
    before: str
    now: str
    from_checkpoint: bool
    decides: bool = True

    def __str__(self) -> str:
        return f"{self.where} {self.before} -> {self.now}"


def warn_of_changes(changes: Collection[Change], rank: int) -> None:
    """Warns on rank 0 of hyperparameters that differ from the checkpoint's, and says whose values are used."""
    if rank or not changes:
        return
    texts = []
    for from_checkpoint, whose in ((True, "the checkpoint's"), (False, "this script's")):
        some = "; ".join(str(change) for change in changes if change.from_checkpoint is from_checkpoint)
        texts += [f"{some} (training continues with {whose})"] if some else []
    log.warning("hyperparameters differ from the checkpoint's: %s", "; ".join(texts))


def trainable_changes(used: Collection[str], now: Collection[str]) -> list[Change]:
    """Returns how the parameters that require gradients differ.

    Args:
        used: Names of parameters that require no gradient in the checkpoint.
        now: Names of parameters that require none in this script.
    """
    differences = []
    for names, was in ((set(used) - set(now), False), (set(now) - set(used), True)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            where = f"requires_grad of {min(names)}{more}"
            differences.append(Change(where, str(was), str(not was), from_checkpoint=True))
    return differences


def plain_values(group: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the hyperparameters in a param group or a scheduler's state: numbers, text, lists of those."""
    values = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if key not in IMPLEMENTATION_FLAGS and not str(key).startswith("_") and _is_plain(value):
            values[str(key)] = value
    return values


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def changes_between(
    name: str, before: Mapping[str, Any], now: Mapping[str, Any], *, from_checkpoint: bool, decides: bool = True
) -> Iterator[Change]:
    """Yields a change for each value that differs, or that one of the two lacks; in the order of ``now``."""
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in (*new, *(key for key in old if key not in new)):
        if not are_equal(old.get(key, _ABSENT), new.get(key, _ABSENT)):
            was, now_is = (_text(values[key]) if key in values else _ABSENT for values in (old, new))
            yield Change(f"{name}{key}", was, now_is, from_checkpoint, decides)


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


Groups = Sequence[Mapping[str, Any]]
"""Hyperparameters of each param group of an optimizer."""


def groups_of(optimizers: Iterable[Any]) -> list[Groups]:
    """Returns the hyperparameters of optimizers as they are now, as plain data."""
    return [[plain_values(group) for group in optimizer.param_groups] for optimizer in optimizers]


def optimizer_changes(before: Sequence[Groups], now: Sequence[Groups]) -> Iterator[Change]:
    """Yields each change of an optimizer once, even if several groups have it, or a scheduler as ``initial_lr``.

    If only one of the two has a scheduler, ``initial_lr`` keeps its name: the learning rate is set in both.
    """
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        name = f"optimizer {number} " if len(now) > 1 else "optimizer "
        pairs = zip(old, new, strict=False)
        changes = (change for pair in pairs for change in changes_between(name, *pair, from_checkpoint=True))
        yield from dict.fromkeys(map(_as_rate, changes))


def _as_rate(change: Change) -> Change:
    if _ABSENT in (change.before, change.now):
        return change
    return replace(change, where=change.where.replace("initial_lr", "lr"))


def schedules_of(target: Any) -> list[str]:
    """Returns the names of the classes and functions of learning rate schedulers, which no ``state_dict`` has.

    Args:
        target: A scheduler, an object of accelerate or torchtitan that holds some, or any other object: it has none.
    """
    if isinstance(target, LRScheduler):
        functions = [getattr(function, "func", function) for function in getattr(target, "lr_lambdas", ())]
        names = dict.fromkeys(getattr(one, "__qualname__", type(one).__name__) for one in functions)
        return [f"{type(target).__name__}({', '.join(names)})" if names else type(target).__name__]
    schedulers = getattr(target, "schedulers", None) or [getattr(target, "scheduler", None)]
    if not isinstance(schedulers, (list, tuple)) or schedulers == [None]:
        return []
    return list(dict.fromkeys(name for scheduler in schedulers for name in schedules_of(scheduler)))


def batches_of(target: Any) -> dict[str, int | None]:
    """Returns what a data loader's position counts by: samples in a batch, and in all if it knows.

    Args:
        target: A loader, what wraps one, or any other object: it has none.
    """
    loader = getattr(target, "loader", target)
    if not isinstance(loader, DataLoader):
        return {}
    sized = {"samples": len(loader.dataset)} if isinstance(loader.dataset, Sized) else {}
    return {"batch_size": loader.batch_size, **sized}


def are_equal(one: Any, other: Any) -> bool:
    """Returns whether values are equal, of whatever type: an enum's member is like its text, a number of numpy's like
    one of Python's."""
    return _comparable(one) == _comparable(other)


def _comparable(value: Any) -> str:
    tree, tensors = encode_tree(value.item() if isinstance(value, np.generic) else value)
    return json.dumps([tree, {name: tensor.tolist() for name, tensor in tensors.items()}], sort_keys=True)


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
