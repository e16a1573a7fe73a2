"""``GradientLog``: each step saves some operators in full (anchors), and the gradients of all others.

Between two anchors an operator's state follows from the anchor and the consumed gradients (``ledger.ledger``). So a
recovery needs only optimizer steps: it restores the newest step, and only the step under way is trained again.
MoEtion's Algorithm 3 (arXiv 2412.15411 v1) sends gradients for the same reason, for experts that were sent in full at
the step before.

W steps make a round, in which every operator is anchored once. With ``f`` bytes per parameter in full (12 in mixed
precision: master weight and two moments) and ``g`` bytes of gradient, a step has ``f/W + g (W - 1)/W`` bytes per
parameter. The more steps a round has, the closer that is to ``g``, and the longer is a replay. A sparse window
(MoEvement, section 3.2) has ``f/W + 2 (W - 1)/(2 W)``, since on average half of its operators are not saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from moe_ckpt.core.operators import Catalog, Remembered
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.user_text import named_arguments
from moe_ckpt.core.window import Lane, OperatorBytes, lanes_of, merge_coupled, side_by_side
from moe_ckpt.errors import ConfigError
from moe_ckpt.ledger.ledger import MOST_SLOTS
from moe_ckpt.policies.base import (
    AS_CONSUMED,
    BF16,
    TOKENS,
    NamedPolicy,
    Needs,
    PolicyContext,
    require_operators,
    require_positive,
    require_sizes,
)
from moe_ckpt.policies.selectors import in_shape

Slots = tuple[tuple[str, ...], ...]
"""Per step of a round, the anchored operators."""


def held_bytes_per_parameter(window: int, gradient: float, full: float = 12.0, slots: int = MOST_SLOTS) -> float:
    """Returns the bytes per parameter that the newest step of a log needs: anchors, and the gradients since.

    An operator's gradients are deleted when it is anchored again: on average those of half of W - 1 steps exist. If
    operators of several steps share a slot, their gradients stay until the last of them is anchored.

    Args:
        window: Steps of a round.
        gradient: Bytes of a gradient per parameter.
        full: Bytes per parameter in full.
        slots: Most slots for the gradients of one step.

    Raises:
        ValueError: ``window`` is below 1.
    """
    if window < 1:
        raise ValueError(f"a round of {window} steps")
    together = max(1.0, window / slots)
    return full + gradient * (window + together - 2) / 2


def most_held_bytes_per_parameter(window: int, gradient: float, full: float = 12.0, slots: int = MOST_SLOTS) -> float:
    """Returns the most bytes per parameter that the newest step of a log ever needs.

    It needs them at the end of the first round after a dense step, which is kept until every operator has a newer
    anchor.

    Args:
        window: As of ``held_bytes_per_parameter``, and so are the others.
        gradient: Bytes of a gradient per parameter.
        full: Bytes per parameter in full.
        slots: Most slots for the gradients of one step.

    Raises:
        ValueError: ``window`` is below 1.
    """
    return held_bytes_per_parameter(window, gradient, full, slots) + full * (window - 1) / window


def _beyond_gradient(size: OperatorBytes) -> int:
    """Returns the bytes that anchoring an operator costs beyond its gradient."""
    return max(0, size.full - size.consumed)


class Rounds:
    """The rounds of one model on one layout, of any number of steps. Results are cached.

    Within each pipeline stage operators come in the catalog's order, with one expert of each owner in turn. That order
    never changes, so that every operator is anchored again exactly one round later.

    Args:
        catalog: Of the model.
        sizes: Sizes of all operators in the whole model.
        placement: The ranks that hold operators.
        coupled: Groups of operators that are anchored at the same step.
    """

    def __init__(
        self,
        catalog: Catalog,
        sizes: Mapping[str, OperatorBytes],
        placement: Placement,
        coupled: Sequence[Collection[str]] = (),
    ) -> None:
        order, self._sizes, self._members = merge_coupled(catalog.everything, sizes, coupled)
        self._lanes = lanes_of(order, placement)
        self._catalog = catalog
        self._beyond_gradients = {op: OperatorBytes(_beyond_gradient(self._sizes[op]), 0) for op in order}

    @property
    def most(self) -> int:
        """Most steps of a round in which each step has an anchor."""
        return max((len(lane.order) for lane in self._lanes), default=1)

    @lru_cache(maxsize=64)  # noqa: B019 - rounds are few and stay; so are the next ones
    def _cuts(self, window: int) -> tuple[Slots, ...]:
        """Returns the slots of each lane. Each cut makes the heaviest step as light as it can be."""
        return tuple(lane.balance(self._beyond_gradients, window) for lane in self._lanes)

    @lru_cache(maxsize=64)  # noqa: B019
    def slots(self, window: int) -> Slots:
        """Returns the operators that are anchored at each of at most ``window`` steps."""
        units = side_by_side(self._cuts(window))
        return tuple(tuple(op for unit in slot for op in self._members[unit]) for slot in units)

    @lru_cache(maxsize=64)  # noqa: B019
    def places(self, window: int) -> tuple[Counts, ...]:
        """Returns ``slots`` as places in the catalog."""
        return tuple(self._catalog.places_of(slot) for slot in self.slots(window))

    @lru_cache(maxsize=64)  # noqa: B019
    def parted(self, window: int) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Returns for each step the anchored operators and all others, in catalog order: the same objects each time."""
        masks = map(self._catalog.mask, self.slots(window))
        return tuple((self._catalog.ids_of(anchored), self._catalog.ids_of(~anchored)) for anchored in masks)

    @lru_cache(maxsize=64)  # noqa: B019
    def rank_bytes(
        self, window: int, *, shared: bool = True, experts: bool = True, weights: bool = True
    ) -> tuple[int, ...]:
        """Returns the bytes of each step of a round on the rank that has most: anchors, and gradients of the others.

        Args:
            window: Steps of the round.
            shared: Count gates and non-experts.
            experts: Count experts.
            weights: Count the weights of anchors.
        """
        is_expert = self._catalog.expert_at.__contains__
        counted = {op for op, members in self._members.items() if (experts if is_expert(members[0]) else shared)}
        cuts = self._cuts(window)
        steps = max(map(len, cuts), default=0)
        sizes = self._sizes if weights else self._without_weights
        loads = [_on_a_rank(lane, cut, sizes, counted) for lane, cut in zip(self._lanes, cuts, strict=True)]
        padded = [[*load[1:], *load[:1] * (steps - len(load) + 1)] for load in loads]
        return tuple(map(max, zip(*padded, strict=True)))

    @cached_property
    def _without_weights(self) -> dict[str, OperatorBytes]:
        return {
            op: replace(size, full=size.full - size.weights, gradient=size.consumed) for op, size in self._sizes.items()
        }

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all operators on the rank that has most, below which no step can be."""
        return max(_on_a_rank(lane, (), self._sizes, self._members.keys())[0] for lane in self._lanes)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all operators in full on the rank that has most."""
        return max(self.rank_bytes(1))


