"""``Dense``: saves everything every N steps, as plain Lightning and Megatron do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moe_ckpt.core.arguments import named_arguments
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import SnapshotPlan, save_full, save_nothing
from moe_ckpt.policies.base import Needs, PolicyContext, interval_passed, next_multiple, require_positive


@named_arguments
@dataclass(frozen=True)
class Dense:
    """Save every operator at full fidelity every ``every_n_steps`` optimizer steps.

    Attributes:
        every_n_steps: Steps from one checkpoint to the next.

    Raises:
        ConfigError: ``every_n_steps`` is below 1.
    """

    every_n_steps: int = 1

    def __post_init__(self) -> None:
        require_positive("Dense", every_n_steps=self.every_n_steps)

    def check(self, catalog: Catalog) -> None:
        """Accepts any model, also one without MoE layers."""

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        if not interval_passed(context.run.step, context.run.last_step, self.every_n_steps):
            return save_nothing(context.run.step)
        return save_full(context.run.step, context.model.catalog.everything)

    @property
    def needs(self) -> Needs:
        return Needs(period_steps=self.every_n_steps, next_due=self.next_due)

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``."""
        return next_multiple(context.run.last_step, self.every_n_steps)

    def describe(self) -> dict[str, Any]:
        return {"name": "dense", **asdict(self)}
