"""Holds copies and sends back until a pipeline's schedule leaves this rank idle, or until they must go.

``schedule`` has the arithmetic, and this module the clock and the threads. ``watch_pipeline`` reports when this rank
begins and ends to wait for its neighbours (MoEtion, section 5.3), the engine when an iteration and its update begin.
Every thread that copies or sends asks before each chunk. Nothing is held back between the update and the next
iteration, nor while training waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

import torch
from torch import nn

from moe_ckpt.bubbles.schedule import MARGIN, Bubble, Pace, clipped, tail_secs, typical
from moe_ckpt.megatron.compat import Wrapped, look_up, megatron_core

CHUNK_NBYTES = 1 << 20
"""Small chunks, so that a copy that began in a bubble ends soon after it."""
_RECENT = 5
_TICK_SECS = 1e-6


class HostStamps:
    """Takes moments of a rank that computes on the CPU: the times at which its thread reaches them."""

    waits_for = None
    """Nothing: a chunk goes at once."""

    def now(self) -> float:
        return time.perf_counter()

    @staticmethod
    def secs(begin: float, end: float) -> float | None:
        return end - begin


class CudaStamps:
    """Takes moments of a rank that computes on a GPU: the times at which the device reaches them, after the host.

    Attributes:
        waits_for: The newest moment. A chunk that goes in this bubble is copied after it, on a separate stream.
    """

    def __init__(self) -> None:
        self.waits_for: torch.cuda.Event | None = None

    def now(self) -> torch.cuda.Event:
        moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        moment.record(torch.cuda.current_stream())
        self.waits_for = moment
        return moment

    @staticmethod
    def secs(begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Returns the seconds between two moments; None if the device has not reached them yet."""
        return begin.elapsed_time(end) / 1e3 if begin.query() and end.query() else None  # type: ignore[no-untyped-call]


@dataclass
class Tally:
    """Counts the bytes of one kind that went through a gate.

    Attributes:
        nbytes: All bytes.
        in_bubbles: The bytes that went while this rank was idle.
    """

    nbytes: int = 0
    in_bubbles: int = 0


class Forecast:
    """Forecasts an iteration's bubbles from those of the newest iterations.

    Only the training thread changes it; any thread may read the attributes.

    Args:
        stage: This rank's stage in the pipeline.
        stages: Number of stages.
        chunks: Model chunks on each rank; with several (interleaved 1F1B) no idle time at the end is expected.
        stamps: Takes moments.

    Attributes:
        windows: Expected bubbles, in seconds from an iteration's beginning; the last may be after its end.
        span_secs: Shortest recent time from an iteration's beginning to its update; None until known.
        period_secs: Shortest recent time from an iteration's beginning to that of the next one; None until known.
        tail_secs: Time for which this rank is idle after its last backward pass, until the pipeline has finished.
    """

    def __init__(self, stage: int, stages: int, chunks: int, stamps: HostStamps | CudaStamps) -> None:
        self.windows: tuple[Bubble, ...] = ()
        self.tail_secs = 0.0
        self.span_secs: float | None = None
        self.period_secs: float | None = None
        self._pipeline = stage, stages
        self._estimates = chunks == 1
        self._secs = stamps.secs
        self._spans: deque[float] = deque(maxlen=_RECENT)
        self._periods: deque[float] = deque(maxlen=_RECENT)
        self._seen: deque[tuple[Bubble, ...]] = deque(maxlen=_RECENT)
        self._iterations = 0
        self._last: tuple[object, list[tuple[object, object]]] | None = None

    def period(self, secs: float) -> None:
        """Notes the seconds from the beginning of one iteration to that of the next."""
        self._periods.append(secs)
        self.period_secs = min(self._periods)

    def iteration(self, began: object, waits: list[tuple[object, object]], span_secs: float, microbatches: int) -> None:
        """Notes an iteration. Its bubbles are measured with the next one, since a device may still be computing it.

        Args:
            began: The moment at which it began.
            waits: Begin and end of each wait for a neighbour, as moments.
            span_secs: Time from its beginning to its update.
            microbatches: Number of micro-batches; 0 if not known.
        """
        last, self._last = self._last, (began, waits)
        self._spans.append(span_secs)
        self.span_secs = min(self._spans)
        self._iterations += 1
        if last is not None:
            self._measure(*last)
        # The idle time at the pipeline's end is spent in the update, after the last wait that can be seen.
        estimates = microbatches > 0 and self._estimates
        self.tail_secs = tail_secs(*self._pipeline, microbatches, span_secs) if estimates else 0.0
        seen = typical(self._seen)
        end = max([span_secs, *(window.end for window in seen[-1:])])
        self.windows = (*seen, Bubble(end, end + self.tail_secs)) if self.tail_secs else seen

    def _measure(self, began: object, waits: list[tuple[object, object]]) -> None:
        windows, at = list[Bubble](), 0.0
        for begin, end in waits:
            first, then = self._secs(began, begin), self._secs(began, end)  # type: ignore[arg-type]
            if first is None or then is None:
                return
            at = max(at, first)
            windows.append(Bubble(at, at := max(at, then)))
        if self._iterations > 2:  # the first is slower: connections, allocators and kernels are set up
            self._seen.append(tuple(windows))

    def wait_secs(self, number: int) -> float:
        """Returns the expected seconds of the wait of this number; 0 until any was measured."""
        return self.windows[number].secs if self._seen and number < len(self.windows) else 0.0


