"""``CheckFreq`` (Mohan et al., FAST'21): dense checkpoints as often as a given overhead allows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, ClassVar

from moe_ckpt.core.arguments import named_arguments
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import SnapshotPlan, save_full, save_nothing
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import Measured, Needs, PolicyContext, due_as_measured


@named_arguments
@dataclass(frozen=True)
class CheckFreq:
    """Saves everything at the smallest interval that keeps the overhead within ``max_overhead``.

    The first ``profile_steps`` steps run without checkpoints, to measure the iteration time; one checkpoint then
    measures the cost; from there on the interval follows the newest measurements (CheckFreq, FAST '21).

    Attributes:
        max_overhead: Share of training time, above 0 and below 1; 0.03 in the paper.

    Raises:
        ConfigError: A value out of range.
    """

    max_overhead: float = 0.03
    profile_steps: ClassVar[int] = 10
    """Steps before the first checkpoint."""
    max_interval: ClassVar[int] = 1000
    """Upper bound on the interval in steps, so that one wrong measurement cannot stop saving."""

    def __post_init__(self) -> None:
        if not isinstance(self.max_overhead, (int, float)) or not 0 < self.max_overhead < 1:
            raise ConfigError(
                f"CheckFreq(max_overhead={self.max_overhead!r}): max_overhead must be a number above 0 and "
                "below 1, the share of training time that checkpoints may take"
            )

    def check(self, catalog: Catalog) -> None:
        """Accepts any model, also one without MoE layers."""

    def interval(self, measured: Measured) -> int | None:
        """Steps between checkpoints, or None while there is nothing to compute it from.

        Smallest n with ``cost <= max_overhead * n * iteration`` and ``persist <= n * iteration``: the
        second keeps at most one checkpoint under way (CheckFreq, section 4.1).
        """
        iteration, cost, persist = measured.iteration_secs, measured.checkpoint_cost_secs, measured.persist_secs
        if not iteration or cost is None or persist is None:
            return None
        needed = max(cost / (self.max_overhead * iteration), persist / iteration)
        return min(self.max_interval, max(1, ceil(needed)))

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        if context.run.step >= self.next_due(context):
            return save_full(context.run.step, tuple(op.id for op in context.model.catalog.operators))
        return save_nothing(context.run.step)

    @property
    def needs(self) -> Needs:
        return Needs(alone=True, next_due=self.next_due)

    def next_due(self, context: PolicyContext) -> int:
        """The first step that is due by what ``context`` has measured. See ``Needs.next_due``."""
        return due_as_measured(context, self.interval(context.measured), self.profile_steps, self.max_interval)

    def describe(self) -> dict[str, Any]:
        return {"name": "checkfreq", **asdict(self)}
