"""Policies made of others: ``Wrapper``, a base class; ``AnyOf``, several at once; ``Guarded``, one within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import lcm
from typing import Any

from moe_ckpt.core.operators import Catalog, expert_id
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.user_text import named_arguments
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import Needs, Policy, PolicyContext, needs_of
from moe_ckpt.policies.budget import MLT_BUDGETS, resolve_budget, top_up, top_up_mlt
from moe_ckpt.policies.selectors import Expert, experts_of


def require_policy(argument: str, policy: Policy) -> None:
    """Raises ``ConfigError``, which names ``argument``, unless ``policy`` is a policy whose needs can be read."""
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise ConfigError(f"{argument}={policy!r}): give a policy, which has plan, check and describe, such as MoC()")
    needs_of(policy)


@named_arguments
@dataclass(frozen=True)
class Wrapper:
    """Wraps ``policy``, and passes on its needs, plans, checks and description unchanged.

    Subclasses, also frozen dataclasses, override a part, usually ``plan``. One that needs more adds it:
    ``dataclasses.replace(super().needs, lost_tokens=True)``. One that saves at other steps than ``policy`` must clear
    ``next_due``: ``dataclasses.replace(super().needs, next_due=None)``.

    Attributes:
        policy: The wrapped policy.

    Raises:
        ConfigError: It is not a policy, or its needs cannot be read.
    """

    policy: Policy

    def __post_init__(self) -> None:
        require_policy(f"{type(self).__name__}(policy", self.policy)

    @property
    def needs(self) -> Needs:
        return needs_of(self.policy)

    def check(self, catalog: Catalog) -> None:
        self.policy.check(catalog)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        return self.policy.plan(context)

    def describe(self) -> dict[str, Any]:
        return self.policy.describe()


@named_arguments
@dataclass(frozen=True)
class AnyOf:
    """Saves what any of ``policies`` wants: ``AnyOf([MoC(k=1), Dense(every_n_steps=1000)])``.

    Each policy is asked at every step, with the same context. So each sees the checkpoints of all: ``last_step``,
    ``index`` and ``chosen_at`` include those that other policies started. Policies on multiples of an interval are due
    as they would be alone; those that need to be alone (``Needs.alone``), have windows or log gradients are refused.

    Attributes:
        policies: A sequence, or a mapping by name, as Hydra composes it; the names have no effect.

    Raises:
        ConfigError: There are none, or one of them is not a policy or cannot be combined with others, or two count
            popularity in different ways.
    """

    policies: Sequence[Policy] | Mapping[str, Policy]

    def __post_init__(self) -> None:
        policies = self.policies.values() if isinstance(self.policies, Mapping) else self.policies
        if isinstance(policies, (str, type)) or not hasattr(policies, "__iter__"):
            raise ConfigError(f"AnyOf(policies={policies!r}): give several policies, such as [MoC(), Dense(1000)]")
        object.__setattr__(self, "policies", tuple(policies))
        if not self.policies:
            raise ConfigError("AnyOf(policies=[]): give at least one policy, such as MoC()")
        counted: dict[str, Policy] = {}
        for number, policy in enumerate(self._all):
            require_policy(f"AnyOf(policies[{number}]", policy)
            needs = needs_of(policy)
            if needs.alone or needs.windows or needs.gradients:
                why = (
                    "its log has a gap where another policy's checkpoint replaces its own"
                    if needs.gradients
                    else "it spreads a checkpoint over several steps, and no other checkpoint may come between them"
                    if needs.windows
                    else "it counts steps from the newest checkpoint, and would wait for ever after those of others"
                )
                raise ConfigError(
                    f"AnyOf(policies[{number}]={policy!r}): {type(policy).__name__} cannot be combined with other "
                    f"policies: {why}; use it alone, or Dense, MoC or MoEtion here"
                )
            if needs.popularity is not None:
                counted[needs.popularity] = policy
        if len(counted) > 1:
            what = " and ".join(f"{type(policy).__name__} ({kind!r})" for kind, policy in counted.items())
            raise ConfigError(f"AnyOf: {what} count popularity in different ways; combine policies that count it alike")

    @property
    def _all(self) -> tuple[Policy, ...]:
        return tuple(self.policies)  # type: ignore[arg-type]  # a tuple since __post_init__

    @property
    def needs(self) -> Needs:
        every = [needs_of(policy) for policy in self._all]
        names = ("sizes", "lost_tokens", "tiers", "partial", "bubbles")
        flags: dict[str, Any] = {name: any(getattr(needs, name) for needs in every) for name in names}
        return Needs(
            **flags,
            popularity=next((needs.popularity for needs in every if needs.popularity), None),
            boost=max((needs.boost for needs in every if needs.boost is not None), default=None),
            replicas=max(needs.replicas for needs in every),
            period_steps=lcm(*(needs.period_steps for needs in every)),
            next_due=self.next_due,
            warning=self.warning if any(needs.warning for needs in every) else None,
        )

    def check(self, catalog: Catalog) -> None:
        for policy in self._all:
            policy.check(catalog)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        """Returns the plan of the only policy that wants a checkpoint, or the union of all plans, tier by tier.

        Training waits if any of them asks for it. ``k`` is the largest, and ``plt_budget`` the tightest, since more
        experts never lose more.

        Raises:
            ConfigError: A policy plans a slot of a sparse window without ``Needs(windows=True)``.
        """
        plans = [policy.plan(context) for policy in self._all]
        due = [plan for plan in plans if plan] or plans[:1]
        return due[0] if len(due) == 1 else self._union(context, due)

    def _union(self, context: PolicyContext, plans: Sequence[SnapshotPlan]) -> SnapshotPlan:
        for plan in plans:
            if plan.window is not None or plan.compute:
                raise ConfigError(
                    "AnyOf: a policy without Needs(windows=True) plans a slot of a sparse window at step "
                    f"{context.run.step}; use it alone"
                )
        stored = _together(context, [plan.full for plan in plans])
        in_memory = _together(context, [plan.memory_only for plan in plans])
        in_storage = set(stored)  # operators for storage pass through host memory anyway
        ks = [plan.k for plan in plans if plan.k is not None]
        budgets = [plan.plt_budget for plan in plans if plan.plt_budget is not None]
        return SnapshotPlan(
            context.run.step,
            stored,
            memory_only=tuple(op for op in in_memory if op not in in_storage),
            wait=any(plan.wait for plan in plans),
            k=max(ks, default=None),
            plt_budget=min(budgets, default=None),
            sends_memory_only=all(plan.sends_memory_only for plan in plans if plan.memory_only),
        )

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``."""
        return min(needs_of(policy).due(context) for policy in self._all)

    def warning(self, context: PolicyContext) -> str | None:
        """See ``Needs.warning``: the first one of any policy."""
        asked = (needs_of(policy).warning for policy in self._all)
        return next((text for ask in asked if ask is not None and (text := ask(context)) is not None), None)

    def describe(self) -> dict[str, Any]:
        return {"name": "any_of", "policies": [policy.describe() for policy in self._all]}


