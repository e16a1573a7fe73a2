"""MoC's Dynamic-K by the letter of the paper, for comparison: K only ever doubles, and nothing looks ahead."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.policies import MoC
from moe_ckpt.policies.base import PolicyContext


@dataclass(frozen=True)
class DoublingMoC(MoC):
    """``MoC`` with two differences: K does not fall when tokens that were routed since make room, and no checkpoint
    saves more experts than K because one more failure would break the budget (``policies.budget.top_up``)."""

    def current_k(self, context: PolicyContext) -> int:
        """After each recovery K doubles while what was lost is above the budget's shares up to it (1/2, 1/4, ...)."""
        k, share, lost = int(self.k), Fraction(str(self.budget)) / 2, 0
        most = max(layer.experts for layer in context.model.catalog.layers)
        allowed = share
        for fault in context.run.faults:
            lost += fault.lost_tokens
            while k < most and lost > allowed * fault.routed_tokens:
                k, share = min(2 * k, most), share / 2
                allowed += share
        return k

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        return MoC(self.current_k(context), self.every_n_steps, self.selector).plan(context)
