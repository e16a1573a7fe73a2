"""Describes models of transformers for an export, so that ``from_pretrained`` opens it: as plain data only."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from moe_ckpt.modeling.names import clean_name


def read(model: nn.Module) -> list[dict[str, Any]]:
    """Describes every outermost ``PreTrainedModel`` inside ``model``, or ``model`` itself.

    Models with adapters (PEFT) are left out, since ``from_pretrained`` would not know their names.

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
            descriptions.append(_describe(f"{name}." if name else "", module))
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
