"""The kind of the inner optimizers, so that no other kind takes over their state.

Megatron uses Transformer Engine's Adam where installed, else Apex's, else torch's. Their update and state are the same,
so a run may change between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_ckpt.errors import optimizer_changed
from moe_ckpt.megatron.optimizers import leaves
from moe_ckpt.modeling.optimizer_class import class_name


def read(optimizer: Any) -> list[dict[str, str]]:
    """Returns ``{"class": ..., "kind": ...}`` of the rank's inner optimizers, each once; kinds: Adam, AdamW, SGD."""
    kinds = {(class_name(leaf.optimizer), _kind(leaf.optimizer)) for leaf in leaves(optimizer)}
    return [{"class": name, "kind": kind} for name, kind in sorted(kinds)]


def require_same(optimizer: Any, plain: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` unless stored state is of the running optimizer's kind. Changes nothing.

    Args:
        optimizer: Megatron's.
        plain: ``MegatronTrainingState.plain()`` of the checkpoint.
    """
    running, stored = read(optimizer), plain["optimizer_classes"]
    here, before = ({entry["kind"] for entry in entries} for entries in (running, stored))
    if before and here and not before & here:  # a rank whose parameters are all frozen has no optimizer
        names = (", ".join(entry["class"] for entry in entries) for entries in (stored, running))
        raise optimizer_changed("the optimizer", *names)


def _kind(inner: Any) -> str:
    name = type(inner).__name__.removeprefix("Fused")
    return "AdamW" if name == "Adam" and type(inner).__name__ != name and getattr(inner, "adam_w_mode", True) else name
