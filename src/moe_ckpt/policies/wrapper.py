"""``Wrapper``: the base class of policies that wrap another one and change a part of what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_ckpt.core.arguments import named_arguments
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import SnapshotPlan
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import Needs, Policy, PolicyContext, needs_of


def require_policy(argument: str, policy: Policy) -> None:
    """Raises ``ConfigError`` unless this is a policy whose needs can be read; ``argument`` is for the message."""
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
