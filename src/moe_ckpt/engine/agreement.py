"""What the ranks send each other once per step, so that all plan from the same numbers.

Token counts are summed; everything else is arranged so that a maximum is right. On several ranks, and where counts come
from a device, the messages of a step travel while the next one is computed: no rank waits for them, and a plan is made
from what was true a step before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.engine.deferred import Deferred
from moe_ckpt.engine.outcomes import Resolution
from moe_ckpt.policies.base import ALL_SENT, Measured, Sends
from moe_ckpt.ports import Communicator

_NANO = 1e9
_PICO = 1e12
_MOST_RESOLVED = 32
"""Resolutions sent per step; more than can be in flight, so none is ever left for later."""


@dataclass(frozen=True)
class StepConsensus:
    """What the ranks agreed on; equal on every rank.

    Attributes:
        busy: Some rank cannot take another snapshot now.
        resolved: (sequence, committed) of snapshots resolved on rank 0 since the last step, in order.
        lost: Sequences of those that failed because files that they would build upon are gone from storage.
        storage_busy: Some rank's storage is so far behind that the next snapshot should stay in memory only.
        copies_behind: Some rank's peers are so far behind that the next snapshot should not be sent.
        sends: What must be sent to some rank's peers (``MirroredShares.sends``).
        used_up: Some rank's budget has no room beside what memory must keep, or may have to.
        in_memory: What is true of all ranks, of the snapshots that ``MemoryTier.reports`` was about.
        edited: On some rank, something other than the optimizer changed weights or optimizer state, so that the step
            does not follow from its gradients.
        tight: Some rank's memory does not hold two checkpoints.
        gone: The newest checkpoint is no longer on storage.
        secs: Rank 0's clock; None before the ranks have agreed on a step.
        persist_secs: The longest time one of them took from beginning to commit.
    """

    busy: bool = False
    resolved: tuple[tuple[int, bool], ...] = ()
    persist_secs: float = 0.0
    measured: Measured = field(default_factory=Measured)
    lost: frozenset[int] = frozenset()
    storage_busy: bool = False
    copies_behind: bool = False
    used_up: bool = False
    in_memory: tuple[int, ...] = ()
    secs: float | None = None
    sends: Sends = ALL_SENT
    edited: bool = False
    tight: bool = False
    gone: bool = False


@dataclass(frozen=True)
class RankStatus:
    """The state of this rank's snapshots at the end of a step.

    Attributes:
        busy: No other snapshot can be taken now.
        storage_busy: Storage is behind.
        copies_behind: So are this rank's peers.
        ended: Those that ended since the last step.
        in_memory: ``MemoryTier.reports``; empty without one.
        sends: See ``StepConsensus``.
        used_up: See ``Room.is_used_up``.
        edited: See ``StepConsensus``; of this rank.
        tight: See ``Room.is_tight``.
        gone: See ``StepConsensus``; of rank 0.
    """

    busy: bool
    storage_busy: bool = False
    copies_behind: bool = False
    ended: Sequence[Resolution] = ()
    in_memory: Sequence[int] = ()
    sends: Sequence[bool] = ALL_SENT
    used_up: bool = False
    edited: bool = False
    tight: bool = False
    gone: bool = False


@dataclass(frozen=True)
class StepTokens:
    """One step's tokens, of this rank or of all.

    Attributes:
        applied: ``[L, E]`` tokens whose update the step applied.
        soft: ``[L, E]`` of their gate weights, in whole numbers of any unit; None if the policy does not go by them.
        assigned: ``[L, E]`` tokens that the router assigned, those too that were dropped or whose step was skipped;
            None if they are the same.
        owed: ``[L, E]`` tokens that experts have still to make up after the step; None if none has or had any.
    """

    applied: Counts
    soft: Counts | None = None
    assigned: Counts | None = None
    owed: Counts | None = None

    @property
    def popularity(self) -> Counts:
        return self.applied if self.assigned is None else self.assigned

    def of_iteration(self, updated: bool) -> StepTokens:
        """With ``assigned``, which ranks must have alike; without an update nothing was applied."""
        return StepTokens(self.applied * int(updated), self.soft, self.popularity, self.owed)

    @property
    def _parts(self) -> tuple[Counts | None, ...]:
        return self.applied, self.soft, self.assigned, self.owed

    def joined(self) -> Counts:
        """All of it in one array, for ``split``."""
        return np.concatenate([part for part in self._parts if part is not None])

    def split(self, joined: Counts) -> StepTokens:
        """Numbers of the same kinds out of one array."""
        kinds = [part is not None for part in self._parts]
        parts = iter(np.split(joined, sum(kinds)))
        return StepTokens(*(next(parts) if kind else None for kind in kinds))  # type: ignore[arg-type]


@dataclass(frozen=True)
class AgreedStep:
    """What the ranks agreed on at the end of one step; equal on all.

    Attributes:
        step: Which.
        tokens: Summed over ranks.
        consensus: The rest.
    """

    step: int
    tokens: StepTokens
    consensus: StepConsensus


class StepAgreement:
    """Sends and receives, one step after the other. For the training thread only.

    On one rank without a device a step's consensus is there at once. Else it is received a step later (``late``), when
    the device and the messages have had the next forward and backward pass; ``receive`` waits only if they were slower.

    Attributes:
        waited_secs: That ``receive`` has waited in all.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.waited_secs = 0.0
        self._sent: tuple[int, Deferred[StepTokens], Future[tuple[Counts, Counts]]] | None = None

    @property
    def late(self) -> bool:
        return self._comm.agrees_late

    def send(self, step: int, tokens: Deferred[StepTokens], standing: RankStatus, measured: Measured) -> Future[Counts]:
        """Begin to agree on the end of ``step``; all ranks, every step. Returns the step's applied tokens to come.

        Only rank 0's resolutions count: it alone knows what is committed, and ranks that learned of a commit at
        different times would plan differently.
        """
        numbers = step_numbers(standing, measured, leads=self._comm.rank == 0)
        agreed = self._comm.start_agreement(lambda: tokens.result().joined(), numbers)
        self._sent = step, tokens, agreed
        applied: Future[Counts] = Future()

        def deliver(found: Future[tuple[Counts, Counts]]) -> None:
            error = found.exception()
            if error is None:
                applied.set_result(tokens.result().split(found.result()[0]).applied)
            else:
                applied.set_exception(error)

        agreed.add_done_callback(deliver)
        return applied

    def receive(self) -> AgreedStep | None:
        """Returns what was agreed on the step sent last, once; None if that was received already.

        Raises:
            PeerLostError: A peer is gone.
        """
        if self._sent is None:
            return None
        (step, tokens, agreed), self._sent = self._sent, None
        asked = time.perf_counter()
        summed, largest = agreed.result()
        self.waited_secs += time.perf_counter() - asked
        return AgreedStep(step, tokens.result().split(summed), _consensus([int(value) for value in largest]))


