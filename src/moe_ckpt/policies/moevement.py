"""``MoEvement`` (NSDI'26; arXiv 2412.15411 v5): a dense checkpoint spread over W iterations, with exact recovery.

At each iteration of a window some operators are saved in full, and those of later slots as compute weights, so
that every iteration saves about as much as it has time for. Replaying the window gives the dense state, bit for bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import ClassVar

from moe_ckpt.core.cadence import bytes_in_time
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.user_text import named_arguments
from moe_ckpt.core.window import (
    Lane,
    OperatorBytes,
    Window,
    lanes_of,
    merge_coupled,
    share_bytes,
    side_by_side,
    slot_plan,
)
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import NamedPolicy, Needs, PolicyContext, require_operators, require_positive, require_sizes
from moe_ckpt.policies.popularity import ORDERS, Ordering
from moe_ckpt.policies.selectors import storage_steps

_NOTICED = 0.01
"""Least stall that is reported, as a portion of an iteration."""


@dataclass(frozen=True)
class WindowReport:
    """One window of one model, with the measurements by which it was chosen (``MoEvement.explain``).

    Attributes:
        window: The window.
        sizes: Sizes of all operators of the window.
        placement: Ranks over which the state is divided, in each pipeline stage separately.
        iteration_secs: Time of an iteration; None if not known.
        bytes_per_sec: Rate of one rank, the slower of copying and committing; None if not known.
        budget_fraction: Portion of an iteration that a snapshot may take.
        snapshot_bytes: Most bytes of one rank's snapshot that host memory leaves room for; None if not known.
        at_once: Number of snapshots that have so much room at once.
        unlimited_size: W with unlimited host memory; None if not known.
    """

    window: Window
    sizes: Mapping[str, OperatorBytes] = field(repr=False)
    placement: Placement = field(repr=False)
    iteration_secs: float | None = None
    bytes_per_sec: float | None = None
    budget_fraction: float = 1.0
    snapshot_bytes: int | None = None
    at_once: int = 1
    unlimited_size: int | None = None

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes of each slot on the rank that has most."""
        return share_bytes(self.window.slots, self.sizes, lanes_of(self.window.order, self.placement))

    @property
    def stalls_secs(self) -> tuple[float, ...]:
        """Time by which copying or committing each slot exceeds an iteration; empty if that is not known."""
        rate, iteration = self.bytes_per_sec, self.iteration_secs
        if not rate or not iteration:
            return ()
        return tuple(max(0.0, nbytes / rate - iteration) for nbytes in self.rank_bytes)

    @property
    def size(self) -> int:
        """W."""
        return self.window.size

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes that one rank can save in its portion of an iteration; None if not known."""
        return bytes_in_time(self.iteration_secs, self.bytes_per_sec, self.budget_fraction)

    @property
    def fits(self) -> bool | None:
        """True if every slot keeps within ``limit_bytes``; None if not known."""
        return None if self.limit_bytes is None else max(self.rank_bytes) <= self.limit_bytes

    @property
    def stall_secs(self) -> float | None:
        """Longest stall of one iteration in seconds; None if not known."""
        return max(self.stalls_secs, default=None)

    @property
    def mean_stall_secs(self) -> float | None:
        """Mean stall of an iteration in seconds; None if not known."""
        stalls = self.stalls_secs
        return sum(stalls) / len(stalls) if stalls else None

    @property
    def warning(self) -> str | None:
        """A sentence if snapshots take longer than they may, or host memory has no room for the best window, or None.

        If the user did not limit the portion of an iteration, an unnoticeable excess is not reported.
        """
        warnings = [warning for warning in (self.memory_warning, self.time_warning) if warning is not None]
        return "; ".join(warnings) if warnings else None

    @property
    def memory_warning(self) -> str | None:
        """The part of ``warning`` that is about host memory."""
        if self.unlimited_size in (None, self.size) or self.snapshot_bytes is None:
            return None
        budget = self.snapshot_bytes * self.at_once
        return (
            f"host memory, {budget:,} bytes per rank (host_memory_bytes), has no room for windows of "
            f"W = {self.unlimited_size}, so W = {self.size}"
        )

    @property
    def time_warning(self) -> str | None:
        """The part of ``warning`` that is about the time of an iteration."""
        if self.fits is not False or self.iteration_secs is None:
            return None
        stall, mean = self.stall_secs or 0.0, self.mean_stall_secs or 0.0
        noticed = stall >= _NOTICED * self.iteration_secs
        if not noticed and self.budget_fraction >= 1:
            return None
        what = f"snapshots of a window of W = {self.size} do not fit in {part_of(self.budget_fraction)}an iteration"
        numbers = f"{max(self.rank_bytes):,} bytes per rank at most, {self.limit_bytes or 0:,} would fit"
        cost = (
            f"training stalls by up to {stall:.3g} s per iteration ({stall / self.iteration_secs:.0%}), "
            f"{mean:.3g} s on average"
            if noticed
            else "they still end within the iteration"
        )
        return f"{what} ({numbers}); {cost}"


def part_of(fraction: float) -> str:
    return "" if fraction == 1 else f"{fraction:.0%} of "


PROFILE_STEPS = 10
"""Number of steps for which a run measures, beside a single window. Also the number of steps after which a dense
checkpoint is made to measure rates that are not known."""
FIRST_SLOTS = 4
"""Most slots of the window beside which a run measures, so that it is complete if the run fails early."""

Slots = tuple[tuple[str, ...], ...]


@named_arguments
@dataclass(frozen=True)
class MoEvement(NamedPolicy):
    """Saves at every step: W steps make a window, and each window is one checkpoint.

    W is the smallest number of slots with which every slot fits into an iteration: its bytes, divided equally among the
    ranks, at the measured rate of copying; or, if a window goes to storage, at that of committing where this is slower.
    Of windows that memory keeps, one that storage gets has the time since the one before it to be committed. Each
    pipeline stage is divided into slots separately, since its ranks hold no state of the others. W is computed again at
    the start of each window. Before training (step 0) everything is saved, since the first window has no older state to
    fall back on. Unless ``window`` is given, a first window of at most ``FIRST_SLOTS`` slots starts as soon as
    iteration time and rates were measured once, which is after the second step; the next one starts after
    ``PROFILE_STEPS`` steps, when there are enough measurements. Source: MoEvement, NSDI '26.

    Attributes:
        window: W, or None to compute it as above. Of the windows with at most W slots, one whose largest slot is
            smallest is used; in either case one that host memory has room for.
        order: Which experts are anchored last, and so are frozen longest while a window is replayed: the most popular
            by ``"hard_count"`` (tokens since the newest window began), ``"soft_count"`` (the same with gate
            probabilities), ``"time_decayed"`` (tokens per step, older ones weigh less), ``"capacity_normalised"``
            (tokens over the expert's even share); or ``"round_robin"``, in turn.

    Raises:
        ConfigError: A value out of range, or no such order.
    """

    name: ClassVar[str] = "moevement"
    window: int | None = None
    order: str = "hard_count"
    max_window: ClassVar[int] = 32
    """Upper bound on W where it is computed. Training stalls if even that does not fit into an iteration, and
    ``explain`` says by how much."""
    dense_overhead: ClassVar[float] = 0.01
    """Portion of training time that dense checkpoints between windows may cost. A window can only be loaded by the same
    number of ranks with the same parallel degrees, a dense checkpoint by any. It is about as large as the W slots of a
    window, so training may wait for W - 1 iterations: one is due every ``(W - 1) / dense_overhead`` steps. None is made
    if host memory has no room for it."""

    def __post_init__(self) -> None:
        if self.window is not None:
            require_positive("MoEvement", window=self.window)
        if not isinstance(self.order, str) or self.order not in ORDERS:
            raise ConfigError(f"MoEvement(order={self.order!r}): no such order; choose from {list(ORDERS)}")

    @property
    def needs(self) -> Needs:
        return Needs(
            sizes=True,
            windows=True,
            popularity=self.ordering.counted,
            alone=True,
            next_due=self.next_due,
            warning=self.warning,
        )

    @property
    def ordering(self) -> Ordering:
        return Ordering(self.order)

    def check(self, catalog: Catalog) -> None:
        """Accepts any model that has at least as many operators as the window has slots."""
        require_operators("MoEvement", catalog, self.window)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        window, slot = _under_way(context), context.run.next_slot
        if window is None:
            if self._waits(context):
                return SnapshotPlan(context.run.step)
            window, slot = self._begin(context), 0
        return slot_plan(window, slot, context.run.step)

    def explain(self, context: PolicyContext) -> WindowReport:
        """Returns the window that ``context.run.step`` belongs to, or that would start at it, with its costs.

        If a window starts at the step, it is the one that ``plan`` starts. If ``plan`` waits for measurements, it is
        the one that would start without the wait.

        Raises:
            ConfigError: As ``plan``.
        """
        window, slots_needed = _under_way(context), None
        if window is None:
            window = self._begin(context)
            slots_needed = len(self._slots_needed(lanes_of(window.order, context.model.placement), context))
        return WindowReport(
            window=window,
            sizes=context.model.sizes,
            placement=context.model.placement,
            iteration_secs=context.measured.recent_iteration_secs,
            bytes_per_sec=_bytes_per_sec(context),
            budget_fraction=context.memory.budget_fraction,
            snapshot_bytes=context.memory.snapshot_bytes,
            at_once=context.memory.at_once,
            unlimited_size=None if slots_needed is None or self._dense_due(context, slots_needed) else slots_needed,
        )

    def warning(self, context: PolicyContext) -> str | None:
        """See ``Needs.warning``."""
        return self.explain(context).warning

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``: the policy waits between the first window and the others.

        Later there is a snapshot beside every iteration. So before that, iterations must be measured that are neither
        the slow first ones nor beside a snapshot.
        """
        last = context.run.last_step
        if self.window is not None or _under_way(context) is not None or not last or context.run.nothing_safe:
            return context.run.step
        return max(context.run.step, PROFILE_STEPS)

    def _waits(self, context: PolicyContext) -> bool:
        """Returns whether no window can be sized yet, and there is a checkpoint to fall back on.

        The wait is limited, since rates are measured on checkpoints, and a restarted run may have made none yet.
        """
        if self.window is not None or context.run.step == 0 or _has_none(context):
            return False
        if context.run.step < self.next_due(context):
            return True
        # A life that resumed from step 0 knows no rates, and has only that checkpoint: it waits less.
        patience = PROFILE_STEPS if context.run.last_step else FIRST_SLOTS
        return self._limit_bytes(context) is None and context.run.step - (context.run.last_step or 0) < patience

    def _limit_bytes(self, context: PolicyContext) -> int | None:
        """Returns the most bytes of a slot that one rank can save in an iteration; None while not known."""
        secs, fraction = context.measured.recent_iteration_secs, context.memory.budget_fraction
        return bytes_in_time(secs, _bytes_per_sec(context), fraction)

    def _begin(self, context: PolicyContext) -> Window:
        require_sizes(self._name(), context.model.catalog, context.model.sizes)
        order, frequencies = self.ordering.order(context)
        if not context.model.coupled:
            former, slots = context.run.window, self._slots(order, context)
            # The same object if nothing has changed: caches go by identity.
            slots = former.slots if former is not None and former.slots == slots else slots
            return Window(context.run.step, slots, frequencies)
        units, sizes, members = merge_coupled(order, context.model.sizes, context.model.coupled)
        slots = self._slots(units, replace(context, model=replace(context.model, sizes=sizes)))
        whole = tuple(tuple(op for unit in slot for op in members[unit]) for slot in slots)
        return Window(context.run.step, whole, frequencies)

    def _slots(self, order: Sequence[str], context: PolicyContext) -> Slots:
        lanes = lanes_of(order, context.model.placement)
        slots = self._slots_needed(lanes, context)
        if self._dense_due(context, len(slots)):
            whole, room = (tuple(op for lane in lanes for op in lane.order),), context.memory.snapshot_bytes
            if room is None or max(share_bytes(whole, context.model.sizes, lanes)) <= room:
                return whole
        return self._within_memory(lanes, context, slots)

    def _slots_needed(self, lanes: Sequence[Lane], context: PolicyContext) -> Slots:
        """Returns the slots for unlimited host memory."""
        room, limit = context.memory.snapshot_bytes, self._limit_bytes(context)
        if context.run.step == 0:
            return (tuple(op for lane in lanes for op in lane.order),)
        if self.window is not None and not _has_none(context):
            return _balanced(lanes, context.model.sizes, self.window)
        if limit is None or _has_none(context):
            # A dense checkpoint, to fall back on or to measure; if host memory is short, as few slots as it allows.
            return self._fewest(lanes, context.model.sizes, room)
        slots = self._fewest(lanes, context.model.sizes, limit if room is None else min(limit, room))
        if context.run.last_step == 0 and len(slots) > FIRST_SLOTS:
            few = _balanced(lanes, context.model.sizes, FIRST_SLOTS)
            slots = few if room is None or max(share_bytes(few, context.model.sizes, lanes)) <= room else slots
        return slots

    def _within_memory(self, lanes: Sequence[Lane], context: PolicyContext, slots: Slots) -> Slots:
        """Returns these slots; or, if host memory has no room for them, those of the nearest window that fits.

        Memory that outlives the process holds two windows; or one if storage gets each (``storage_due``), or if there
        is no room for two. Other memory holds single slots.

        Raises:
            ConfigError: Before training, there is no room for a checkpoint. Later, snapshots that do not fit are left
                out.
        """
        memory = context.memory
        room, at_once = memory.snapshot_bytes, memory.at_once
        if room is None:
            return slots
        windows = 0 if not memory.outlives_process else 1 if memory.storage_due else 2

        def fits(size: int, held: int) -> bool:
            heaviest = max(share_bytes(_balanced(lanes, context.model.sizes, size), context.model.sizes, lanes))
            return max(held * size, 1) * heaviest <= room * at_once and (size == 1 or heaviest <= room)

        heaviest = max(share_bytes(slots, context.model.sizes, lanes))
        if context.run.step == 0 and heaviest > room * at_once:
            raise ConfigError(
                f"{self._name()}: at step 0, the heaviest snapshot has {heaviest:,} bytes on each of "
                f"{context.model.placement.ranks} ranks, but host memory leaves room for {room * at_once:,}; set "
                f"host_memory_bytes to {heaviest} or more: before training everything is saved at once"
            )
        if context.run.step == 0 or (heaviest <= room and windows * len(slots) * heaviest <= room * at_once):
            return slots
        if not windows:
            most = max(len(lane.order) for lane in lanes)
            return self._fewest(lanes, context.model.sizes, room, most)
        for held in range(windows, 0, -1):
            if (size := bisect_left(range(1, len(slots) + 1), True, key=lambda size: not fits(size, held))) > 0:
                return _balanced(lanes, context.model.sizes, size)
        return _balanced(lanes, context.model.sizes, 1)

    def _dense_due(self, context: PolicyContext, size: int) -> bool:
        """Returns whether a dense checkpoint must be made in place of a window of ``size`` slots."""
        if size == 1 or context.run.dense_step is None:
            return False
        return (context.run.step - context.run.dense_step) * self.dense_overhead >= size - 1

    def _fewest(
        self,
        lanes: Sequence[Lane],
        sizes: Mapping[str, OperatorBytes],
        limit: int | None,
        most_slots: int | None = None,
    ) -> Slots:
        """Returns the fewest balanced slots within ``limit``; the lightest of up to ``most_slots`` if none are."""
        if limit is None:
            return (tuple(op for lane in lanes for op in lane.order),)
        most = most_slots or self.max_window
        best, lightest = Slots(), inf
        # More slots than needed on average: an owner's experts may lie close together in the order, and longer windows
        # separate them. One slot more may change nothing if owners have few experts.
        for number in range(_needed(lanes, sizes, limit, most) or most, most + 1):
            slots = _balanced(lanes, sizes, number)
            heaviest = max(share_bytes(slots, sizes, lanes))
            if heaviest < lightest:
                best, lightest = slots, heaviest
            if lightest <= limit or len(slots) < number:  # the latter: there is nothing left to separate
                break
        return best

    def _name(self) -> str:
        return "MoEvement()" if self.window is None else f"MoEvement(window={self.window})"


def _has_none(context: PolicyContext) -> bool:
    """Returns whether there is no checkpoint to fall back on, so that the next one must be complete."""
    return context.run.last_step is None or context.run.nothing_safe


def _bytes_per_sec(context: PolicyContext) -> float | None:
    """Returns the rate at which a window's slots are saved, one in each iteration; None while not known.

    A window that stays in memory is only copied. A window for storage is also committed, in the time since the previous
    window for storage.
    """
    copied, committed = context.measured.copy_bytes_per_sec, context.measured.persist_bytes_per_sec
    if context.memory.outlives_process and not context.memory.storage_due:
        return copied or None
    former = context.run.window
    iterations = max(1, storage_steps(context, 1) // (1 if former is None else former.size))
    return min(copied, committed * iterations) if copied and committed else None


def _under_way(context: PolicyContext) -> Window | None:
    """Returns the window whose next slot is saved at this step; None if a new one begins."""
    window, slot = context.run.window, context.run.next_slot
    if window is None or not 0 < slot < window.size:
        return None
    return window


def _needed(
    lanes: Sequence[Lane], sizes: Mapping[str, OperatorBytes], limit: int, most_slots: int | None
) -> int | None:
    """Returns the fewest slots with which no rank has over ``limit`` bytes; None if there are none up to
    ``most_slots``."""
    packed = [lane.pack(sizes, limit * lane.ranks, most_slots) for lane in lanes]
    return None if None in packed else max((len(slots) for slots in packed if slots is not None), default=0)


def _balanced(lanes: Sequence[Lane], sizes: Mapping[str, OperatorBytes], most_slots: int) -> Slots:
    return side_by_side([lane.balance(sizes, most_slots) for lane in lanes])
