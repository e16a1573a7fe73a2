"""The state of a module besides its parameters' values: buffers, extra state, and which parameters are trained.

Only persistent buffers are saved, those that ``state_dict()`` has: a module declares a buffer non-persistent if it
computes it again (causal masks, rotary tables). Which parameters require gradients is state, too, since training may
freeze and thaw them. Models of transformers are described, as plain data only, so that ``from_pretrained`` opens an
export.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Collection, Mapping
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moe_ckpt.core.operators import Catalog
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.sealed import FixedStrings
from moe_ckpt.modeling.blocks import block_in, block_of, is_dtensor
from moe_ckpt.modeling.names import clean_name, require_same_names
from moe_ckpt.modeling.watching import Walk

log = logging.getLogger("moe_ckpt")

_VARYING = "varying_buffers"
"""Key of the names of buffers whose shape has changed in the run; absent if there are none."""
_ALIASES = "aliases"
"""Key of further names of state that several modules share; absent if there are none."""


class Varying:
    """The buffers whose shape changes in training. Restored, they get the checkpoint's shape, not the script's.

    Args:
        present: The buffers by name, before training.

    Attributes:
        names: Of the buffers known to do so, from this process or the checkpoint.
    """

    def __init__(self, present: Mapping[str, torch.Tensor]) -> None:
        self.names: set[str] = set()
        self._first = {name: buffer.shape for name, buffer in present.items() if not nn.parameter.is_lazy(buffer)}

    def note(self, present: Mapping[str, torch.Tensor]) -> None:
        """Adds the names of buffers whose shape is no longer the first one."""
        for name, buffer in present.items():
            if self._first.setdefault(name, buffer.shape) != buffer.shape:
                self.names.add(name)


def read(walk: Walk, varying: Varying) -> dict[str, Any]:
    """Returns {"buffers": {name: live tensor}, "extra_state": {module name: value}, "own_state": {...}}.

    State that several modules share has one entry, and "aliases" has {further name in ``state_dict()``: its name}.

    Args:
        walk: Of the model, current.
        varying: Of the model. Buffers whose shape has changed are added.
    """
    extra = {name: module.get_extra_state() for name, module in walk.with_extra}
    held, tied = _held(walk)
    blocks, added = _blocks(held), _own_state(walk)
    varying.note(blocks)
    more: dict[str, Any] = {_VARYING: sorted(varying.names)} if varying.names else {}
    if others := tied | _of_shared(walk, added):
        more[_ALIASES] = others
    return {"buffers": blocks, "extra_state": extra, "own_state": added, **more}


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the persistent buffers by name, as live tensors; this rank's part of a sharded one."""
    return _blocks(_held(Walk(model))[0])


def tied_buffers(model: nn.Module) -> dict[str, str]:
    """Returns further name of a persistent buffer -> its name in ``buffers``."""
    return _held(Walk(model))[1]


def check(walk: Walk, varying: Varying, stored: Mapping[str, Any]) -> None:
    """Raises ``ConfigError``, naming the differences, unless ``write`` can restore ``stored`` into the model."""
    here, saved = _held(walk)[0], stored["buffers"]
    varies = varying.names.union(stored.get(_VARYING, ()))
    require_same_names("buffers", here, saved)
    for name, held in here.items():
        buffer = block_of(held, f"buffer {name}").local
        fits = tuple(buffer.shape) == tuple(saved[name].shape)
        if not fits and (name not in varies or is_dtensor(held)):
            raise ConfigError(
                f"buffer {name!r} has shape {tuple(saved[name].shape)} in the checkpoint, "
                f"{tuple(buffer.shape)} in the model"
            )
    require_same_names("modules with extra state", [name for name, _ in walk.settable], stored["extra_state"])