def step_numbers(standing: RankStatus, measured: Measured, *, leads: bool) -> Counts:
    """What one rank sends, arranged so that the maximum over ranks is right.

    Args:
        leads: It is rank 0.
    """
    sent = list(standing.ended[:_MOST_RESOLVED]) if leads else []
    numbers = [
        int(standing.busy),
        _nanos(measured.iteration_secs),
        _nanos(measured.checkpoint_cost_secs),
        _nanos(measured.persist_secs),
        len(sent),
        sent[0].sequence if sent else 0,
        sum(1 << i for i, r in enumerate(sent) if r.committed),
        sum(1 << i for i, r in enumerate(sent) if r.lost),
        _nanos(max((r.persist_secs for r in sent), default=0.0)),
        _picos_per_byte(measured.copy_bytes_per_sec),
        _picos_per_byte(measured.persist_bytes_per_sec),
        _nanos(measured.recent_iteration_secs),
        int(standing.storage_busy),
        _nanos(time.monotonic()) if leads else 0,
        int(standing.copies_behind),
        _nanos(measured.update_secs),
        _picos_per_byte(measured.send_bytes_per_sec),
        _nanos(measured.copy_interference_secs),
        *map(int, standing.sends),
        int(standing.used_up),
        int(standing.edited),
        int(standing.tight),
        int(standing.gone),
        *standing.in_memory,
    ]
    return np.asarray(numbers, dtype=np.int64)


def _consensus(values: Sequence[int]) -> StepConsensus:
    """From the maxima over ranks of ``step_numbers``."""
    count, first, committed, lost = values[4], values[5], values[6], values[7]
    return StepConsensus(
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
            _secs(values[15]),
            _per_sec(values[16]),
            _secs(values[17]),
        ),
        lost=frozenset(first + i for i in range(count) if lost >> i & 1),
        storage_busy=bool(values[12]),
        secs=_secs(values[13]),
        copies_behind=bool(values[14]),
        sends=Sends(*map(bool, values[18:22])),
        used_up=bool(values[22]),
        edited=bool(values[23]),
        tight=bool(values[24]),
        gone=bool(values[25]),
        in_memory=tuple(values[26:]),
    )


def _nanos(secs: float | None) -> int:
    return 0 if secs is None else max(1, int(secs * _NANO))


def _picos_per_byte(bytes_per_sec: float | None) -> int:
    """Inverted, so that MAX selects the slowest."""
    return 0 if bytes_per_sec is None else max(1, int(_PICO / bytes_per_sec))


def _per_sec(picos_per_byte: int) -> float | None:
    return _PICO / picos_per_byte if picos_per_byte else None


def _secs(nanos: int) -> float | None:
    return nanos / _NANO if nanos else None
