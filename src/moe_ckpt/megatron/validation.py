"""Validations of Megatron-LM's ``train`` beside an upstream log.

A validation changes no weights, and all stages have made it. So a stage that computes the iteration before it again
leaves it out: it only draws the validation's batches, and counts them, to stand where the others do.
"""

from __future__ import annotations

import importlib
from typing import Any

from moe_ckpt.megatron.script_values import flat


def can_pass_over(settings: Any) -> bool:
    """Returns whether it is known which batches a validation draws.

    Args:
        settings: Megatron's arguments.
    """
    others = ("multiple_validation_sets", "full_validation", "vision_pretraining")
    return isinstance(settings.eval_iters, int) and not any(getattr(settings, name, False) for name in others)


def pass_over(settings: Any, data_iterator: Any) -> None:
    """Draws and counts what a validation would have.

    Args:
        settings: Megatron's arguments.
        data_iterator: Of the validation data; a list of one for each chunk of the model, or None where none is read.
    """
    machine: Any = importlib.import_module("megatron.core.rerun_state_machine")
    state = machine.get_rerun_state_machine()
    mode = state.get_mode()
    state.set_mode(machine.RerunMode.DISABLED)  # as in a validation, of whose batches none is kept
    try:
        batches = settings.global_batch_size // (settings.micro_batch_size * settings.data_parallel_size)
        for iterator in flat(data_iterator):
            for _ in range(0 if iterator is None else batches * settings.eval_iters):
                next(iterator)
    finally:
        state.set_mode(mode)
    settings.consumed_valid_samples += settings.global_batch_size * settings.eval_iters
