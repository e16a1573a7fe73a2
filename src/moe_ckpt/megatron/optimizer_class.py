"""The kind of the inner optimizers, so that no other kind takes over their state.

Megatron uses Transformer Engine's Adam where installed, else Apex's, else torch's. Their update and state are the same,
so a run may change between them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_ckpt.errors import optimizer_changed
from moe_ckpt.megatron.optimizers import leaves
from moe_ckpt.modeling.optimizer_class import class_name
from moe_ckpt.recovery.index import split_key


def read(optimizer: Any) -> list[dict[str, str]]:
    """Returns ``{"class": ..., "kind": ...}`` of the rank's inner optimizers, each once; kinds: Adam, AdamW, SGD."""
    kinds = {(class_name(leaf.optimizer), _kind(leaf.optimizer)) for leaf in leaves(optimizer)}
    return [{"class": name, "kind": kind} for name, kind in sorted(kinds)]


def require_same(optimizer: Any, plain: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raises ``ConfigError`` unless stored state is of the running optimizer's kind. Changes nothing.

    Args:
        optimizer: Megatron's.
        plain: ``MegatronTrainingState.plain()`` of the checkpoint. In older ones, without classes, the names of state
            and hyperparameters distinguish Adam and SGD.
        keys: Of the stored tensors.
    """
    running, stored = read(optimizer), plain.get("optimizer_classes")
    if stored is None:
        stored_kinds, here = _family(plain, keys), {entry["kind"].removesuffix("W") for entry in running}
    else:
        stored_kinds, here = {entry["kind"] for entry in stored}, {entry["kind"] for entry in running}
    if stored_kinds and here and not stored_kinds & here:  # a rank whose parameters are all frozen has no optimizer
        names = [entry["class"] for entry in stored] if stored else sorted(stored_kinds)
        raise optimizer_changed("the optimizer", ", ".join(names), ", ".join(e["class"] for e in running))


def _kind(inner: Any) -> str:
    name = type(inner).__name__.removeprefix("Fused")
    return "AdamW" if name == "Adam" and type(inner).__name__ != name and getattr(inner, "adam_w_mode", True) else name


def _family(plain: Mapping[str, Any], keys: Collection[str]) -> set[str]:
    """Returns Adam or SGD by the names of state and hyperparameters; empty if they do not tell."""
    states = {split_key(key).state for key in keys}
    groups = {key for group in plain.get("optimizer", {}).get("groups", ()) for key in group}
    if "exp_avg" in states or "betas" in groups:
        return {"Adam"}
    return {"SGD"} if "momentum_buffer" in states or "momentum" in groups else set()
