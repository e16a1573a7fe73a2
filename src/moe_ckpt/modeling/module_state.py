"""What a module keeps besides parameters: persistent buffers and extra state.

Only persistent buffers, those that ``state_dict()`` has: a module declares a buffer non-persistent to say
that it is rebuilt (causal masks, rotary tables), and giving it an old value would be a surprise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.blocks import block_of
from moe_ckpt.modeling.walk import Walk


def read(model: nn.Module, walk: Walk | None = None) -> dict[str, Any]:
    """Returns {"buffers": {name: live tensor}, "extra_state": {module name: value}, "own_state": {...}}.

    Costs as much as there is of these.

    Args:
        walk: Of the model, if it is known and current.
    """
    walk = walk or Walk(model)
    extra = {name: module.get_extra_state() for name, module in walk.with_extra}
    return {"buffers": dict(_buffers(walk)), "extra_state": extra, "own_state": _own_state(walk)}


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns {name: live tensor} of the persistent buffers; of a sharded one this rank's part."""
    return dict(_buffers(Walk(model)))


def check(model: nn.Module, stored: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` naming what the model and the checkpoint do not share."""
    walk = Walk(model)
    here, there = dict(_buffers(walk)), stored["buffers"]
    _require_same("buffers", set(here), set(there))
    for name, buffer in here.items():
        if tuple(buffer.shape) != tuple(there[name].shape):
            raise ConfigError(
                f"buffer {name!r} has shape {tuple(there[name].shape)} in the checkpoint, "
                f"{tuple(buffer.shape)} in the model"
            )
    _require_same("modules with extra state", {name for name, _ in walk.settable}, set(stored["extra_state"]))


def write(model: nn.Module, stored: Mapping[str, Any]) -> None:
    """Copy buffers in place and hand extra state back. ``check`` has passed."""
    walk = Walk(model)
    with torch.no_grad():
        for name, buffer in _buffers(walk):
            buffer.copy_(stored["buffers"][name])
    for name, module in walk.named:
        if name in stored["extra_state"]:
            module.set_extra_state(stored["extra_state"][name])
        if name in stored.get("own_state", {}):
            module.load_state_dict(stored["own_state"][name], strict=False)


def _own_state(walk: Walk) -> dict[str, dict[str, Any]]:
    """Module name -> entries that it adds to its state_dict beside parameters and buffers (torchmetrics' states).

    Only modules with a ``state_dict`` of their own can do that, so only those are asked.
    """
    own: dict[str, dict[str, Any]] = {}
    for name, module in walk.with_own:
        known = {id(t) for t in (*module.parameters(), *module.buffers())}
        entries = module.state_dict(keep_vars=True)
        rest = {k: v for k, v in entries.items() if id(v) not in known and not k.endswith("_extra_state")}
        if rest:
            own[name] = rest
    return own


def _buffers(walk: Walk) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, this rank's part) of each persistent buffer, tied ones once."""
    seen: set[int] = set()
    for prefix, module in walk.buffered:
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            name = f"{prefix}.{key}" if prefix else key
            yield name, block_of(buffer, f"buffer {name}").local


def _require_same(what: str, here: set[str], there: set[str]) -> None:
    if here != there:
        only_here, only_there = sorted(here - there)[:3], sorted(there - here)[:3]
        raise ConfigError(
            f"{what} differ; only in the checkpoint: {only_there or 'none'}, only in the model: {only_here or 'none'}. "
            "Build the model as it was when the checkpoint was written."
        )
