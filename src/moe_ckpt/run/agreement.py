"""The numbers that ranks send each other once per step, so that all make the same plan.

``StepConsensus`` declares them: the type of a field says how the values of all ranks become one. Token counts are
summed; all else is sent as numbers whose maximum counts. On several ranks, and if counts come from a device, the
messages of a step are sent while the next step is computed: no rank waits for them, and a plan uses the agreement of
the step before. ``Deferred`` is a value that may still be on its way from a device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.policies.base import ALL_SENT, Measured, Sends
from moe_ckpt.ports import Communicator

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
U = TypeVar("U")
_NANO = 1e9
_PICO = 1e12
_RATE = "_per_sec"
_MOST_ENDED = 32
"""Snapshots in one agreement that have ended: more than can be in flight, so that none waits for a later step."""


class Deferred(Generic[T]):
    """A value to come. Reading it waits for a device; passing it on does not. Safe to use from several threads.

    Args:
        make: Returns the value. Called once, after all events.
        events: Of the device; none if the value needs no device.
    """

    def __init__(self, make: Callable[[], T], events: Sequence[torch.cuda.Event] = ()) -> None:
        self._make, self._events, self._values = make, events, list[T]()
        self._lock = threading.Lock()

    def result(self) -> T:
        """Returns the value. Not for the training thread, which would wait for the device."""
        with self._lock:
            if not self._values:
                for event in self._events:
                    event.synchronize()
                self._values.append(self._make())
            return self._values[0]

    def then(self, change: Callable[[T], U]) -> Deferred[U]:
        """Returns the value after ``change``, which is called when the result is read."""
        return Deferred(lambda: change(self.result()))


Ended = tuple[tuple[bool, bool], ...]
"""Snapshots for storage that ended, in the order of their beginning: (committed; files that they build upon are gone
from storage)."""


@dataclass(frozen=True)
class StepConsensus:
    """A rank's message at the end of a step, and the agreement that is made of the messages, equal on every rank.

    A flag is true if it is true on any rank; of times the longest counts, of rates the slowest.

    Attributes:
        busy: Some rank cannot take another snapshot now.
        storage_busy: Some rank's storage is so far behind that the next snapshot should stay in memory.
        copies_behind: Some rank's peers are so far behind that the next snapshot should not be sent.
        used_up: Some rank's budget has no room beside the snapshots that memory must, or may have to, keep
            (``Room.is_used_up``).
        tight: Some rank's memory does not hold two checkpoints (``Room.is_tight``).
        edited: On some rank, something other than the optimizer changed weights or optimizer state, so that the step
            does not follow from its gradients.
        gone: The newest checkpoint is no longer on storage.
        persist_secs: The longest time from beginning to commit, of the snapshots ``ended``.
        secs: Rank 0's clock; None before the first agreement.
        ended: Snapshots that ended since the last step, in order.
        sends: State that must be sent to some rank's peers (``MirroredShares.sends``).
        measured: Times and rates.
        in_memory: Maximum over ranks of each number of ``MemoryTier.reports``.
    """

    busy: bool = False
    storage_busy: bool = False
    copies_behind: bool = False
    used_up: bool = False
    tight: bool = False
    edited: bool = False
    gone: bool = False
    persist_secs: float | None = None
    secs: float | None = None
    ended: Ended = ()
    sends: Sends = ALL_SENT
    measured: Measured = field(default_factory=Measured)
    in_memory: tuple[int, ...] = ()


_FLAGS = [f.name for f in fields(StepConsensus) if f.type == "bool"]
_TIMES = [f.name for f in fields(StepConsensus) if f.type == "float | None"]
_MEASURED = [f.name for f in fields(Measured)]
_OF_FIRST: dict[str, Any] = {
    f.name: f.default for f in fields(StepConsensus) if f.name in ("gone", "persist_secs", "secs", "ended")
}
"""Fields of which only rank 0's value counts: ranks that hear of a commit at different times would plan differently."""
_LENGTHS = [len(_FLAGS), len(_TIMES) + len(_MEASURED), len(Sends._fields), 2]
"""How many numbers there are of each kind, in their order in a message; those of memory come last."""