def _on_a_rank(lane: Lane, slots: Slots, sizes: Mapping[str, OperatorBytes], counted: Collection[str]) -> list[int]:
    """Returns the bytes on the lane's busiest rank: of a step without anchors, and of each of ``slots``."""
    shared, owned = [0] * (len(slots) + 1), dict[int, list[int]]()
    for op in filter(counted.__contains__, lane.order):
        row = owned.setdefault(lane.owners[op], [0] * len(shared)) if op in lane.owners else shared
        row[0] += sizes[op].consumed
    for at, slot in enumerate(slots, 1):
        for op in filter(counted.__contains__, slot):
            row = owned[lane.owners[op]] if op in lane.owners else shared
            row[at] += _beyond_gradient(sizes[op])
    for row in (shared, *owned.values()):
        row[1:] = [row[0] + more for more in row[1:]]
    most = map(max, zip(*owned.values(), strict=True)) if owned else [0] * len(shared)
    return [-(-n // lane.ranks) + -(-m // lane.expert_ranks) for n, m in zip(shared, most, strict=True)]


@dataclass(frozen=True)
class LogReport:
    """Explains the choice of a round (``GradientLog.explain``). It decides nothing.

    All bytes are those of the rank that has most.

    Attributes:
        window: W, the number of steps of a round.
        dense_bytes: Bytes of all operators in full.
        gradient_bytes: Bytes of all gradients, below which no step of a round can be.
        heaviest_bytes: Bytes of the round's heaviest step.
        mean_bytes: Mean bytes of its steps.
        limit_bytes: Most bytes that a step may have; None while not known.
        most_window: Most steps of a round that were allowed.
        iteration_secs: Time of an iteration; None while not known.
        unlimited: W with unlimited host memory; 0 while not known.
    """

    window: int
    dense_bytes: int
    gradient_bytes: int
    heaviest_bytes: int
    mean_bytes: float
    limit_bytes: int | None = None
    most_window: int = 0
    iteration_secs: float | None = None
    unlimited: int = 0

    @property
    def fits(self) -> bool | None:
        """True if each step keeps within the limit; None if that is not known."""
        return None if self.limit_bytes is None else self.heaviest_bytes <= self.limit_bytes

    @property
    def stall_secs(self) -> float | None:
        """Seconds for which the heaviest step exceeds its time; None if that is not known."""
        if not self.limit_bytes or not self.iteration_secs:
            return None
        return max(0.0, self.heaviest_bytes / self.limit_bytes - 1) * self.iteration_secs

    @property
    def most_held_bytes(self) -> float:
        """Most bytes of the log in memory, at the end of the first round after a dense step."""
        return most_held_bytes_per_parameter(self.window, self.gradient_bytes, self.dense_bytes) + self.mean_bytes

    @property
    def warning(self) -> str | None:
        """A sentence if steps exceed their time, or if host memory has no room for the best round; otherwise None."""
        warnings = [warning for warning in (self._memory_warning, self._time_warning) if warning is not None]
        return "; ".join(warnings) if warnings else None

    @property
    def _memory_warning(self) -> str | None:
        if self.unlimited <= self.window:
            return None
        return (
            f"host memory has no room for rounds of W = {self.unlimited}, so W = {self.window}; host_memory_bytes sets "
            "how much it has"
        )

    @property
    def _time_warning(self) -> str | None:
        if self.fits is not False:
            return None
        stall = "" if self.stall_secs is None else f"; training stalls by up to {self.stall_secs:.3g} s per step"
        numbers = f"{self.heaviest_bytes:,} bytes per rank, {self.limit_bytes or 0:,} would fit"
        what = f"a log of gradients with rounds of W = {self.window} does not fit into an iteration ({numbers})"
        if self.gradient_bytes < (self.limit_bytes or 0):
            why = f"a longer round would, and {self.most_window} steps are the most"
        else:
            why = (
                f"the gradients alone have {self.gradient_bytes:,}, in a round of any length: use MoEvement, which "
                "saves no gradients, or a policy that does not save at each step"
            )
        return f"{what}: {why}{stall}"


AUTO = "auto"


@named_arguments
@dataclass(frozen=True)
class GradientLog(NamedPolicy):
    """Saves at every step: anchors of some operators (each operator once in W steps), gradients of the others.

    With ``f`` bytes per parameter in full and ``g`` of gradient a step saves ``f/W + g (W - 1)/W`` bytes per parameter.
    W is the smallest number of steps with which a rank can copy that during forward and backward at the measured rate
    and, where peers hold copies, send it within an iteration. While rates are not known, W is ``most_window``, with
    which each step saves least.

    A round is divided by bytes only, in an order that never changes. In a rolling schedule each operator is at each
    distance from its anchor equally often, so the order does not change the cost of a recovery; a new order would leave
    some operators without a new anchor for up to two rounds. (MoEvement anchors popular experts last, since operators
    that are not anchored yet do less work in a replay. Here a replay consists of optimizer steps, which cost the same
    for every expert.) Popularity decides only in the round after everything was saved: steps whose operators got most
    tokens come first, since an expert without tokens has no gradient, and an operator that was not updated since its
    anchor needs no replay.

    Everything is saved in full at the first step, when a checkpoint on storage is due (storage gets dense checkpoints,
    no logs), and when storage lacks an operator. An operator without a complete chain of gradients is anchored at once.

    Needs memory that outlives the process (``moe_ckpt.Memory``), whose ``storage_every`` sets how
    often a checkpoint is written to storage: by default each step is a dense checkpoint.

    Attributes:
        window: W, or ``"auto"`` to compute it as above. Shorter if memory has no room for such a round.
        grad_dtype: ``"as_consumed"`` logs gradients as wide as optimizers consume them. ``"bf16"`` rounds them to bf16
            before each update, on every rank, and logs those: 2 bytes per parameter instead of 4. Training and replay
            are equal in every bit, but training differs from training without it. Gradients of 16 bits are not changed.

    Raises:
        ConfigError: A value out of range.
    """

    name: ClassVar[str] = "gradient_log"
    window: int | str = AUTO
    grad_dtype: str = AS_CONSUMED
    most_window: ClassVar[int] = 16
    """Upper bound on W, even if a step then does not fit, since memory holds a round and a replay is as long as one."""

    def __post_init__(self) -> None:
        if self.grad_dtype not in (AS_CONSUMED, BF16):
            raise ConfigError(
                f"GradientLog(grad_dtype={self.grad_dtype!r}): choose {AS_CONSUMED!r}, or {BF16!r} to round gradients "
                "before each update, which changes training"
            )
        require_positive("GradientLog", AUTO, window=self.window)

    @property
    def needs(self) -> Needs:
        return Needs(
            sizes=True,
            popularity=TOKENS,
            gradients=self.grad_dtype,
            tiers=True,
            alone=True,
            next_due=self.next_due,
            warning=self.warning,
        )

    def check(self, catalog: Catalog) -> None:
        """Accepts any model that has at least as many operators as a round has steps."""
        require_operators("GradientLog", catalog, self.window if isinstance(self.window, int) else None)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        """Returns a dense plan, or anchors and gradients of all other operators.

        Raises:
            ConfigError: There is no memory that outlives the process, or ``context`` lacks sizes or anchors.
        """
        catalog, run = context.model.catalog, context.run
        if not context.memory.outlives_process:
            raise ConfigError(
                "GradientLog keeps its log in memory that outlives the process, and there is none: give "
                "memory=moe_ckpt.Memory(storage_every=...), or Hydra's moe_ckpt/memory=local or replicated"
            )
        if run.last_step is None or run.nothing_safe or run.missing or context.memory.storage_due:
            return self._everything(context)
        anchored_at = self._anchored_at(context)
        rounds = self._rounds(context)
        window = self._window(context, rounds)
        number = self._next(context, rounds, window, anchored_at)
        if (anchored_at >= 0).all():
            now, others = rounds.parted(window)[number]
            return SnapshotPlan(run.step, now, gradients=others) if others else self._everything(context)
        anchored = anchored_at < 0
        anchored[rounds.places(window)[number]] = True
        for group in context.model.coupled:
            places = catalog.places_of(tuple(sorted(group)))
            anchored[places] = anchored[places].any()
        if anchored.all():
            return self._everything(context)
        return SnapshotPlan(run.step, catalog.ids_of(anchored), gradients=catalog.ids_of(~anchored))

    def explain(self, context: PolicyContext) -> LogReport:
        """Returns the round that ``context.run.step`` belongs to, with its costs.

        Raises:
            ConfigError: ``context`` lacks sizes.
        """
        rounds = self._rounds(context)
        window = self._window(context, rounds)
        steps = rounds.rank_bytes(window)
        return LogReport(
            window=len(steps),
            dense_bytes=rounds.dense_bytes,
            gradient_bytes=rounds.gradient_bytes,
            heaviest_bytes=max(steps),
            mean_bytes=sum(steps) / len(steps),
            limit_bytes=self._limit_bytes(context, rounds, window),
            most_window=self.most_window,
            unlimited=self._window_by_time(context, rounds),
            iteration_secs=context.measured.recent_iteration_secs,
        )

    def warning(self, context: PolicyContext) -> str | None:
        """See ``Needs.warning``; None until rates are measured, since W is arbitrary before."""
        return None if context.measured.copy_bytes() is None else self.explain(context).warning

    # --- how long a round is ---

    def _window(self, context: PolicyContext, rounds: Rounds) -> int:
        """Returns the fewest steps that fit, or those of the round under way if that is little longer.

        Returns fewer if host memory has no room for a round.
        """
        fewest, memory = self._window_by_time(context, rounds), context.memory
        if memory.snapshot_bytes is None or not memory.outlives_process:
            return fewest
        budget = memory.snapshot_bytes * memory.at_once

        def held(window: int) -> float:
            log = most_held_bytes_per_parameter(window, rounds.gradient_bytes, rounds.dense_bytes)
            return log + memory.at_once * max(rounds.rank_bytes(window))

        return next((window for window in range(fewest, 1, -1) if held(window) <= budget), 1)

    def _window_by_time(self, context: PolicyContext, rounds: Rounds) -> int:
        """Returns ``_window`` for unlimited host memory."""
        if isinstance(self.window, int):
            return self.window
        most = min(self.most_window, rounds.most)
        limits = {window: self._limit_bytes(context, rounds, window) or 0 for window in range(1, most + 1)}
        fitting = [window for window, limit in limits.items() if max(rounds.rank_bytes(window)) <= limit]
        if not fitting:
            return most
        fewest = fitting[0]
        little_longer = [window for window in fitting if window <= fewest + fewest // 4 + 1]
        if len(context.memory.anchored_at) != len(context.model.catalog.operators):
            return fewest
        # A round under way goes on: what was anchored together lately is anchored together in it, too.
        slots = {
            window: [context.memory.anchored_at[slot] for slot in rounds.places(window)] for window in little_longer
        }
        return next((w for w, steps in slots.items() if all(at.min() == at.max() for at in steps)), fewest)

    def _limit_bytes(self, context: PolicyContext, rounds: Rounds, window: int) -> int | None:
        """Returns the most bytes of a step: what can be copied, or sent to peers if that is less; None if not known."""
        measured, memory = context.measured, context.memory
        copied = measured.copy_bytes(memory.budget_fraction)
        sendable = measured.send_bytes(1, memory.budget_fraction) if memory.sends_copies else None
        if copied is None or sendable is None:
            return copied
        sends = memory.sends
        weights = sends.shared_weights and sends.expert_weights
        sent = max(rounds.rank_bytes(window, shared=sends.shared, experts=sends.experts, weights=weights))
        return min(copied, sendable * max(rounds.rank_bytes(window)) // sent) if sent else copied

    # --- which operators are anchored ---

    def _everything(self, context: PolicyContext) -> SnapshotPlan:
        """Returns a dense plan, with the groups that will be anchored together in the next round, if they are known."""
        everything = context.model.catalog.everything
        if not context.model.sizes:
            return SnapshotPlan(context.run.step, everything)
        rounds = self._rounds(context)
        return SnapshotPlan(context.run.step, everything, together=rounds.slots(self._window(context, rounds)))

    def _next(self, context: PolicyContext, rounds: Rounds, window: int, anchored_at: Counts) -> int:
        """Returns the number of the slot with the oldest anchor; of several such slots, of the one with most tokens."""
        slots = rounds.places(window)
        oldest = [int(anchored_at[slot].min()) for slot in slots]
        waiting = [at for at, step in enumerate(oldest) if step == min(oldest)]
        if len(waiting) > 1:
            waiting.sort(key=_tokens(context, slots).__getitem__, reverse=True)  # stable: then the first of the round
        return waiting[0]

    def _anchored_at(self, context: PolicyContext) -> Counts:
        if len(context.memory.anchored_at) != len(context.model.catalog.operators):
            raise ConfigError(
                "GradientLog: MemoryFacts.anchored_at must have every operator of the catalog, "
                f"{len(context.model.catalog.operators)}, and has {len(context.memory.anchored_at)}"
            )
        return context.memory.anchored_at

    def _rounds(self, context: PolicyContext) -> Rounds:
        model = context.model
        require_sizes("GradientLog", model.catalog, model.sizes)
        return _rounds(model.catalog, model.sizes, model.placement, model.coupled)

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``: every step, once."""
        return max(context.run.step, (context.run.last_step or 0) + 1)


def _tokens(context: PolicyContext, slots: tuple[Counts, ...]) -> list[int]:
    """Returns the tokens that the experts of each slot got recently."""
    catalog, tokens = context.model.catalog, context.tokens.popularity
    of_operator = np.zeros(len(catalog.operators), dtype=np.int64)
    experts = catalog.all_experts
    of_operator[catalog.is_expert] = in_shape(context, tokens, 0)[tuple(experts.T)]
    return [int(of_operator[slot].sum()) for slot in slots]


_rounds = Remembered(Rounds, most=4)
"""Cached, since cutting is slow. ``sizes`` is a new object only when the model's tensors change."""
