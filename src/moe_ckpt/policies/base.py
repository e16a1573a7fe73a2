"""The one-method Protocol of a policy, and the frozen facts it decides from.

A policy is a frozen value: same context, same plan, on every rank and in the simulator. It keeps no
state; what it must remember across steps and restarts (checkpoints begun, versions held, tokens lost)
comes in through the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement, everywhere
from moe_ckpt.core.plan import SnapshotPlan, Tier
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.core.window import OperatorBytes, Window
from moe_ckpt.errors import ConfigError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """What this run's clock has shown so far, the maximum over ranks. None until known.

    iteration_secs: median of iterations with no checkpoint work beside them.
    recent_iteration_secs: median of the last iterations, whatever ran beside them, less what training waited.
    checkpoint_cost_secs: time one checkpoint adds to training: stalls plus the slowdown of the
    iterations that ran beside it.
    persist_secs: from the start of a snapshot to its commit.
    copy_bytes_per_sec, persist_bytes_per_sec: of the slowest rank: from live tensors to host memory, and from there to
    a commit. Not the maximum but the minimum over ranks.
    """

    iteration_secs: float | None = None
    checkpoint_cost_secs: float | None = None
    persist_secs: float | None = None
    copy_bytes_per_sec: float | None = None
    persist_bytes_per_sec: float | None = None
    recent_iteration_secs: float | None = None

    @property
    def saving_bytes_per_sec(self) -> float | None:
        """The slower of both rates, since what is copied must be committed too; None until both are known."""
        copied, persisted = self.copy_bytes_per_sec, self.persist_bytes_per_sec
        return None if not copied or not persisted else min(copied, persisted)


def _nothing() -> Counts:
    return np.zeros((0, 0), dtype=np.int64)


@dataclass(frozen=True)
class Activity:
    """How much work each expert got, ``[L, E]`` each, summed over ranks; columns beyond a layer's E are 0.

    hard: tokens routed since the newest window began, or since the run's start.
    soft: gate weights, summed likewise, in a unit of their own; all 0 where the router does not tell them.
    decayed: tokens per step, ``A <- 0.9 A + 0.1 count`` at each step.
    """

    hard: Counts = field(default_factory=_nothing)
    soft: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    decayed: Floats = field(default_factory=lambda: np.zeros((0, 0)))


@dataclass(frozen=True)
class PolicyContext:
    """Everything a policy may know at one step. All counts are already reduced over ranks.

    step: optimizer steps done (the state to be saved is the one after this step).
    last_step: step of the newest checkpoint that was begun, or None.
    nothing_safe: checkpoints were begun, but none is committed or under way: they failed, or are in another store.
    index: checkpoints begun so far in this run, across restarts.
    chosen_at: ``[L, E]`` step of the newest checkpoint, committed or under way, that holds the expert; -1 if none.
    ranks: of the run.
    placement: who holds what; None where every rank holds everything.
    missing: operators that no committed or running checkpoint of the storage tier holds.
    unsaved: per tier, ``U[l][e]`` as of what is committed. A fault that leaves this tier loses these tokens.
    expected_unsaved: ``U[l][e]`` of the storage tier once the checkpoints under way are committed.
    popularity: ``A[l][e]``, tokens assigned in this step.
    faults, lost_tokens, routed_tokens: history of the run.
    window, next_slot: the newest sparse window, as long as no snapshot of it failed or was left out, and how many of
        its slots have begun; None and 0 if there is none.
    sizes: bytes of every operator, as its tensors are now.
    inseparable: groups of operators that must be anchored in the same slot of a window, because the optimizer lets rows
        of a parameter that they share act on one another.
    activity: what popularity orders go by.
    dense_step: step of the newest dense checkpoint, begun or committed; None where nobody keeps track of it.
    snapshot_bytes: most bytes of one rank's snapshot that its host memory leaves room for; None if not known.
    """

    step: int
    catalog: Catalog
    last_step: int | None = None
    index: int = 0
    ranks: int = 1
    placement: Placement | None = None
    missing: tuple[str, ...] = ()
    chosen_at: Counts = field(default_factory=_nothing)
    unsaved: Mapping[Tier, Counts] = field(default_factory=dict)
    expected_unsaved: Counts = field(default_factory=_nothing)
    popularity: Counts = field(default_factory=_nothing)
    measured: Measured = Measured()
    faults: tuple[FaultRecord, ...] = ()
    lost_tokens: int = 0
    routed_tokens: int = 0
    window: Window | None = None
    next_slot: int = 0
    sizes: Mapping[str, OperatorBytes] = field(default_factory=dict)
    inseparable: tuple[frozenset[str], ...] = ()
    activity: Activity = field(default_factory=Activity)
    snapshot_bytes: int | None = None
    nothing_safe: bool = False
    dense_step: int | None = None

    @property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """Per MoE layer, the owner rank of each expert."""
        return (self.placement or everywhere(self.catalog.layers, self.ranks)).owners


@runtime_checkable
class Policy(Protocol):
    """Decides, after every optimizer step, what to snapshot.

    Called on every rank, on the training thread, before the next forward pass; must be fast and pure.
    """

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        """What to save of the state after ``context.step``; an empty plan saves nothing."""
        ...

    def check(self, catalog: Catalog) -> None:
        """Called once, before training: raise ``ConfigError`` if this policy cannot serve this model."""
        ...

    def describe(self) -> dict[str, Any]:
        """Name and parameters as plain data, written into every manifest."""
        ...


class SparsePolicy(Policy, Protocol):
    """A policy that spreads checkpoints over sparse windows (MoEvement).

    It must be told the sizes of operators and asked about step 0 too, and recovery is exact only where every step can
    be computed again.
    """

    sparse: bool

    def explain(self, context: PolicyContext) -> Any:
        """The window of ``context.step`` with its costs: a ``window_report.WindowReport``."""
        ...


def uses_windows(policy: Policy) -> TypeGuard[SparsePolicy]:
    """Whether the policy is a ``SparsePolicy``."""
    return bool(getattr(policy, "sparse", False))


def uses_gate_weights(policy: Policy) -> bool:
    """True for a policy that goes by soft counts (``Activity.soft``), which cost a little to take."""
    return bool(getattr(policy, "soft", False))


def uses_sizes(policy: Policy) -> bool:
    """True for a policy that is to be told ``PolicyContext.sizes`` though it has no windows (MoEtion)."""
    return bool(getattr(policy, "sized", False))


def interval_passed(step: int, last_step: int | None, every_n_steps: int) -> bool:
    """True when a multiple of ``every_n_steps`` lies in ``(last_step, step]``.

    So a checkpoint that had to be skipped is made up for at the next step, and the rhythm stays on
    the multiples.
    """
    return step // every_n_steps > (last_step or 0) // every_n_steps


def next_multiple(last_step: int | None, every_n_steps: int) -> int:
    """The first step at which ``interval_passed`` is true."""
    return ((last_step or 0) // every_n_steps + 1) * every_n_steps


def next_due(policy: Policy, context: PolicyContext) -> int:
    """The first step from ``context.step`` on at which the policy may want a checkpoint, if nothing else changes.

    Asked by the simulator, which need not call ``plan`` before. A policy that does not say is asked at every step.
    """
    due = getattr(policy, "next_due", None)
    return context.step if due is None else max(context.step, int(due(context)))


def require_positive(policy: str, **values: int) -> None:
    """Raise ``ConfigError`` naming the policy and the setting unless every value is an int >= 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{policy}({name}={value!r}): {name} must be a whole number of at least 1")
