"""The package's policies by the names that users write: the only place from which the engine gets one of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from moe_ckpt.policies.base import Policy
from moe_ckpt.policies.dense import CheckFreq, Dense, Gemini
from moe_ckpt.policies.gradient_log import GradientLog
from moe_ckpt.policies.moc import MoC
from moe_ckpt.policies.moetion import MoEtion
from moe_ckpt.policies.moevement import MoEvement

EXAMPLES = "MoC(k=1) or Dense(every_n_steps=10)"
"""For messages."""

_POLICIES: tuple[type[Any], ...] = (Dense, MoC, MoEvement, MoEtion, CheckFreq, Gemini, GradientLog)


def default_policy() -> Policy:
    """Returns the policy of a run whose user gives none: exact, for any model, and within 3 % of its time."""
    return CheckFreq()


def class_of(text: str) -> str | None:
    """Returns the name of the class that ``text`` means, in capitals or not; None if it means none."""
    return next((kind.__name__ for kind in _POLICIES if kind.__name__.lower() == text.lower()), None)


def with_option(option: str) -> str | None:
    """Returns the name of the first policy that has this option; None if none has it."""
    return next((kind.__name__ for kind in _POLICIES if option in (f.name for f in fields(kind))), None)