def write(model: nn.Module, varying: Varying, stored: Mapping[str, Any]) -> None:
    """Restores buffers in place, extra state and own state. ``check`` has passed."""
    walk = Walk(model)
    varying.names.update(stored.get(_VARYING, ()))
    with torch.no_grad():
        for name, held in _held(walk)[0].items():
            value = stored["buffers"][name]
            buffer = block_of(held, f"buffer {name}").local
            if buffer.shape != value.shape:  # other memory, but the same tensor object, which DDP refers to
                held.data = buffer = torch.empty_like(value, dtype=held.dtype, device=held.device)
            buffer.copy_(value)
    for name, module in walk.named:
        if name in stored["extra_state"]:
            module.set_extra_state(stored["extra_state"][name])
        if name in stored.get("own_state", {}):
            module.load_state_dict(stored["own_state"][name], strict=False)


def _own_state(walk: Walk) -> dict[str, dict[str, Any]]:
    """Returns module name -> further entries of its state_dict, beside parameters and buffers (torchmetrics' states).

    Only modules that override ``state_dict`` can have these.
    """
    added: dict[str, dict[str, Any]] = {}
    for name, module in walk.with_own:
        listed = (*module.parameters(), *module.buffers())
        ids = {id(tensor) for tensor in listed}
        entries = _state_dict(module, listed)
        rest = {k: v for k, v in entries.items() if id(v) not in ids and not k.endswith("_extra_state")}
        if rest:
            added[name] = rest
    return added


