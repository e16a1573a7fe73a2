"""When training ends: as far as a callback can tell, and because a policy asked for it."""

from __future__ import annotations

from typing import Any


def will_stop(trainer: Any) -> bool:
    """True if, as far as can be told at the end of a batch, this was the last one."""
    if trainer.should_stop or (trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps):
        return True
    limit = trainer.max_epochs
    return trainer.is_last_batch and limit not in (None, -1) and trainer.current_epoch + 1 >= limit


def may_stop(trainer: Any) -> bool:
    """True if Lightning will heed ``trainer.should_stop``. Called at the end of a batch."""
    return not _short_of(trainer)


def _short_of(trainer: Any) -> list[str]:
    """The least that training must run for, where that is not reached."""
    epochs = trainer.current_epoch + bool(trainer.is_last_batch)
    wanted = {"min_steps": trainer.min_steps or 0, "min_epochs": trainer.min_epochs or 0}
    reached = {"min_steps": trainer.global_step, "min_epochs": epochs}
    return [f"{name}={wanted[name]}" for name in wanted if reached[name] < wanted[name]]


def refusal(trainer: Any, reason: str) -> str:
    """The message for when the policy asks for the end, and Lightning may not end yet."""
    return (
        f"the policy asks to end training: {reason} But Trainer({', '.join(_short_of(trainer))}) would let it go on, "
        f"so this error ends it at step {trainer.global_step}. That step is saved, and the same command goes on from "
        "it. Leave min_steps and min_epochs out, or choose another guard."
    )
