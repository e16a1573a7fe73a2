"""Checkpointing policies: frozen values behind one method, ``plan(context) -> SnapshotPlan``.

Besides the policies that come with the package, this module exports what a policy of one's own is made of: see
docs/own_policy.md.
"""

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
