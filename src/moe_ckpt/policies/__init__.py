"""Checkpointing policies: frozen values behind one method, ``plan(context) -> SnapshotPlan``."""

from moe_ckpt.policies.base import Measured, Policy, PolicyContext
from moe_ckpt.policies.checkfreq import CheckFreq
from moe_ckpt.policies.dense import Dense
from moe_ckpt.policies.guard import Guarded
from moe_ckpt.policies.moc import MoC
from moe_ckpt.policies.moetion import MoEtion
from moe_ckpt.policies.moevement import MoEvement

__all__ = ["CheckFreq", "Dense", "Guarded", "Measured", "MoC", "MoEtion", "MoEvement", "Policy", "PolicyContext"]
