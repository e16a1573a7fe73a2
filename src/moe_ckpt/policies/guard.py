"""``Guarded``: a wrapper that keeps any policy within a budget of lost tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moe_ckpt.core.arguments import named_arguments
from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.plan import SnapshotPlan
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import Needs, PolicyContext
from moe_ckpt.policies.budget import (
    MLT_BUDGETS,
    at_risk,
    mlt_at_risk,
    resolve_budget,
    tokens_left,
    top_up,
    top_up_mlt,
)
from moe_ckpt.policies.experts.selection import Expert, experts_of
from moe_ckpt.policies.wrapper import Wrapper

ACTIONS = ("escalate", "dense", "stop")


@named_arguments
@dataclass(frozen=True)
class Guarded(Wrapper):
    """Keeps ``policy`` within a budget for lost tokens (PLT, MLT or both), whatever it plans.

    If a failure that returns to the planned checkpoint would exceed a budget (``budget.top_up``, ``top_up_mlt``), that
    checkpoint saves more experts than ``policy`` asked for. When checkpoints are made remains the policy's decision.

    Attributes:
        policy: The policy that decides within the budget.
        budget: For PLT, all failures together: a number between 0 and 1, or a name in ``policies.budget.PLT_BUDGETS``.
            None: only ``mlt_budget`` counts.
        action: ``"escalate"``: that checkpoint also saves the fewest experts that keep the budget. ``"dense"``: it
            saves all experts. ``"stop"``: it saves all experts and asks training to end, since the policy alone cannot
            keep the budget; but while no token was lost yet it escalates, because every run starts with too few routed
            tokens for a budget.
        mlt_budget: For MLT, each failure separately: a number between 0 and 1, or a name in
            ``policies.budget.MLT_BUDGETS``.

    Raises:
        ConfigError: No policy, no such action, no budget, or one that is not between 0 and 1.
    """

    budget: float | str | None = "default"
    action: str = "escalate"
    mlt_budget: float | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is None and self.mlt_budget is None:
            raise ConfigError("Guarded(budget=None, mlt_budget=None): give at least one of the two budgets")
        if self.budget is not None:
            resolve_budget(self.budget, "Guarded: budget")
        if self.mlt_budget is not None:
            resolve_budget(self.mlt_budget, "Guarded: mlt_budget", MLT_BUDGETS)
        if self.action not in ACTIONS:
            raise ConfigError(f"Guarded(action={self.action!r}): no such action; choose from {list(ACTIONS)}")

    @property
    def plt_budget(self) -> float | None:
        """``budget`` as a number."""
        return None if self.budget is None else resolve_budget(self.budget)

    @property
    def most_mlt(self) -> float | None:
        """``mlt_budget`` as a number."""
        return None if self.mlt_budget is None else resolve_budget(self.mlt_budget, names=MLT_BUDGETS)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, lost_tokens=True)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        """The policy's plan; unchanged if it saves nothing, or all experts without counting in K (Dense)."""
        plan = self.policy.plan(context)
        if not plan or plan.window is not None:  # replay loses nothing
            return plan
        stored = experts_of(context, (*plan.full, *plan.gradients))
        if plan.k is None and len(stored) == len(context.model.catalog.experts):
            return plan
        budgets = [budget for budget in (self.plt_budget, plan.plt_budget) if budget is not None]
        plan = replace(plan, plt_budget=min(budgets, default=None))
        more = self._needed(context, stored)
        if not more:
            return plan
        if self.action == "escalate" or (self.action == "stop" and not context.run.lost_tokens):
            return _adding(plan, context, more)
        halt = self._why(context, stored) if self.action == "stop" else None
        return replace(_adding_all(plan, context), halt=plan.halt or halt)

    def _needed(self, context: PolicyContext, stored: set[Expert]) -> tuple[Expert, ...]:
        """Experts to save beside ``stored``, so that both budgets hold."""
        of_plt = () if self.plt_budget is None else top_up(context, stored, self.plt_budget)
        of_mlt = () if self.most_mlt is None else top_up_mlt(context, stored | {*of_plt}, self.most_mlt)
        return tuple(sorted((*of_plt, *of_mlt)))

    def _why(self, context: PolicyContext, stored: set[Expert]) -> str:
        routed = max(context.tokens.routed_tokens, 1)
        lost, budget, most = context.run.lost_tokens, self.plt_budget, self.most_mlt
        setting = f"budget ({self.budget!r})"
        if budget is not None and tokens_left(context, budget) < 0:
            reason = f"{lost / routed:.2%} of all tokens are lost, over the budget of {budget:.2%}"
        elif budget is not None and top_up(context, stored, budget):
            reason = (
                f"{lost / routed:.2%} of all tokens are lost, and a failure now would make it "
                f"{(lost + at_risk(context, stored)) / routed:.2%}, over the budget of {budget:.2%}"
            )
        else:
            setting = f"mlt_budget ({self.mlt_budget!r})"
            reason = (
                f"a failure now would lose {mlt_at_risk(context, stored):.2%} of each layer's tokens, on average "
                f"(MLT), over the budget of {most:.2%}"
            )
        return (
            f"{reason}, at step {context.run.step}. All experts are saved. Before going on, save more experts per "
            f"checkpoint (raise k, or give MoC a plt_budget, which raises k automatically), save more often, or raise "
            f"the guard's {setting} or change its action from 'stop' to 'escalate'."
        )

    def describe(self) -> dict[str, Any]:
        momentary = {} if self.most_mlt is None else {"guard_mlt_budget": self.most_mlt}
        description = {**self.policy.describe(), "guard_budget": self.plt_budget, "guard_action": self.action}
        return {**description, **momentary}


def _adding(plan: SnapshotPlan, context: PolicyContext, experts: tuple[Expert, ...]) -> SnapshotPlan:
    """``plan`` with ``experts`` sent to storage too, in the order of the catalog; what stays in host memory follows."""
    chosen = {*plan.full, *(expert_id(*expert) for expert in experts)}
    stored = tuple(op for op in context.model.catalog.everything if op in chosen)

    def rest(operators: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(op for op in operators if op not in chosen)

    return replace(plan, full=stored, memory_only=rest(plan.memory_only), gradients=rest(plan.gradients))


def _adding_all(plan: SnapshotPlan, context: PolicyContext) -> SnapshotPlan:
    planned = experts_of(context, plan.full)
    every = {
        (op.layer, op.expert) for op in context.model.catalog.experts if op.layer is not None and op.expert is not None
    }
    return _adding(plan, context, tuple(sorted(every - planned)))