class BubbleGate:
    """The gate of one rank. ``Transfer`` is for threads that copy or send; everything else for the training thread.

    Args:
        stage: This rank's stage in the pipeline.
        stages: Number of stages, above 1.
        chunks: As of ``Forecast``.
        on_device: True if this rank computes on a GPU.

    Attributes:
        copied: Bytes that were copied from live tensors.
        sent: Bytes that were sent to peers.
        rates: Bytes per second of the newest copies.
    """

    def __init__(self, stage: int, stages: int, chunks: int = 1, *, on_device: bool = False) -> None:
        self.copied, self.sent = Tally(), Tally()
        self.rates: deque[float] = deque(maxlen=_RECENT)
        self.changed = threading.Condition()
        self._stamps = CudaStamps() if on_device else HostStamps()
        self.forecast = Forecast(stage, stages, chunks, self._stamps)
        self._began: float | None = None
        self._began_stamp: object = None
        self._last_began: float | None = None
        self._waits: list[tuple[object, object]] = []
        self._received = [0, 0]
        self._idle_secs = -inf
        """Expected rest of the wait under way; below 0 outside of waits."""
        self._tail_until = -inf
        self._on_device = on_device

    @property
    def bubble_nbytes(self) -> int:
        return self.copied.in_bubbles + self.sent.in_bubbles

    @property
    def beside_nbytes(self) -> int:
        return self.copied.nbytes + self.sent.nbytes - self.bubble_nbytes

    # --- for the engine ---

    def step_begins(self) -> None:
        if self._began is not None:
            return
        now = time.perf_counter()
        if self._last_began is not None:
            self.forecast.period(now - self._last_began)
        self._waits, self._received = [], [0, 0]
        self._began_stamp = self._stamps.now()
        self._last_began = now
        with self.changed:
            self._began = now

    def update_begins(self) -> None:
        began = self._began
        if began is None:
            return
        now = time.perf_counter()
        if self._waits:  # else nothing was computed
            self.forecast.iteration(self._began_stamp, self._waits, now - began, max(self._received))
        with self.changed:
            self._began, self._tail_until = None, now + self.forecast.tail_secs
            self.changed.notify_all()

    def release(self) -> None:
        with self.changed:
            self._began, self._last_began = None, None
            self.changed.notify_all()

    # --- for the adapter ---

    @contextmanager
    def waiting(self, *, previous: bool = False, following: bool = False) -> Iterator[None]:
        """Encloses a wait for neighbours.

        Args:
            previous: True if this rank receives from the previous stage.
            following: True if this rank receives from the following stage.
        """
        begin = self._stamps.now()
        with self.changed:
            # Copies that were queued on a device cannot be cancelled when the bubble ends.
            self._idle_secs = self.forecast.wait_secs(len(self._waits)) if self._on_device else inf
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self._idle_secs = -inf
            end = self._stamps.now()
            if self._began is not None:
                self._waits.append((begin, end))
                self._received[0] += previous
                self._received[1] += following

    # --- for threads that copy or send, with ``changed`` ---

    @property
    def is_open(self) -> bool:
        """True while no iteration is being computed."""
        return self._began is None

    @property
    def is_tail(self) -> bool:
        """True if this rank has finished its passes, and others have not: its update is next."""
        return self._began is None and time.perf_counter() < self._tail_until

    def enter(self, secs: float) -> tuple[bool, torch.cuda.Event | None]:
        """Returns whether this rank is idle for at least ``secs``; and the event that a device must wait for until
        then."""
        if self._idle_secs < secs:
            return False, None
        self._idle_secs -= secs
        return True, self._stamps.waits_for

    def copy(self, nbytes: int) -> Transfer:
        began, span, rates = self._began, self.forecast.span_secs, tuple(self.rates)
        if began is None or span is None or not rates:
            return Transfer(self, self.copied, nbytes)
        deadline = MARGIN * span
        pace = Pace(clipped(self.forecast.windows, 0.0, deadline), deadline, median(rates))
        return Transfer(self, self.copied, nbytes, pace, began)

    def send(self, nbytes: int, bytes_per_sec: float | None, most_secs: float) -> Transfer:
        with self.changed:
            now = time.perf_counter()
            began, period, windows = self._last_began, self.forecast.period_secs, self.forecast.windows
        if began is None or period is None or not bytes_per_sec:
            return Transfer(self, self.sent, nbytes)
        deadline = now - began + min(MARGIN * period, most_secs)
        coming = (
            *clipped(windows, 0.0, period),
            *(Bubble(window.begin + period, window.end + period) for window in windows),
        )
        pace = Pace(clipped(coming, now - began, deadline), deadline, bytes_per_sec)
        return Transfer(self, self.sent, nbytes, pace, began)


