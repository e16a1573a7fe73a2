"""What ``moe-ckpt window`` says of a sparse window: a table, sentences, and plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moe_ckpt.core.window import balance, slot_bytes
from moe_ckpt.policies.moevement import WindowReport, part_of


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


def costs_of(report: WindowReport) -> list[SlotCost]:
    """Returns the costs of each slot of a window."""
    slots, sizes = report.window.slots, report.sizes
    rows = zip(slots, slot_bytes(slots, sizes), report.rank_bytes, strict=True)
    costs, later = [], len(report.window.order)
    for number, (anchors, nbytes, rank_bytes) in enumerate(rows):
        full, later = sum(sizes[op].full for op in anchors), later - len(anchors)
        secs = rank_bytes / report.bytes_per_sec if report.bytes_per_sec else None
        stall = report.stalls_secs[number] if report.stalls_secs else None
        costs.append(SlotCost(anchors, later, full, nbytes - full, rank_bytes, secs, stall_secs=stall))
    return costs


def dense_bytes(report: WindowReport) -> int:
    """Returns the bytes of a dense checkpoint of all ranks together: every operator in full."""
    return sum(report.sizes[op].full for op in report.window.order)


def recovery_iterations(report: WindowReport) -> tuple[float, int]:
    """Iterations that a failure makes train again: expected, and at most (MoEvement, section 3.6)."""
    return 1.5 * report.size, 2 * report.size


def recovery_secs(report: WindowReport) -> tuple[float, float] | None:
    """The same in seconds, at the speed of training; replay is faster, since frozen operators do less."""
    if not report.iteration_secs:
        return None
    expected, most = recovery_iterations(report)
    return expected * report.iteration_secs, most * report.iteration_secs


def heaviest_by_size(report: WindowReport, most: int) -> tuple[int, ...]:
    """Bytes of the heaviest slot of the best window of at most 1, 2, ... ``most`` slots: why W is what it is."""
    order, sizes = report.window.order, report.sizes
    return tuple(max(slot_bytes(balance(order, sizes, size), sizes)) for size in range(1, most + 1))


def table(
    report: WindowReport, human: Callable[[int], str] = "{:,}".format
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(columns, one row per slot) as text. ``human`` writes a number of bytes."""
    columns = ["slot", "anchored", "frozen", "full", "compute", "both", "of dense", "per rank"]
    if report.limit_bytes is not None:
        columns += ["of iteration", "stall"]
    rows, dense = [], dense_bytes(report)
    for number, slot in enumerate(costs_of(report)):
        row = [str(number), str(len(slot.anchors)), str(slot.frozen)]
        row += [human(nbytes) for nbytes in (slot.full_bytes, slot.compute_bytes, slot.nbytes)]
        row += [_share(slot.nbytes, dense), human(slot.rank_bytes)]
        if slot.secs is not None and slot.stall_secs is not None and report.iteration_secs:
            row += [f"{slot.secs / report.iteration_secs:.1%}", f"{slot.stall_secs:.3g} s"]
        rows.append(tuple(row))
    return tuple(columns), rows


def sentences(report: WindowReport, human: Callable[[int], str] = "{:,} bytes".format) -> Iterator[str]:
    """Returns sentences that say what the table does not show."""
    dense, slots = dense_bytes(report), [slot.nbytes for slot in costs_of(report)]
    yield (
        f"W = {report.size}: {len(report.window.order)} operators, dense {human(dense)}; heaviest slot "
        f"{_share(max(slots), dense)} of that, mean {_share(sum(slots) / len(slots), dense)}"
    )
    if report.memory_warning is not None:
        yield report.memory_warning
    limit = report.limit_bytes
    if limit is not None and report.bytes_per_sec is not None:
        verdict = report.time_warning or ("every slot fits" if report.fits else "no slot takes noticeably longer")
        yield (
            f"limit per rank and iteration: {human(limit)} ({part_of(report.budget_fraction)}"
            f"{report.iteration_secs:g} s at {human(int(report.bytes_per_sec))}/s, "
            f"{report.placement.ranks} rank{'s' * (report.placement.ranks > 1)}); {verdict}"
        )
    expected, most = recovery_iterations(report)
    secs = recovery_secs(report)
    times = "" if secs is None else f" ({secs[0]:.3g} s and {secs[1]:.3g} s)"
    yield f"recovery trains {expected:g} iterations again on average, {most} at most{times}"


def facts_of(report: WindowReport) -> dict[str, Any]:
    """All of it as plain data, ready for JSON. Bytes of all ranks together unless named otherwise."""
    costs = costs_of(report)
    slots = [
        {
            "anchors": list(slot.anchors),
            "frozen_operators": slot.frozen,
            "bytes": slot.nbytes,
            **{name: getattr(slot, name) for name in _OF_A_SLOT},
        }
        for slot in costs
    ]
    iterations, secs = recovery_iterations(report), recovery_secs(report) or (None, None)
    return {
        "start": report.window.start,
        "window": report.size,
        "operators": len(report.window.order),
        "dense_bytes": dense_bytes(report),
        "heaviest_bytes": max(slot.nbytes for slot in costs),
        "mean_bytes": sum(slot.nbytes for slot in costs) / report.size,
        "ranks": report.placement.ranks,
        **{name: getattr(report, name) for name in _OF_A_WINDOW},
        "recovery": {
            "expected_iterations": iterations[0],
            "most_iterations": iterations[1],
            "expected_secs": secs[0],
            "most_secs": secs[1],
        },
        "frequencies": None if report.window.frequencies is None else dict(report.window.frequencies),
        "slots": slots,
    }


_OF_A_SLOT = ("full_bytes", "compute_bytes", "rank_bytes", "secs", "stall_secs")
_OF_A_WINDOW = (
    *("iteration_secs", "bytes_per_sec", "budget_fraction", "snapshot_bytes", "limit_bytes"),
    *("fits", "stall_secs", "mean_stall_secs"),
)
"""Fields that ``facts_of`` gives by their names."""


def _share(nbytes: float, of: int) -> str:
    return f"{nbytes / of:.1%}" if of else "-"
