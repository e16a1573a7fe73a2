"""Policies that save everything: ``Dense`` every N steps, ``CheckFreq`` as often as a given overhead allows, ``Gemini``
in the memory of peers, at the interval that loses least."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, isfinite
from typing import Any, ClassVar

from moe_ckpt.core.arguments import named_arguments
from moe_ckpt.core.cadence import daly_secs, expected_mtbf_secs, young_secs
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import SnapshotPlan, save_full, save_nothing
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import (
    Measured,
    Needs,
    PolicyContext,
    due_as_measured,
    interval_passed,
    next_multiple,
    require_positive,
)


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


FORMULAS = {"young": young_secs, "daly": daly_secs}


@named_arguments
@dataclass(frozen=True)
class Gemini:
    """Saves everything to the memory of peers, at a fixed interval or at the one that loses least time.

    It needs memory with at least one replica, from which a lost node is restored (``Needs.replicas``). ``Memory`` also
    sets which checkpoints are written to storage. The paper sends copies in gaps of the training traffic; here they are
    sent at any time during training.

    Attributes:
        every_n_steps: Steps from one checkpoint to the next; or "young" or "daly", the formula that computes them from
            the measured cost of a checkpoint and the mean time between failures. The interval is at least the time that
            a checkpoint takes until it is complete.
        mtbf_secs: Mean time between failures, if known. None: estimated from the failures of this run
            (``core.cadence.expected_mtbf_secs``; only the time of steps that were kept counts).

    Raises:
        ConfigError: A value out of range.
    """

    every_n_steps: int | str = "daly"
    mtbf_secs: float | None = None
    profile_steps: ClassVar[int] = 10
    """With a formula, steps before the first checkpoint, as in ``CheckFreq``."""
    max_interval: ClassVar[int] = 1000
    """With a formula, upper bound on the steps between two checkpoints."""

    def __post_init__(self) -> None:
        every, mtbf = self.every_n_steps, self.mtbf_secs
        if every not in FORMULAS and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError(
                f"Gemini(every_n_steps={every!r}): every_n_steps must be a whole number of at least 1, or one of "
                f"{', '.join(map(repr, FORMULAS))} to compute it from measurements"
            )
        if mtbf is not None and not (isinstance(mtbf, (int, float)) and isfinite(mtbf) and mtbf > 0):
            raise ConfigError(f"Gemini(mtbf_secs={mtbf!r}): mtbf_secs must be a number of seconds above 0, or None")

    def check(self, catalog: Catalog) -> None:
        """Accepts any model, also one without MoE layers."""

    def interval(self, context: PolicyContext) -> int | None:
        """Steps between checkpoints, or None while there is nothing to compute it from."""
        if isinstance(self.every_n_steps, int):
            return self.every_n_steps
        measured = context.measured
        iteration, cost, persist = measured.iteration_secs, measured.checkpoint_cost_secs, measured.persist_secs
        if not iteration or cost is None or persist is None:
            return None
        mtbf = self.mtbf_secs or expected_mtbf_secs(len(context.run.faults), context.run.step * iteration)
        best = FORMULAS[self.every_n_steps](cost, mtbf)
        return min(self.max_interval, max(1, ceil(max(best, persist) / iteration)))

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        if isinstance(self.every_n_steps, int):
            due = interval_passed(context.run.step, context.run.last_step, self.every_n_steps)
        else:
            due = context.run.step >= self.next_due(context)
        return save_full(context.run.step, context.model.catalog.everything) if due else save_nothing(context.run.step)

    @property
    def needs(self) -> Needs:
        if isinstance(self.every_n_steps, int):
            return Needs(period_steps=self.every_n_steps, next_due=self.next_due, replicas=1)
        return Needs(alone=True, next_due=self.next_due, lost_tokens=self.mtbf_secs is None, replicas=1)

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``."""
        if isinstance(self.every_n_steps, int):
            return next_multiple(context.run.last_step, self.every_n_steps)
        return due_as_measured(context, self.interval(context), self.profile_steps, self.max_interval)

    def describe(self) -> dict[str, Any]:
        return {"name": "gemini", **asdict(self)}
