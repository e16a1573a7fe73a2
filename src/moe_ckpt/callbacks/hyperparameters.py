"""What of a script's hyperparameters differs from those of the checkpoint that training goes on from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_ckpt.callbacks.lightning_state import HYPER_PARAMETERS, plain_hparams
from moe_ckpt.format.tree import encode_tree

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of torch's optimizers that choose how an update is computed, not which."""
_ABSENT = "(not set)"
_SHOWN = 60


@dataclass(frozen=True)
class Change:
    """One hyperparameter.

    Attributes:
        where: ``module.dropout``, ``optimizer 0 lr``.
        before: Its value in the checkpoint, as text.
        now: Its value in this script, as text.
        kept: Training goes on with the checkpoint's value (optimizers, schedulers), as Lightning's resume does, instead
            of with the script's (modules and datamodules).
        decides: It tells one experiment from another. What a scheduler computes from the length of training does not.
    """

    where: str
    before: str
    now: str
    kept: bool
    decides: bool = True

    def __str__(self) -> str:
        return f"{self.where} {self.before} -> {self.now}"


def configured(trainer: Any) -> dict[str, Any]:
    """Returns the hyperparameters of optimizers and schedulers as the script configures them, as plain data.

    Called before a checkpoint's are put in their place; compare with what this gave when the run began.
    """
    return {
        "optimizers": [[_plain_group(group) for group in opt.param_groups] for opt in trainer.optimizers],
        "schedulers": [_plain_group(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
    }


def _plain_group(group: Mapping[Any, Any]) -> dict[str, Any]:
    found = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if key not in _IMPLEMENTATION and not str(key).startswith("_") and _is_plain(value):
            found[str(key)] = value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def changes(trainer: Any, stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Returns what differs between a checkpoint and this script, in the order of the script.

    Args:
        trainer: Of this script.
        stored: Plain state of the checkpoint. Those of earlier releases say nothing about optimizers.
        now: Of ``configured``.
    """
    found: list[Change] = []
    checkpoint = stored.get("checkpoint", {})
    for name, owner, key in zip(
        ("module", "datamodule"), (trainer.lightning_module, trainer.datamodule), HYPER_PARAMETERS, strict=True
    ):
        if owner is not None and key in checkpoint:
            found += _differing(f"{name}.", checkpoint[key], plain_hparams(owner, key), kept=False)
    before = stored.get("configured")
    if before is None:
        return found
    for number, (old, new) in enumerate(zip(before["optimizers"], now["optimizers"], strict=False)):
        found += _of_groups(f"optimizer {number} " if len(now["optimizers"]) > 1 else "optimizer ", old, new)
    for old, new in zip(before["schedulers"], now["schedulers"], strict=False):
        old, new = ({key: value for key, value in each.items() if key != "base_lrs"} for each in (old, new))
        found += _differing("scheduler ", old, new, kept=True, decides=False)
    return found


def _of_groups(name: str, before: list[Mapping[str, Any]], now: list[Mapping[str, Any]]) -> Iterator[Change]:
    """Each change once, though several groups may have it, and a scheduler keeps the rate as ``initial_lr`` too."""
    seen = set()
    for old, new in zip(before, now, strict=False):
        for change in _differing(name, old, new, kept=True):
            told = Change(change.where.replace("initial_lr", "lr"), change.before, change.now, True)
            if told not in seen:
                seen.add(told)
                yield told


def _differing(
    name: str, before: Mapping[str, Any], now: Mapping[str, Any], *, kept: bool, decides: bool = True
) -> Iterator[Change]:
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in (*new, *(key for key in old if key not in new)):
        if _comparable(old.get(key, _ABSENT)) != _comparable(new.get(key, _ABSENT)):
            was, now_is = (_text(values[key]) if key in values else _ABSENT for values in (old, new))
            yield Change(f"{name}{key}", was, now_is, kept, decides)


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _comparable(value: Any) -> str:
    """Alike for values that come back from a checkpoint in another type: an enum as text, numpy's numbers."""
    tree, tensors = encode_tree(value)
    return json.dumps([tree, {name: tensor.tolist() for name, tensor in tensors.items()}], sort_keys=True)


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
