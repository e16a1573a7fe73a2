"""What a sparse window costs and what a recovery from it costs, in numbers: explains a choice, decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from moe_ckpt.core.placement import Placement
from moe_ckpt.core.save_budget import bytes_in_time
from moe_ckpt.core.window import OperatorBytes, Window, lanes_of, share_bytes, slot_bytes

_NOTICED = 0.01
"""Stall that is told, as a portion of an iteration."""


@dataclass(frozen=True)
class SlotCost:
    """The snapshot of one step of a window. All ranks together, but for ``rank_bytes`` and the times.

    Attributes:
        full_bytes: Of its anchors.
        compute_bytes: Of the operators that later slots anchor.
        rank_bytes: An even share of both, rounded up.
        secs: Time to copy and to commit that share, whichever takes longer.
        stall_secs: How much longer than an iteration that is. Both None where rates or iteration time are not known.
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
    """One window of one model, with what was known when it was made.

    ``MoEvement.explain`` makes it.

    Attributes:
        sizes: Of every operator of the window.
        placement: Ranks over which state is dealt evenly; over those of each pipeline stage by itself.
        iteration_secs: None if not known.
        bytes_per_sec: Of one rank, the slower of copying and committing; None if not known.
        budget_fraction: Portion of an iteration that a snapshot may take.
        snapshot_bytes: Most bytes of one rank's snapshot that host memory leaves room for; None if not known.
        at_once: Snapshots that have so much room at once.
        unlimited_size: W, if host memory had more room; None if not known.
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
        """Per step, over the window."""
        return sum(slot.nbytes for slot in self.slots) / self.size

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes that one rank can save in its portion of an iteration; None where that is not known."""
        return bytes_in_time(self.iteration_secs, self.bytes_per_sec, self.budget_fraction)

    @property
    def fits(self) -> bool | None:
        """True if every slot keeps within ``limit_bytes``; None where that is not known."""
        limit = self.limit_bytes
        return None if limit is None else all(slot.rank_bytes <= limit for slot in self.slots)

    @property
    def stall_secs(self) -> float | None:
        """Longest stall of one iteration; None where it is not known."""
        stalls = [slot.stall_secs for slot in self.slots if slot.stall_secs is not None]
        return max(stalls, default=None)

    @property
    def mean_stall_secs(self) -> float | None:
        """Stall per iteration, over the window."""
        stalls = [slot.stall_secs for slot in self.slots if slot.stall_secs is not None]
        return sum(stalls) / len(stalls) if stalls else None

    @property
    def warning(self) -> str | None:
        """One sentence if this window's snapshots take longer than they may, or host memory has no room for the window
        that was wanted; None if neither is so, or if unknown.

        Without the portion of an iteration being set, an excess that nobody would notice is not worth a sentence.
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
