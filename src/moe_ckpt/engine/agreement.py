"""What the ranks tell each other once per step, so that all plan from the same facts.

Two small all-reduces: token counts are summed; everything else is arranged so that a maximum is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.engine.persisting import Resolution
from moe_ckpt.policies.base import Measured
from moe_ckpt.ports import Communicator

_NANO = 1e9
_PICO = 1e12
_MOST_RESOLVED = 32
"""Resolutions told per step; more than can be in flight, so none is ever left for later."""


@dataclass(frozen=True)
class Facts:
    """Equal on every rank.

    busy: some rank cannot take another snapshot now.
    resolved: (sequence, committed) of snapshots resolved on rank 0 since the last step, in order.
    lost: sequences of those that failed because files that they would build upon are gone from storage.
    persist_secs: the longest time one of them took from beginning to commit.
    """

    busy: bool = False
    resolved: tuple[tuple[int, bool], ...] = ()
    persist_secs: float = 0.0
    measured: Measured = field(default_factory=Measured)
    lost: frozenset[int] = frozenset()


def agree(
    comm: Communicator, counts: Counts, busy: bool, resolutions: Sequence[Resolution], measured: Measured
) -> tuple[Counts, Facts]:
    """(counts summed over ranks, the common facts). A collective: all ranks, every step.

    Only rank 0's resolutions count: it alone knows what is committed, and ranks that learned of a
    commit at different times would plan differently.
    """
    told = list(resolutions[:_MOST_RESOLVED]) if comm.rank == 0 else []
    numbers = [
        int(busy),
        _nanos(measured.iteration_secs),
        _nanos(measured.checkpoint_cost_secs),
        _nanos(measured.persist_secs),
        len(told),
        told[0].sequence if told else 0,
        sum(1 << i for i, r in enumerate(told) if r.committed),
        sum(1 << i for i, r in enumerate(told) if r.lost),
        _nanos(max((r.persist_secs for r in told), default=0.0)),
        _picos_per_byte(measured.copy_bytes_per_sec),
        _picos_per_byte(measured.persist_bytes_per_sec),
        _nanos(measured.recent_iteration_secs),
    ]
    summed, largest = comm.agree(counts, np.asarray(numbers, dtype=np.int64))
    values = [int(v) for v in largest]
    count, first, committed, lost = values[4], values[5], values[6], values[7]
    facts = Facts(
        busy=bool(values[0]),
        resolved=tuple((first + i, bool(committed >> i & 1)) for i in range(count)),
        persist_secs=values[8] / _NANO,
        measured=Measured(
            _secs(values[1]),
            _secs(values[2]),
            _secs(values[3]),
            _per_sec(values[9]),
            _per_sec(values[10]),
            _secs(values[11]),
        ),
        lost=frozenset(first + i for i in range(count) if lost >> i & 1),
    )
    return summed, facts


def _nanos(secs: float | None) -> int:
    return 0 if secs is None else max(1, int(secs * _NANO))


def _picos_per_byte(bytes_per_sec: float | None) -> int:
    """So that the slowest rank's is the largest."""
    return 0 if bytes_per_sec is None else max(1, int(_PICO / bytes_per_sec))


def _per_sec(picos_per_byte: int) -> float | None:
    return _PICO / picos_per_byte if picos_per_byte else None


def _secs(nanos: int) -> float | None:
    return nanos / _NANO if nanos else None
