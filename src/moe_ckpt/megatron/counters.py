"""The counters of Megatron-LM's ``train`` beside iterations and samples, and checkpoints keep."""

from __future__ import annotations

import importlib
from typing import Any

COUNTED = ("consumed_valid_samples", "skipped_train_samples", "num_floating_point_operations_so_far")
"""Counters in ``args`` that are saved, if this version has them."""


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
