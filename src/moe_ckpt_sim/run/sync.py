"""``SyncDense``: a synchronous baseline for comparisons."""

from __future__ import annotations

from dataclasses import replace

from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.policies import Dense
from moe_ckpt.policies.base import PolicyContext


class SyncDense(Dense):
    """Saves as ``Dense`` does, while training waits until each checkpoint is committed, as ``torch.save`` makes it."""

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        plan = super().plan(context)
        return replace(plan, wait=True) if plan else plan