def _together(context: PolicyContext, chosen: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the union in catalog order, with unknown operators at the end, which the engine then refuses."""
    index_of = context.model.catalog.index_of
    every = dict.fromkeys(chain.from_iterable(chosen))
    return tuple(sorted(every, key=lambda op: index_of.get(op, len(index_of))))


@named_arguments
@dataclass(frozen=True)
class Guarded(Wrapper):
    """Keeps ``policy`` within a budget for lost tokens (PLT, MLT or both), whatever it plans.

    If a failure that returns to the planned checkpoint would exceed a budget (``budget.top_up``, ``top_up_mlt``), that
    checkpoint also saves the fewest experts that keep the budget. When checkpoints are made remains the policy's
    decision.

    Attributes:
        policy: The policy that decides within the budget.
        budget: For PLT, all failures together: a number between 0 and 1, or a name in ``policies.budget.PLT_BUDGETS``.
            None: only ``mlt_budget`` counts.
        mlt_budget: For MLT, each failure separately: a number between 0 and 1, or a name in
            ``policies.budget.MLT_BUDGETS``.

    Raises:
        ConfigError: No policy, no budget, or one that is not between 0 and 1.
    """

    budget: float | str | None = "default"
    mlt_budget: float | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is None and self.mlt_budget is None:
            raise ConfigError("Guarded(budget=None, mlt_budget=None): give at least one of the two budgets")
        if self.budget is not None:
            resolve_budget(self.budget, "Guarded: budget")
        if self.mlt_budget is not None:
            resolve_budget(self.mlt_budget, "Guarded: mlt_budget", MLT_BUDGETS)

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
        """Returns the policy's plan, with further experts unless it saves nothing, or all experts without a K
        (Dense)."""
        plan = self.policy.plan(context)
        if not plan or plan.window is not None:  # replay loses nothing
            return plan
        stored = experts_of(context, (*plan.full, *plan.gradients))
        if plan.k is None and len(stored) == len(context.model.catalog.experts):
            return plan
        budgets = [budget for budget in (self.plt_budget, plan.plt_budget) if budget is not None]
        plan = replace(plan, plt_budget=min(budgets, default=None))
        more = self._needed(context, stored)
        return _adding(plan, context, more) if more else plan

    def _needed(self, context: PolicyContext, stored: set[Expert]) -> tuple[Expert, ...]:
        """Returns the experts to save beside ``stored``, so that both budgets hold."""
        of_plt = () if self.plt_budget is None else top_up(context, stored, self.plt_budget)
        of_mlt = () if self.most_mlt is None else top_up_mlt(context, stored | {*of_plt}, self.most_mlt)
        return tuple(sorted((*of_plt, *of_mlt)))

    def describe(self) -> dict[str, Any]:
        momentary = {} if self.most_mlt is None else {"guard_mlt_budget": self.most_mlt}
        return {**self.policy.describe(), "guard_budget": self.plt_budget, **momentary}


def _adding(plan: SnapshotPlan, context: PolicyContext, experts: Iterable[Expert]) -> SnapshotPlan:
    """Returns ``plan`` with ``experts`` sent to storage, too, and no longer saved in another way."""
    chosen = {*plan.full, *(expert_id(*expert) for expert in experts)}
    stored = tuple(op for op in context.model.catalog.everything if op in chosen)

    def rest(operators: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(op for op in operators if op not in chosen)

    return replace(plan, full=stored, memory_only=rest(plan.memory_only), gradients=rest(plan.gradients))