def _state_dict(module: nn.Module, listed: Collection[torch.Tensor]) -> Mapping[str, Any]:
    """Returns ``state_dict()`` of a module that overrides it. An override without torch's arguments, as Lightning
    allows it, gives other tensors in the memory of those that are ``listed``: these are left out."""
    accepted = inspect.signature(module.state_dict).parameters.values()
    if any(parameter.name == "keep_vars" or parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        entries: Mapping[str, Any] = module.state_dict(keep_vars=True)
        return entries
    held = {block_in(tensor).data_ptr() for tensor in listed}
    return {
        name: value
        for name, value in module.state_dict().items()
        if not (isinstance(value, torch.Tensor) and block_in(value).data_ptr() in held)
    }


def _of_shared(walk: Walk, added: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns further name -> name, of extra state and own entries of modules that are in several places."""
    overriding = {id(module) for _, module in walk.with_extra}
    aliases: dict[str, str] = {}
    for name, first, module in walk.shared:
        entries = [*added.get(first, ()), *(["_extra_state"] if id(module) in overriding else [])]
        aliases.update({joined_name(name, entry): joined_name(first, entry) for entry in entries})
    return aliases


def _blocks(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns name -> this rank's part of each buffer."""
    return {name: block_of(buffer, f"buffer {name}").local for name, buffer in held.items()}


def _held(walk: Walk) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns (name -> persistent buffer, each once; further name -> name)."""
    first: dict[int, str] = {}
    held: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for prefix, module in (*walk.buffered, *((name, module) for name, _, module in walk.shared)):
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set:
                continue
            name = joined_name(prefix, key)
            original = first.setdefault(id(buffer), name)
            if original == name:
                held[name] = buffer
            else:
                aliases[name] = original
    return held, aliases


def joined_name(prefix: str, name: str) -> str:
    """Returns the name of what a module has; ``prefix`` is the module's own, empty for the model."""
    return f"{prefix}.{name}" if prefix else name


_REQUIRES_GRAD = attrgetter("requires_grad")


class Frozen:
    """The names of the parameters that require no gradient; the same object as long as the names are the same."""

    def __init__(self) -> None:
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._trained: list[bool] = []
        self._names = FixedStrings(())

    def names(self, parameters: Mapping[str, nn.Parameter]) -> FixedStrings:
        """Returns the names. Called at every snapshot, so no bytecode runs per parameter.

        Args:
            parameters: The model's, by name; another object if the parameters are others.
        """
        with torch._C.DisableTorchFunction():  # else a mode, such as a torch.device, is asked for each parameter
            trained = list(map(_REQUIRES_GRAD, parameters.values()))
        if parameters is not self._parameters or trained != self._trained:
            self._parameters, self._trained = parameters, trained
            self._names = FixedStrings(compress(parameters, map(not_, trained)))
        return self._names


class FrozenExperts:
    """The experts that no update changes, because none of their parameters requires a gradient.

    Args:
        catalog: Of the model.
        names: Returns the names of the frozen parameters, the very same object as long as they are the same.
    """

    def __init__(self, catalog: Catalog, names: Callable[[], FixedStrings]) -> None:
        self._frozen_names = names
        self._parameters_of = {
            catalog.expert_at[op.id]: {span.parameter for span in op.spans} for op in catalog.experts
        }
        self._shape = catalog.expert_places.shape
        self._names: FixedStrings | None = None
        self._mask: npt.NDArray[np.bool_] | None = None

    def __call__(self) -> npt.NDArray[np.bool_] | None:
        """Returns a mask ``[L, E]``, the same object as long as it is equal; None if no expert is frozen."""
        names = self._frozen_names()
        if names is not self._names:
            self._names, frozen = names, frozenset(names)
            mask = np.zeros(self._shape, dtype=bool)
            for at, parameters in self._parameters_of.items() if frozen else ():
                mask[at] = bool(parameters) and parameters <= frozen
            self._mask = mask if mask.any() else None
        return self._mask


def freeze(parameters: Mapping[str, nn.Parameter], frozen: Collection[str]) -> None:
    """Makes the parameters named in ``frozen`` require no gradient, and all others require one."""
    names = frozenset(frozen)
    for name, parameter in parameters.items():
        if parameter.requires_grad == (name in names):
            parameter.requires_grad_(name not in names)


# --- models of transformers ---


def pretrained_models(model: nn.Module) -> list[dict[str, Any]]:
    """Describes every outermost ``PreTrainedModel`` inside ``model``, or ``model`` itself.

    Models with adapters (PEFT) are left out, since ``from_pretrained`` would not know their names, and those whose
    config ``save_pretrained`` could not write.

    Returns:
        Per model: ``prefix`` of its tensors' names, ``class``, ``config`` and ``generation_config`` (or None) as
        ``save_pretrained`` would write them.
    """
    descriptions: list[dict[str, Any]] = []
    passed: list[str] = []
    for raw, module in model.named_modules():
        name = clean_name(raw)
        if any(name == outer or name.startswith(f"{outer}." if outer else "") for outer in passed):
            continue
        if _is_of(module, "PeftModel", "peft") or getattr(module, "_hf_peft_config_loaded", False):
            passed.append(name)
        elif _is_of(module, "PreTrainedModel", "transformers") and hasattr(
            getattr(module, "config", None), "to_json_string"
        ):
            passed.append(name)
            try:
                descriptions.append(_describe(f"{name}." if name else "", module))
            except (TypeError, ValueError) as error:
                log.warning("the config of %s is no JSON, so exports will have none: %s", type(module).__name__, error)
    return descriptions


def _describe(prefix: str, module: Any) -> dict[str, Any]:
    names = [kind.__name__ for kind in type(module).__mro__]
    kind = names[1] if names[0] == f"FSDP{names[1]}" else names[0]  # FSDP2 puts a class of its own in front
    config = json.loads(module.config.to_json_string())
    generation = getattr(module, "generation_config", None)
    return {
        "prefix": prefix,
        "class": kind,
        "config": {**config, "architectures": [kind]},
        "generation_config": None if generation is None else json.loads(generation.to_json_string()),
    }


def _is_of(module: nn.Module, name: str, package: str) -> bool:
    """Returns whether a module is of a class with this name, of a package that need not be installed."""
    kinds = type(module).__mro__
    return any(kind.__name__ == name and kind.__module__.startswith(f"{package}.") for kind in kinds)
