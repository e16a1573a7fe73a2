"""Explains the choice of a sparse window by its costs. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from moe_ckpt.core.cadence import bytes_in_time
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.window import OperatorBytes, Window, lanes_of, share_bytes, slot_bytes

_NOTICED = 0.01
"""Least stall that is reported, as a portion of an iteration."""


@dataclass(frozen=True)
class SlotCost:
    """The costs of one slot's snapshot, of all ranks together except for ``rank_bytes`` and the times.

    Attributes:
        anchors: Operators that the slot anchors.
        frozen: Number of operators that later slots anchor.
        full_bytes: Bytes of the anchors.
        compute_bytes: Compute weights of the operators that later slots anchor, in bytes.
        rank_bytes: Bytes on the rank that has most.
        secs: Time to copy or to commit these bytes, whichever is longer; None if rates are not known.
        stall_secs: Time by which that exceeds an iteration; None if it is not known.
    """

    anchors: tuple[str, ...]
    frozen: int
    full_bytes: int
    compute_bytes: int
    rank_bytes: int
    secs: float | None
    stall_secs: float | None

    @property
    def nbytes(self) -> int:
        return self.full_bytes + self.compute_bytes


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
    def slots(self) -> tuple[SlotCost, ...]:
        return tuple(self._costs())

    def _costs(self) -> Iterator[SlotCost]:
        lanes = lanes_of(self.window.order, self.placement)
        shares = share_bytes(self.window.slots, self.sizes, lanes)
        for number, nbytes in enumerate(slot_bytes(self.window.slots, self.sizes)):
            share, anchors = shares[number], self.window.slots[number]
            full = sum(self.sizes[op].full for op in anchors)
            secs = share / self.bytes_per_sec if self.bytes_per_sec else None
            stall = None if secs is None or not self.iteration_secs else max(0.0, secs - self.iteration_secs)
            later = len(self.window.order) - sum(map(len, self.window.slots[: number + 1]))
            yield SlotCost(anchors, later, full, nbytes - full, share, secs, stall_secs=stall)

    @property
    def ranks(self) -> int:
        """Number of ranks of the run."""
        return self.placement.ranks

    @property
    def size(self) -> int:
        """W."""
        return self.window.size

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of a dense checkpoint: every operator in full."""
        return sum(self.sizes[op].full for op in self.window.order)

    @property
    def heaviest_bytes(self) -> int:
        return max(slot.nbytes for slot in self.slots)

    @property
    def mean_bytes(self) -> float:
        """Mean bytes of a slot."""
        return sum(slot.nbytes for slot in self.slots) / self.size

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes that one rank can save in its portion of an iteration; None if not known."""
        return bytes_in_time(self.iteration_secs, self.bytes_per_sec, self.budget_fraction)

    @property
    def fits(self) -> bool | None:
        """True if every slot keeps within ``limit_bytes``; None if not known."""
        limit = self.limit_bytes
        return None if limit is None else all(slot.rank_bytes <= limit for slot in self.slots)

    @property
    def stall_secs(self) -> float | None:
        """Longest stall of one iteration in seconds; None if not known."""
        stalls = [slot.stall_secs for slot in self.slots if slot.stall_secs is not None]
        return max(stalls, default=None)

    @property
    def mean_stall_secs(self) -> float | None:
        """Mean stall of an iteration in seconds; None if not known."""
        stalls = [slot.stall_secs for slot in self.slots if slot.stall_secs is not None]
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
        heaviest = max(slot.rank_bytes for slot in self.slots)
        numbers = f"{heaviest:,} bytes per rank at most, {self.limit_bytes or 0:,} would fit"
        cost = (
            f"training stalls by up to {stall:.3g} s per iteration ({stall / self.iteration_secs:.0%}), "
            f"{mean:.3g} s on average"
            if noticed
            else "they still end within the iteration"
        )
        return f"{what} ({numbers}); {cost}"


def part_of(fraction: float) -> str:
    return "" if fraction == 1 else f"{fraction:.0%} of "
