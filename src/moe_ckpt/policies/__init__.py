"""Checkpointing policies: frozen values behind one method, ``plan(context) -> SnapshotPlan``.

Besides the policies of the package, this module exports the classes for writing a policy (docs/own_policy.md). It also
finds policies by the names that users write; the engine gets a concrete policy only from here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, expert_id, gate_id, non_expert_id
from moe_ckpt.core.step import SnapshotPlan, Tier
from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.policies.base import (
    Measured,
    MemoryFacts,
    ModelFacts,
    Needs,
    Policy,
    PolicyContext,
    RunFacts,
    TokenFacts,
    needs_of,
)
from moe_ckpt.policies.dense import CheckFreq, Dense, Gemini
from moe_ckpt.policies.gradient_log import GradientLog
from moe_ckpt.policies.moc import MoC
from moe_ckpt.policies.moetion import MoEtion
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.policies.wrapper import AnyOf, Guarded, Wrapper

__all__ = [
    "AnyOf",
    "Catalog",
    "CheckFreq",
    "Dense",
    "FaultRecord",
    "Gemini",
    "GradientLog",
    "Guarded",
    "Measured",
    "MemoryFacts",
    "MoC",
    "MoELayer",
    "MoEtion",
    "MoEvement",
    "ModelFacts",
    "Needs",
    "Operator",
    "OperatorKind",
    "Policy",
    "PolicyContext",
    "RunFacts",
    "SnapshotPlan",
    "Tier",
    "TokenFacts",
    "Wrapper",
    "expert_id",
    "gate_id",
    "needs_of",
    "non_expert_id",
]

EXAMPLES = "MoC(k=1) or Dense(every_n_steps=10)"
"""Examples for messages."""

NAMED: tuple[type[Any], ...] = (Dense, MoC, MoEvement, MoEtion, CheckFreq, Gemini, GradientLog)
"""The policies that users and configs choose by name, without those that wrap others."""


def default_policy() -> Policy:
    """Returns the policy of a run whose user chooses none: exact, for any model, and within 3 % of its time."""
    return CheckFreq()


def class_of(text: str) -> str | None:
    """Returns the name of the policy class called ``text``, in any case of letters; None if there is none."""
    return next((kind.__name__ for kind in NAMED if kind.__name__.lower() == text.lower()), None)


def with_option(option: str) -> str | None:
    """Returns the name of the first policy that has this option; None if none has it."""
    return next((kind.__name__ for kind in NAMED if option in (f.name for f in fields(kind))), None)