@dataclass(eq=False)
class Transfer:
    """One copy, or one send, through a gate.

    Attributes:
        gate: The gate.
        tally: Counts the bytes.
        nbytes: Bytes in all.
        pace: Says when the rest must go beside compute; None: nothing is held back.
        began: Time from which the pace counts, of ``time.perf_counter``.
        held_secs: Time for which it was held back so far.
    """

    chunk_nbytes = CHUNK_NBYTES

    gate: BubbleGate
    tally: Tally
    nbytes: int
    pace: Pace | None = None
    began: float = 0.0
    held_secs: float = 0.0

    def __post_init__(self) -> None:
        self._rest = self.nbytes

    def moved(self, secs: float) -> None:
        if self.nbytes:
            self.gate.rates.append(self.nbytes / secs)

    def admit(self, nbytes: int) -> torch.cuda.Event | None:
        gate, pace = self.gate, self.pace
        secs = 0.0 if pace is None else nbytes / pace.bytes_per_sec
        with gate.changed:
            idle, event = gate.enter(secs)
            while not (idle or pace is None or gate.is_open):
                asked = time.perf_counter()
                due = self.began + pace.beside_from(self._rest)
                if asked >= due:
                    break
                gate.changed.wait(max(due - asked, _TICK_SECS))
                self.held_secs += time.perf_counter() - asked
                idle, event = gate.enter(secs)
            self._rest -= nbytes
            self.tally.nbytes += nbytes
            self.tally.in_bubbles += nbytes if idle or gate.is_tail else 0
        return event


_MODULE, _CLASS, _METHOD = "megatron.core.pipeline_parallel.p2p_communication", "P2PCommunicator", "_communicate"


def watch_pipeline(chunks: Sequence[nn.Module], undo: ExitStack) -> BubbleGate:
    """Returns the gate of a rank in Megatron's pipeline, which gets each wait until ``undo`` is closed.

    All messages of a pipeline pass one method of ``P2PCommunicator``. Schedules create a new communicator in each
    iteration, so the method of the class is wrapped. That costs two reads of the clock and a lock per message.

    Args:
        chunks: Model chunks on this rank.
        undo: Gets what removes the wrapper.
    """
    groups = megatron_core().parallel_state
    stage, stages = groups.get_pipeline_model_parallel_rank(), groups.get_pipeline_model_parallel_world_size()
    on_device = any(parameter.is_cuda for chunk in chunks for parameter in chunk.parameters())
    gate = BubbleGate(int(stage), int(stages), len(chunks), on_device=on_device)

    def communicate(original: Callable[..., Any], communicator: Any, **message: Any) -> Any:
        receives = {"previous": bool(message.get("recv_prev")), "following": bool(message.get("recv_next"))}
        if message.get("wait_on_reqs", True):
            with gate.waiting(**receives):
                return original(communicator, **message)
        # Interleaved schedules go on computing, and wait for the requests later.
        *received, requests = original(communicator, **message)
        return (*received, _watched(gate, requests, receives))

    look_up(_MODULE, f"{_CLASS}.{_METHOD}")
    undo.callback(Wrapped(look_up(_MODULE, _CLASS), _METHOD, communicate).close)
    return gate


def _watched(gate: BubbleGate, requests: Any, receives: dict[str, bool]) -> Any:
    """Returns wrapped requests, by name or in a row. Only requests that receive count as micro-batches."""
    if isinstance(requests, dict):
        return {
            name: _Request(gate, request, {key: value and name.startswith("recv") for key, value in receives.items()})
            for name, request in requests.items()
        }
    if isinstance(requests, Iterable):
        return [_Request(gate, request, receives) for request in requests]
    return requests


class _Request:
    """A request that reports its ``wait`` to the gate."""

    def __init__(self, gate: BubbleGate, request: Any, receives: dict[str, bool]) -> None:
        self._gate, self._request, self._receives = gate, request, receives

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._gate.waiting(**self._receives):
            return self._request.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
