"""Policies that save everything: ``Dense``, ``CheckFreq`` and ``Gemini``.

``Dense`` saves every N steps, ``CheckFreq`` as often as a given overhead allows, and ``Gemini`` to the memory of peers,
at the interval that loses least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isfinite
from typing import ClassVar

from moe_ckpt.core.cadence import daly_secs, expected_mtbf_secs, young_secs
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.user_text import named_arguments
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import (
    Measured,
    NamedPolicy,
    Needs,
    PolicyContext,
    next_multiple,
    require_positive,
)


class _SavesEverything(NamedPolicy):
    """Base class of policies that save every operator from the step ``next_due`` on."""

    def check(self, catalog: Catalog) -> None:
        """Accepts any model, also one without MoE layers."""

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        step = context.run.step
        everything = context.model.catalog.everything if step >= self.next_due(context) else ()
        return SnapshotPlan(step, everything)

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``."""
        raise NotImplementedError


@named_arguments
@dataclass(frozen=True)
class Dense(_SavesEverything):
    """Saves every operator at full fidelity every ``every_n_steps`` optimizer steps.

    Attributes:
        every_n_steps: Steps from one checkpoint to the next.

    Raises:
        ConfigError: ``every_n_steps`` is below 1.
    """

    name: ClassVar[str] = "dense"
    every_n_steps: int = 1

    def __post_init__(self) -> None:
        require_positive("Dense", every_n_steps=self.every_n_steps)

    @property
    def needs(self) -> Needs:
        return Needs(period_steps=self.every_n_steps, next_due=self.next_due)

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``."""
        return next_multiple(context.run.last_step, self.every_n_steps)


class _AsMeasured(_SavesEverything):
    """Base class of policies whose interval follows from measurements."""

    profile_steps: ClassVar[int] = 10
    """Steps before the first checkpoint."""
    max_interval: ClassVar[int] = 1000
    """Upper bound on the steps between two checkpoints, so that one wrong measurement cannot stop saving."""

    def _steps(self, measured: Measured, least_secs: Callable[[float], float]) -> int | None:
        """Returns the steps between checkpoints; None while there is nothing to compute it from.

        Args:
            measured: Times so far. The interval is at least as long as a checkpoint takes to complete, so that at most
                one is under way.
            least_secs: Returns the least time between two checkpoints, for the seconds that one costs.
        """
        iteration, cost, persist = measured.iteration_secs, measured.checkpoint_cost_secs, measured.persist_secs
        if not iteration or cost is None or persist is None:
            return None
        return min(self.max_interval, max(1, ceil(max(least_secs(cost), persist) / iteration)))

    def _due(self, context: PolicyContext, interval: int | None) -> int:
        """Returns the first step that is due."""
        if interval is None:
            # Not due yet if one checkpoint is under way and not measured; a restart measures anew.
            interval = self.max_interval if context.measured.iteration_secs is None else self.profile_steps
        return (context.run.last_step or 0) + interval


@named_arguments
@dataclass(frozen=True)
class CheckFreq(_AsMeasured):
    """Saves everything at the smallest interval that keeps the overhead within ``max_overhead``.

    The first ``profile_steps`` steps run without checkpoints, to measure the iteration time; one checkpoint then
    measures the cost; from there on the interval follows the newest measurements (CheckFreq, FAST '21).

    Attributes:
        max_overhead: Share of training time, above 0 and below 1; 0.03 in the paper.

    Raises:
        ConfigError: A value out of range.
    """

    name: ClassVar[str] = "checkfreq"
    max_overhead: float = 0.03

    def __post_init__(self) -> None:
        if not isinstance(self.max_overhead, (int, float)) or not 0 < self.max_overhead < 1:
            raise ConfigError(
                f"CheckFreq(max_overhead={self.max_overhead!r}): max_overhead must be a number above 0 and "
                "below 1, the share of training time that checkpoints may take"
            )

    def interval(self, measured: Measured) -> int | None:
        """Returns the steps between checkpoints; None while there is nothing to compute them from.

        Smallest n with ``cost <= max_overhead * n * iteration`` and ``persist <= n * iteration`` (CheckFreq, section
        4.1).
        """
        return self._steps(measured, lambda cost: cost / self.max_overhead)

    @property
    def needs(self) -> Needs:
        return Needs(alone=True, next_due=self.next_due)

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``."""
        return self._due(context, self.interval(context.measured))


FORMULAS = {"young": young_secs, "daly": daly_secs}


@named_arguments
@dataclass(frozen=True)
class Gemini(_AsMeasured):
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

    name: ClassVar[str] = "gemini"
    every_n_steps: int | str = "daly"
    mtbf_secs: float | None = None

    def __post_init__(self) -> None:
        require_positive("Gemini", *FORMULAS, every_n_steps=self.every_n_steps)
        mtbf = self.mtbf_secs
        if mtbf is not None and not (isinstance(mtbf, (int, float)) and isfinite(mtbf) and mtbf > 0):
            raise ConfigError(f"Gemini(mtbf_secs={mtbf!r}): mtbf_secs must be a number of seconds above 0, or None")

    def interval(self, context: PolicyContext) -> int | None:
        """Returns the steps between checkpoints; None while there is nothing to compute them from."""
        if isinstance(self.every_n_steps, int):
            return self.every_n_steps
        run_secs = context.run.step * (context.measured.iteration_secs or 0.0)
        mtbf = self.mtbf_secs or expected_mtbf_secs(len(context.run.faults), run_secs)
        formula = FORMULAS[self.every_n_steps]
        return self._steps(context.measured, lambda cost: formula(cost, mtbf))

    @property
    def needs(self) -> Needs:
        if isinstance(self.every_n_steps, int):
            return Needs(period_steps=self.every_n_steps, next_due=self.next_due, replicas=1)
        return Needs(alone=True, next_due=self.next_due, lost_tokens=self.mtbf_secs is None, replicas=1)

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``."""
        if isinstance(self.every_n_steps, int):
            return next_multiple(context.run.last_step, self.every_n_steps)
        return self._due(context, self.interval(context))