def pack(status: StepConsensus, *, leads: bool) -> Counts:
    """Returns a rank's message: numbers of which the maximum over ranks is the agreement.

    A time or rate is sent as a number from 1 on, and as 0 if it is not known.

    Args:
        status: Of the rank.
        leads: True on rank 0.
    """
    facts = vars(status) if leads else {**vars(status), **_OF_FIRST}
    times = [*((name, facts[name]) for name in _TIMES), *vars(status.measured).items()]
    committed = lost = 1  # the highest bit, whose position tells how many there are
    for is_committed, is_lost in facts["ended"][:_MOST_ENDED]:
        committed, lost = committed << 1 | is_committed, lost << 1 | is_lost
    numbers = [
        *(facts[name] for name in _FLAGS),
        *(
            0 if value is None else max(1, int(_PICO / value if name.endswith(_RATE) else value * _NANO))
            for name, value in times
        ),
        *status.sends,
        committed,
        lost,
        *status.in_memory,
    ]
    return np.array(numbers, dtype=np.int64)


def unpack(largest: Counts) -> StepConsensus:
    """Returns the agreement, from the maximum over ranks of each number."""
    numbers = iter(largest.tolist())
    flags, times, sends, bits = (tuple(islice(numbers, count)) for count in _LENGTHS)
    values = [
        (_PICO / number if name.endswith(_RATE) else number / _NANO) if number else None
        for name, number in zip((*_TIMES, *_MEASURED), times, strict=True)
    ]
    scalars: dict[str, Any] = {
        **dict(zip(_FLAGS, map(bool, flags), strict=True)),
        **dict(zip(_TIMES, values, strict=False)),
    }
    return StepConsensus(
        **scalars,
        ended=tuple(zip(*([bit == "1" for bit in f"{number:b}"[1:]] for number in bits), strict=True)),
        sends=Sends(*map(bool, sends)),
        measured=Measured(*values[len(_TIMES) :]),
        in_memory=tuple(numbers),
    )


@dataclass(frozen=True)
class StepTokens:
    """One step's tokens, of this rank or of all.

    Attributes:
        applied: ``[L, E]`` tokens whose update the step applied.
        soft: ``[L, E]`` sums of their gate weights, as whole numbers of any unit; None if the policy does not use them.
        assigned: ``[L, E]`` tokens that the router assigned, also those that were dropped or whose update was skipped;
            None if they are the same as ``applied``.
        deficit: ``[L, E]`` tokens that experts must still make up after the step; None if there were none.
    """

    applied: Counts
    soft: Counts | None = None
    assigned: Counts | None = None
    deficit: Counts | None = None

    @property
    def popularity(self) -> Counts:
        return self.applied if self.assigned is None else self.assigned

    def with_assigned(self) -> StepTokens:
        """Returns the tokens with ``assigned``, which all ranks have or none."""
        return replace(self, assigned=self.popularity)

    def left_out(self) -> StepTokens:
        """Returns the tokens of a step whose update was left out: none are applied."""
        return replace(self, applied=np.zeros_like(self.applied))

    def joined(self) -> Counts:
        """Returns all counts in one array, for ``split``."""
        return np.concatenate([counts for counts in vars(self).values() if counts is not None])

    def split(self, joined: Counts) -> StepTokens:
        """Returns counts of the same kinds as these, from an array of ``joined``."""
        kinds = [name for name, counts in vars(self).items() if counts is not None]
        return StepTokens(**dict(zip(kinds, np.split(joined, len(kinds)), strict=True)))


Updated = bool | Deferred[bool]
"""Whether a step changed weights, or left its update out because gradients overflowed; a device may still have to
tell."""


class StepAgreement:
    """Sends and receives the messages of one step after the other. For the training thread only.

    On one rank without a device the agreement on a step is there at once. Else it is received a step later
    (``Communicator.agrees_late``), after the next forward and backward pass; ``receive`` waits only if device or
    messages were slower than that.

    Attributes:
        waited_secs: Total time that ``receive`` has waited.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.waited_secs = 0.0
        self._sent: tuple[int, Deferred[StepTokens], Future[tuple[Counts, Counts]]] | None = None

    def send(self, step: int, tokens: Deferred[StepTokens], status: StepConsensus) -> Future[tuple[Counts, Counts]]:
        """Begins to agree on the end of ``step``; on all ranks, every step. Returns sums and maxima to come."""
        numbers = pack(status, leads=self._comm.rank == 0)
        agreed = self._comm.start_agreement(lambda: tokens.result().joined(), numbers)
        self._sent = step, tokens, agreed
        return agreed

    def receive(self) -> tuple[int, StepTokens, StepConsensus] | None:
        """Returns the step of the last ``send``, the tokens of all ranks, and the agreement; None from the second call
        on.

        Raises:
            PeerLostError: A peer is gone.
        """
        if self._sent is None:
            return None
        (step, tokens, agreed), self._sent = self._sent, None
        asked = time.perf_counter()
        summed, largest = agreed.result()
        self.waited_secs += time.perf_counter() - asked
        return step, tokens.result().split(summed), unpack(largest)
