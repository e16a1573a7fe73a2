"""A gradient log with the plainest schedule: in each step one of W groups of operators is anchored."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.policies.base import Needs, PolicyContext


@dataclass(frozen=True)
class RoundRobin:
    """everything is saved where storage is due; whole: all operators of the model are anchored together."""

    round: int = 3

    needs: ClassVar[Needs] = Needs(gradients="as_consumed", alone=True)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        everything = context.model.catalog.everything
        if context.memory.storage_due:
            return SnapshotPlan(context.run.step, everything)
        anchored = everything[context.run.step % self.round :: self.round]
        chosen = frozenset(anchored)
        return SnapshotPlan(context.run.step, anchored, gradients=tuple(op for op in everything if op not in chosen))

    def check(self, catalog: Catalog) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"name": "RoundRobin", **asdict(self)}
